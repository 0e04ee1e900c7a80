"""Throughput of workload W1 on vLLM, in this process, with dummy weights in one format after another.

Run it with a Python that has vLLM, from this repository: `python -m deploy.evaluation.experiments.peers.vllm_throughput
deploy/evaluation/shapes/llama-3.1-8b --formats bfloat16 awq --json FILE`. For Pando, `python -m
deploy.evaluation.experiments.gpu_table llama-3.1-8b llama-3.1-8b-awq` measures the same workload through all its
services; vLLM's engine is called directly, without HTTP, tokenizer or detokenizer.

Each format has a process of its own. With `--adapters 0 8 64`, the engine has room for the largest number of adapters
of rank 16, and the workload is run with each of these numbers in turn, request i with adapter i modulo their number, as
`python -m deploy.evaluation.experiments.adapters` does with Pando; without the option, vLLM has no support for adapters
switched on. Steps have as many rows and tokens as in the GPU table, prefixes are not cached,
and the first of the runs is not counted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from deploy.evaluation.bench.figures import Spread
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results
from deploy.evaluation.bench.workloads.w1 import TEMPERATURE, w1_requests
from deploy.evaluation.experiments.formats import FORMATS, shape_in

if TYPE_CHECKING:
    from collections.abc import Sequence

ROWS = 256
STEP_TOKENS = 16384
CONTEXT = 4096
RANK = 16  # of adapters
ARCHITECTURES: Final = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# vLLM looks into a checkpoint for the layers that GPTQ has quantized, unless they are named.
GPTQ_LAYERS: Final = {
    "modules_in_block_to_quantize": [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"],
    ]
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineRuns:
    """One process's part: a shape with weights in a format, and numbers of adapters; none: without their support."""

    shape: Path
    weights: str
    adapters: tuple[int, ...]
    runs: int
    results: Path | None
    command: str


def measure(part: EngineRuns) -> None:
    """Run the workload `runs` times and once before; print and write each figure as soon as there is one."""
    # Adapters are made with threads, which a process that is forked afterwards would wait for.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    import vllm  # type: ignore[import-not-found]  # not in this environment

    described = json.loads((part.shape / "config.json").read_text(encoding="utf-8"))
    architectures = [ARCHITECTURES[described["model_type"]]]
    with shape_in(part.shape, part.weights, architectures=architectures) as directory, TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"quantization": "fp8"} if part.weights == "fp8" else {}
        if FORMATS.get(part.weights, {}).get("quant_method") == "gptq":
            settings = {"hf_overrides": {"quantization_config": {**FORMATS[part.weights], **GPTQ_LAYERS}}}
        made: list[Any] = []
        if part.adapters:
            most = max(part.adapters)
            settings |= {"enable_lora": True, "max_loras": most, "max_cpu_loras": most, "max_lora_rank": RANK}
            made = lora_requests(part.shape, Path(folder), most)
        engine = vllm.LLM(
            model=str(directory), load_format="dummy", skip_tokenizer_init=True, seed=0, enable_prefix_caching=False,
            max_model_len=CONTEXT, max_num_seqs=ROWS, max_num_batched_tokens=STEP_TOKENS, **settings,
        )  # fmt: skip
        requests = w1_requests()
        prompts = [{"prompt_token_ids": list(request.segments[0].ids or ())} for request in requests]
        sampling = [
            vllm.SamplingParams(
                temperature=TEMPERATURE, ignore_eos=True, max_tokens=request.output_tokens, detokenize=False
            )
            for request in requests
        ]

        def run(count: int) -> float:
            used = [made[number % count] for number in range(len(prompts))] if count else None
            started = time.perf_counter()
            answers = engine.generate(prompts, sampling, use_tqdm=False, lora_request=used)
            tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
            return tokens / (time.perf_counter() - started)

        counts = part.adapters or (0,)
        rates: dict[int, list[float]] = {count: [] for count in counts}
        for number in range(1 + part.runs):
            for count in counts:
                rates[count].append(run(count))
                sys.stdout.write(f"run {number} with {count} adapters: {rates[count][-1]:.0f} tok/s\n")
                sys.stdout.flush()
                if number:
                    write(part, count, rates[count], vllm.__version__)


def write(part: EngineRuns, count: int, rates: Sequence[float], version: str) -> None:
    """Print and write the output tokens per second with so many adapters, without those of the first run."""
    name = f"{part.weights}, {count} adapters" if part.adapters else part.weights
    first, counted = rates[0], Spread.of(rates[1:])
    sys.stdout.write(f"{part.shape.name}, {name}: {counted.median:.0f} tok/s (first run {first:.0f})\n")
    sys.stdout.flush()
    if part.results is not None:
        provenance = replace(Provenance.collect(()), command=part.command)
        sheet = ResultSheet("w1", f"{part.shape.name} (dummy)", 1, provenance, f"vllm {version}, {name}")
        sheet.add_spread("output_throughput", counted, "tok/s")
        write_results(part.results, sheet.results)


def lora_requests(shape: Path, folder: Path, count: int) -> list[Any]:
    """Write random adapters into `folder`; return what names them in requests to vLLM."""
    from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]  # not in this environment

    # Only here: torch is needed, and the services' logs.
    from deploy.evaluation.experiments.random_adapters import make_adapters

    made = make_adapters(shape, folder, RANK, count)
    return [LoRARequest(name, number, directory) for number, (name, directory) in enumerate(made.items(), 1)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each format in a process of its own; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=Path, help="directory with config.json")
    parser.add_argument(
        "--formats", nargs="+", choices=("bfloat16", "fp8", *FORMATS), default=["bfloat16"], help="one after another"
    )
    parser.add_argument("--adapters", nargs="+", type=int, default=[], help="numbers of them, such as 0 8 64")
    parser.add_argument("--runs", type=int, default=2, help="that count, after one that does not")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results into the list in FILE")
    options = parser.parse_args(argv)
    given = shlex.join(["python", "-m", "deploy.evaluation.experiments.peers.vllm_throughput", *(argv or sys.argv[1:])])
    failed = 0
    for weights in options.formats:
        part = EngineRuns(options.shape, weights, tuple(options.adapters), options.runs, options.json, given)
        process = multiprocessing.get_context("spawn").Process(target=measure, args=(part,))
        process.start()
        process.join()
        failed |= process.exitcode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())

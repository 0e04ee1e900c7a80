"""Throughput of workload W1 on vLLM, in this process, with dummy weights in one format after another.

Run it with a Python that has vLLM, from this repository: `python -m deploy.evaluation.experiments.peers.vllm_throughput
deploy/evaluation/shapes/llama-3.1-8b --formats bfloat16 awq --json FILE`. For Pando, `python -m
deploy.evaluation.experiments.gpu_table llama-3.1-8b llama-3.1-8b-awq` measures the same workload through all its
services; vLLM's engine is called directly, without HTTP, tokenizer or detokenizer.

Each format has a process of its own. Steps have as many rows and tokens as in the GPU table, prefixes are not cached,
and the first of the runs is not counted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
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
ARCHITECTURES: Final = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# vLLM looks into a checkpoint for the layers that GPTQ has quantized, unless they are named.
GPTQ_LAYERS: Final = {
    "modules_in_block_to_quantize": [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"],
    ]
}  # fmt: skip


def measure(shape: Path, weights: str, runs: int, results: Path | None, command: str) -> None:
    """Run the workload `runs` times and once before; print and write the output tokens per second."""
    import vllm  # type: ignore[import-not-found]  # not in this environment

    described = json.loads((shape / "config.json").read_text(encoding="utf-8"))
    with shape_in(shape, weights, architectures=[ARCHITECTURES[described["model_type"]]]) as directory:
        settings: dict[str, Any] = {"quantization": "fp8"} if weights == "fp8" else {}
        if FORMATS.get(weights, {}).get("quant_method") == "gptq":
            settings = {"hf_overrides": {"quantization_config": {**FORMATS[weights], **GPTQ_LAYERS}}}
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
        rates = []
        for _ in range(1 + runs):
            started = time.perf_counter()
            answers = engine.generate(prompts, sampling, use_tqdm=False)
            tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
            rates.append(tokens / (time.perf_counter() - started))
    counted = Spread.of(rates[1:])
    sys.stdout.write(f"{shape.name}, {weights}: {counted.median:.0f} tok/s (first run {rates[0]:.0f})\n")
    sys.stdout.flush()
    if results is not None:
        label = f"vllm {vllm.__version__}, {weights}"
        sheet = ResultSheet("w1", f"{shape.name} (dummy)", 1, replace(Provenance.collect(()), command=command), label)
        sheet.add_spread("output_throughput", counted, "tok/s")
        write_results(results, sheet.results)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each format in a process of its own; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=Path, help="directory with config.json")
    parser.add_argument(
        "--formats", nargs="+", choices=("bfloat16", "fp8", *FORMATS), default=["bfloat16"], help="one after another"
    )
    parser.add_argument("--runs", type=int, default=2, help="that count, after one that does not")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results into the list in FILE")
    options = parser.parse_args(argv)
    given = shlex.join(["python", "-m", "deploy.evaluation.experiments.peers.vllm_throughput", *(argv or sys.argv[1:])])
    failed = 0
    for weights in options.formats:
        arguments = (options.shape, weights, options.runs, options.json, given)
        process = multiprocessing.get_context("spawn").Process(target=measure, args=arguments)
        process.start()
        process.join()
        failed |= process.exitcode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())

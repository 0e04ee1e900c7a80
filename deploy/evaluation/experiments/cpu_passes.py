"""Forward passes on a CPU by the type of the weights, in plain torch, and in deterministic mode.

    python -m deploy.evaluation.experiments.cpu_passes --model MODEL --json deploy/evaluation/results/cpu_passes.json

MODEL is a directory with safetensors in bfloat16, as `python -m deploy.evaluation.experiments.peers.export_model`
writes it.
Figures are processor time of one thread, so that other work on the machine changes them little; variants take turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from common.steps import EngineSpec
from deploy.evaluation.bench.figures import Spread
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results
from deploy.evaluation.experiments.cpu_products import processor_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.worker.engine.model_runner import ModelRunner

CONTEXT = 512
WORKS = {
    "decode, 1 row": [(CONTEXT - 1, 1)],
    "decode, 8 rows": [(CONTEXT - 1, 1)] * 8,
    "decode, 32 rows": [(CONTEXT - 1, 1)] * 32,
    "prompt of 256 tokens": [(0, 256)],
    "prompt of 1,016 tokens": [(0, 1016)],
}
# The kernels and the changes to the spec of each variant.
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "auto": ("auto", {}),
    "auto, KV in float32": ("auto", {"kv_dtype": "float32"}),
    "auto, deterministic": ("auto", {"deterministic": True}),
    "bfloat16": ("auto", {"dtype": "bfloat16"}),
    "float32": ("auto", {"dtype": "float32"}),
    "torch, bfloat16": ("torch", {"dtype": "bfloat16"}),
    "torch, float32": ("torch", {"dtype": "float32"}),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures, and write them if asked to; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="bundled name, directory or file (%(default)s)"
    )
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, help="(all)")
    parser.add_argument("--rounds", type=int, default=5, help="of all variants, after a first one (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results into the list in FILE")
    arguments = parser.parse_args(argv)
    sys.stdout.write(f"{processor_name()}, processor time of 1 thread, ms: median (least-largest)\n")
    measured = measure(arguments.model, arguments.variants, arguments.rounds)
    if arguments.json is not None:
        program, rounds = "python -m deploy.evaluation.experiments.cpu_passes", arguments.rounds
        command = f"{program} --model DIRECTORY --rounds {rounds} --json {arguments.json}"
        provenance = replace(Provenance.collect(()), command=command)
        for variant, figures in measured.items():
            sheet = ResultSheet("cpu-passes", arguments.model, 1, provenance, f"{variant}; {processor_name()}")
            for work, spread in figures.items():
                sheet.add_spread(work, spread, "ms")
            write_results(arguments.json, sheet.results)
    return 0


def measure(model: str, variants: Sequence[str], rounds: int) -> dict[str, dict[str, Spread]]:
    """Print and return the milliseconds of each work, by variant."""
    # Imported here: these load torch, which otherwise would delay `--help`.
    import torch

    from services.worker.engine.measuring.measurements import random_batch

    torch.set_num_threads(1)
    runners = {variant: load(model, variant) for variant in variants}
    measured: dict[str, dict[str, Spread]] = {variant: {} for variant in variants}
    for work, lengths in WORKS.items():
        batches = {name: random_batch(runner.capacity, runner.device, lengths) for name, runner in runners.items()}
        times: dict[str, list[float]] = {variant: [] for variant in variants}
        for completed in range(rounds + 1):
            for variant, runner in runners.items():
                started = time.process_time()
                runner.forward(batches[variant]).argmax(dim=-1).tolist()
                if completed:
                    times[variant].append(1e3 * (time.process_time() - started))
        for variant in variants:
            spread = measured[variant][work] = Spread.of(times[variant])
            line = f"{spread.median:10.1f} ({spread.low:.1f}-{spread.high:.1f})"
            sys.stdout.write(f"{work:26}{variant:22}{line}\n")
            sys.stdout.flush()
    for runner in runners.values():
        runner.close()
    return measured


def load(model: str, variant: str) -> ModelRunner:
    """Load a variant, on one thread."""
    from services.worker.engine.backends import RunnerOptions
    from services.worker.engine.loader import load_decoder

    backend, changes = VARIANTS[variant]
    spec = replace(EngineSpec(model, device_pages=1200, max_context=1024), **changes)  # type: ignore[arg-type]  # a table's
    return load_decoder(spec, lambda *_: None, RunnerOptions(device="cpu", threads=1, backend=backend))


if __name__ == "__main__":
    sys.exit(main())

"""Losses and gains of quantised weights: `python -m deploy.evaluation.experiments.quantization PART`.

`accuracy` predicts every token of some texts from all before it, with weights as they are, in FP8, and in the formats
that `--formats` names, and continues prompts greedily. Weights are rounded to nearest or, if `, calibrated` follows a
format, chosen by its published method on other texts (`quantization_methods.py`): AWQ for its own format, GPTQ for
other groups of integers, and measured scales of activations for static FP8. `gguf Q8_0` and other kinds of blocks are
stored in a GGUF file, and so is `gguf Q4_K_M`, llama.cpp's mixture of kinds; with `gguf MXFP4 layers`, embedding and
head are in Q8_0. `fp8 keys and values` leaves weights alone. Written are the mean negative log likelihood (nats per
token), the mean Kullback-Leibler divergence, how often the likeliest token is the same, in the texts and after the
prompts, and how many tokens of a continuation are the same until the first that is not.

`speed` times the linear layers of a model's shape, one after another, for some numbers of rows; weights come from
memory, not from a cache. On a GPU it replays captured passes; on a CPU with one thread, times are the thread's own. All
formats, integers of 4 bits beside cuBLAS, and the blocks of GGUF files on a CPU:

    python -m deploy.evaluation.experiments.quantization speed --device cuda deploy/evaluation/shapes/llama-3.1-8b
    python -m deploy.evaluation.experiments.quantization speed --device cuda deploy/evaluation/shapes/llama-3.1-8b \
        --rows 1 64 128 512 --ways "4 bits, groups of 128" "bfloat16 by the library"
    python -m deploy.evaluation.experiments.quantization speed --device cpu deploy/evaluation/shapes/llama-3.1-8b \
        --threads 1 --rows 1 8 64 256 --ways bfloat16 Q4_K Q6_K "8 bits, groups of 32"

`memory` writes a GGUF file of a model's shape with random blocks, starts all services with it on a CPU, and reads how
much memory the worker's process takes: at its peak while it loads, and after it has answered. Tokens a second are those
of one user's request.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.evaluation.bench.deployments import add_setting_arguments
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results
from services.worker.engine.host import limit_spinning

if TYPE_CHECKING:
    from collections.abc import Sequence

BENCHMARK = "quantization"
SHAPES = Path(__file__).parents[1] / "shapes"
ROWS = (1, 2, 4, 8, 16, 64, 128, 256, 512, 1024, 4096)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures, and write them if asked to; return the exit code."""
    arguments = parse(argv)
    limit_spinning()
    # Imported here: these load torch and its OpenMP runtime, which reads the variables that `limit_spinning` has set.
    if arguments.part == "accuracy":
        from deploy.evaluation.experiments.quantization_accuracy import measure_accuracy as measure
    elif arguments.part == "memory":
        from deploy.evaluation.experiments.quantization_memory import measure_memory as measure
    else:
        from deploy.evaluation.experiments.quantization_speed import measure_speed as measure
    command = shlex.join(
        ["python", "-m", "deploy.evaluation.experiments.quantization", *(sys.argv[1:] if argv is None else argv)]
    )
    provenance = replace(Provenance.collect(()), command=command)

    def sheet(model: str, label: str) -> ResultSheet:
        return ResultSheet(BENCHMARK, model, 1, provenance, label)

    sheets = measure(arguments, sheet)
    if arguments.json is not None:
        write_results(arguments.json, [result for each in sheets for result in each.results])
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    accuracy = parts.add_parser("accuracy", help="predictions of quantised weights against those of wider ones")
    accuracy.add_argument("--model", default="smollm2-135m-instruct", help="bundled name, directory or GGUF file")
    accuracy.add_argument("--dtype", default="bfloat16", help="of what is compared with, and of activations")
    accuracy.add_argument("--tokens", type=int, default=512, help="of each text, at most (%(default)s)")
    accuracy.add_argument("--prompts", type=int, default=16, help="how many are continued (%(default)s)")
    accuracy.add_argument("--new-tokens", type=int, default=48, help="of each continuation (%(default)s)")
    accuracy.add_argument("--formats", nargs="*", default=[], help="of the tests' stored_formats.py, or gguf KIND")
    accuracy.add_argument("texts", nargs="*", type=Path, help="files to predict; default: some of this repository")
    speed = parts.add_parser("speed", help="times of linear layers")
    speed.add_argument("shapes", nargs="*", type=Path, help="directories with a config.json each")
    speed.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="rows of a product, one after another")
    speed.add_argument("--ways", nargs="+", default=[], metavar="WAY", help="ways to compute them; default: all")
    speed.add_argument("--tp", type=int, default=1, help="of so many ranks, the first one's share")
    speed.add_argument("--threads", type=int, default=0, help="of a CPU; 0: as many as there are cores")
    speed.add_argument("--note", default="", help="to add to the label of results on a CPU (%(default)r)")
    speed.add_argument("--seconds", type=float, default=0.2, help="how long to repeat each product (%(default)s)")
    speed.set_defaults(shapes=[SHAPES / "llama-3.1-8b", SHAPES / "qwen3-14b"])
    memory = parts.add_parser("memory", help="of a worker on a CPU with weights in a GGUF file")
    memory.add_argument(
        "shape", nargs="?", type=Path, default=SHAPES / "llama-3.1-8b", help="directory with a config.json"
    )
    memory.add_argument("--kind", default="Q4_K_M", help="of its blocks, or Q4_K_M, a mixture of kinds (%(default)s)")
    memory.add_argument("--file", type=Path, help="where to write it, or where it is; default: deleted afterwards")
    memory.add_argument("--prompt-tokens", type=int, default=128, help="of the request (%(default)s)")
    memory.add_argument("--new-tokens", type=int, default=32, help="of its answer (%(default)s)")
    add_setting_arguments(memory)
    for part in (accuracy, speed):
        part.add_argument("--device", default="auto", help="auto, cpu or cuda")
    for part in (accuracy, speed, memory):
        part.add_argument("--json", type=Path, metavar="FILE", help="write results into the list in FILE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())

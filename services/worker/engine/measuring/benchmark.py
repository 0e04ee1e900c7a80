"""How fast the forward pass is here: `python -m services.worker.engine.measuring.benchmark --help`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from services.worker.engine.host import limit_spinning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.worker.engine.measuring.pass_times import Measurement


def parse(argv: Sequence[str] | None, backends: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m services.worker.engine.measuring.benchmark", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="bundled name, directory or GGUF file")
    parser.add_argument("--load-format", default="auto", help="auto, safetensors, gguf or dummy")
    parser.add_argument("--dtype", default="auto", help="type of the weights")
    parser.add_argument("--kv-dtype", default="auto", help="type of keys and values")
    parser.add_argument("--quantization", default="auto", help="auto or fp8")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: the cores there are")
    parser.add_argument("--backends", nargs="+", default=["auto"], choices=backends, help="kernels to compare")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32], help="rows that decode at once")
    parser.add_argument("--context", type=int, default=512, help="tokens that a decoding row sees")
    parser.add_argument("--prefills", nargs="+", type=int, default=[256, 1016], help="prompt lengths")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to repeat each work")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; return the exit code."""
    limit_spinning()
    # Only now: these load torch, and with it the runtime that reads what was set.
    from services.worker.engine.backends import BACKENDS
    from services.worker.engine.measuring.pass_times import run

    arguments = parse(argv, BACKENDS)
    sys.stdout.write(f"{'backend':10}{'work':36}{'best tok/s':>12}{'median tok/s':>14}{'best ms':>10}\n")

    def show(line: Measurement) -> None:
        figures = f"{line.best_rate:12.1f}{line.median_rate:14.1f}{line.best_ms:10.1f}"
        sys.stdout.write(f"{line.backend:10}{line.work:36}{figures}\n")
        sys.stdout.flush()

    results = run(arguments, show)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump([asdict(result) for result in results], file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())

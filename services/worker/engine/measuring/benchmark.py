"""Speed of the forward pass here: `python -m services.worker.engine.measuring.benchmark --help`."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from common.steps import EngineSpec
from services.worker.engine.host import limit_spinning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.worker.engine.model.batch import ForwardBatch
    from services.worker.engine.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Measurement:
    """One line of the table; rates in tokens per second, times in milliseconds."""

    backend: str
    work: str
    best_rate: float
    median_rate: float
    best_ms: float


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
    # After `limit_spinning`: this loads torch, and with it the OpenMP runtime that reads its settings once.
    from services.worker.engine.backends import BACKENDS

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


def measure(runner: ModelRunner, batch: ForwardBatch, seconds: float) -> list[float]:
    """Run `batch` and take the likeliest tokens, again and again; return seconds of each pass after the first."""

    def step() -> None:
        runner.forward(batch).argmax(dim=-1).tolist()  # waits for the device

    step()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return times


def run(arguments: argparse.Namespace, show: Callable[[Measurement], None]) -> list[Measurement]:
    """Measure every back end; `show` gets each line as it is known."""
    # After `limit_spinning`: these load torch, and with it the OpenMP runtime that reads its settings once.
    from services.worker.engine.backends import RunnerOptions
    from services.worker.engine.loader import load_decoder
    from services.worker.engine.measuring.measurements import random_batch

    results = []
    for backend in arguments.backends:
        spec = EngineSpec(
            arguments.model, load_format=arguments.load_format, dtype=arguments.dtype, kv_dtype=arguments.kv_dtype,
            quantization=arguments.quantization,
        )  # fmt: skip
        options = RunnerOptions(device=arguments.device, threads=arguments.threads, backend=backend)
        runner = load_decoder(spec, lambda *_: None, options)
        works = [
            (f"decode, {rows} rows at context {arguments.context}", [(arguments.context - 1, 1)] * rows)
            for rows in arguments.rows
        ]
        works += [(f"prefill, {tokens} tokens", [(0, tokens)]) for tokens in arguments.prefills]
        for work, lengths in works:
            tokens = sum(new for _, new in lengths)
            times = measure(runner, random_batch(runner.capacity, runner.device, lengths), arguments.seconds)
            best, median = min(times), statistics.median(times)
            results.append(Measurement(backend, work, tokens / best, tokens / median, best * 1e3))
            show(results[-1])
        runner.close()
    return results


if __name__ == "__main__":
    sys.exit(main())

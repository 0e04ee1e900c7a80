"""How long forward passes of made-up batches take."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.steps import EngineSpec
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.loader import load_decoder
from services.worker.engine.measuring.random_batches import random_batch

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

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
            times = measure(runner, random_batch(runner, lengths), arguments.seconds)
            best, median = min(times), statistics.median(times)
            results.append(Measurement(backend, work, tokens / best, tokens / median, best * 1e3))
            show(results[-1])
        runner.close()
    return results

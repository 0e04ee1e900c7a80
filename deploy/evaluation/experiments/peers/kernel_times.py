"""Times of calls on a GPU, replayed as a CUDA graph, and errors beside a float32 reference; for programs here."""

from __future__ import annotations

import statistics
import sys
import time
from typing import TYPE_CHECKING

import torch

from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

# Tensors that are read in turn: more than the second-level cache of an H200 holds.
COLD_BYTES = 160 * 1024**2
# Calls in a graph, at least: launching the graph does not count then.
LEAST_CALLS = 64
LARGEST_ERROR = 0.02


def copies_of(size: int) -> int:
    """Return the number of copies of tensors of `size` bytes that no cache holds."""
    return max(2, -(-COLD_BYTES // size))


def microseconds(calls: Sequence[Callable[[], object]], seconds: float) -> float:
    """Return the median time of one of `calls`, which run one after another in a graph; see `seconds_of`."""
    rounds = max(1, -(-LEAST_CALLS // len(calls)))

    def run() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    return 1e6 * seconds_of(run, seconds) / (rounds * len(calls))


def seconds_of(run: Callable[[], None], seconds: float) -> float:
    """Return the median seconds of a replay of `run`, captured as a CUDA graph, in replays of so many seconds."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < 3 or time.perf_counter() < end:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        found.append(before.elapsed_time(after) / 1e3)
    return statistics.median(found)


def checked(name: str, result: torch.Tensor, reference: torch.Tensor, largest: float = LARGEST_ERROR) -> float:
    """Return the error of a result: the norm of its difference from the reference, relative to the reference's norm.

    Raises:
        SystemExit: it is above `largest`, so that not the same was computed.
    """
    error = float((result.float() - reference.float()).norm() / reference.float().norm())
    if not error <= largest:
        raise SystemExit(f"{name}: the result differs from the float32 reference by {error:.3g} of its norm")
    return error


class Report:
    """Figures of several implementations, printed, and written to a file as they come if there is one."""

    def __init__(self, benchmark: str, model: str, path: Path | None) -> None:
        """Start empty, for a results file at `path`."""
        module = f"deploy.evaluation.experiments.peers.{benchmark}"
        self._provenance = Provenance.collect(["python", "-m", module, *sys.argv[1:]])
        self._benchmark = benchmark
        self._model = model
        self._path = path
        self._sheets: dict[str, ResultSheet] = {}

    def add(self, label: str, metric: str, value: float, unit: str) -> None:
        """Add a figure of an implementation; `label` names it."""
        if label not in self._sheets:
            self._sheets[label] = ResultSheet(self._benchmark, self._model, 1, self._provenance, label)
        self._sheets[label].add(metric, value, unit)
        print(f"{metric:56}{label:16}{value:10.2f} {unit}", flush=True)  # noqa: T201
        if self._path is not None:
            write_results(self._path, [each for sheet in self._sheets.values() for each in sheet.results])

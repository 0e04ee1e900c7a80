"""Captured passes on a CPU: a graph's stand-in runs again what it should have recorded, on the same memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from services.worker.engine.execution.decode_graphs import DecodeGraph
from services.worker.engine.execution.pass_graphs import PassGraphs
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.rank_model import RankModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    import torch

    from services.worker.engine.execution.cuda_graphs import CudaGraphs
    from services.worker.engine.model.batch import ForwardBatch

# How often each kind of graph was replayed in this process.
REPLAYS: Counter[str] = Counter()


@dataclass(frozen=True, slots=True)
class RunAgain:
    """Stands in for a `torch.cuda.CUDAGraph`."""

    name: str
    run: Callable[[], None]

    def replay(self) -> None:
        REPLAYS[self.name] += 1
        self.run()


def _capture_decoding(one: DecodeGraph, _pool: Any) -> None:
    graphs: dict[str, Any] = {name: RunAgain(name, run) for name, run in one._captured_runs()}
    one._graphs = graphs


def _capture(graphs: PassGraphs, report: Callable[[float], None]) -> None:
    """Capture decode passes as ranks of a group do; attention of chunks on a CPU cannot run between graphs."""
    passes: CudaGraphs[DecodeGraph] = graphs._decode_passes
    passes.capture(report, float("inf"), None, graphs._runner.agree)


_compute = ModelRunner.compute


def _compute_by_rows(runner: ModelRunner, batch: ForwardBatch) -> torch.Tensor:
    """Compute with page tables in the batch's own order, as attention on a CPU needs them."""
    if batch.table_rows is None:
        return _compute(runner, batch)
    rows = batch.table_rows.long()
    window = None if batch.window_table is None else batch.window_table[rows]
    return _compute(runner, replace(batch, page_table=batch.page_table[rows], window_table=window, table_rows=None))


def captured_stages() -> Iterator[AbstractContextManager[Any]]:
    """Yield the patches with which stages on CPUs run the executors of GPUs; models in one stage stay as they are."""
    yield patch.object(RankModel, "may_be_captured", property(lambda rank: rank.spec.stages > 1))
    yield patch.object(DecodeGraph, "capture", _capture_decoding)
    yield patch.object(DecodeGraph, "has_memory", lambda _one: True)
    yield patch.object(PassGraphs, "capture", _capture)
    yield patch.object(ModelRunner, "compute", _compute_by_rows)

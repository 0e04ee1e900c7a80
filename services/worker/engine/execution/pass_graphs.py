"""The passes of a model that are captured as CUDA graphs: those that decode, and those with few prompt tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from services.worker.engine.execution.cuda_graphs import CudaGraphs
from services.worker.engine.execution.decode_graphs import DecodeGraph, OverlappedModel, decode_capture_sizes
from services.worker.engine.execution.piecewise_graphs import (
    MOST_TOKENS,
    UNIT,
    PiecewiseGraph,
    largest_worthwhile_size,
    piecewise_capture_sizes,
)
from services.worker.engine.execution.stage_ends import NoEnds, StageEnds

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.steps import EngineSpec
    from services.worker.engine.execution.device_batch import DeviceBatch
    from services.worker.engine.execution.device_sampler import DeviceSampler
    from services.worker.engine.model_runner import ModelRunner

# Time limits at start-up for capturing decode graphs and piecewise graphs.
_DECODE_BUDGET_S, _PROMPT_BUDGET_S = 45.0, 15.0


class PassGraphs:
    """Owns the graphs of one rank; ranks of a group capture the same sizes in the same order."""

    def __init__(
        self, runner: OverlappedModel, spec: EngineSpec, rows: DeviceBatch, sampler: DeviceSampler | None,
        ends: StageEnds | NoEnds,
    ) -> None:  # fmt: skip
        """Prepare passes of `rows`; without `sampler`, a later stage samples."""
        self._runner = runner
        self._rows = rows
        self._ends = ends
        self._is_shared = spec.world_size > 1
        self._max_step_tokens = spec.max_step_tokens

        def make(size: int) -> DecodeGraph:
            return DecodeGraph(size, rows, runner, sampler, ends, has_adapters=spec.adapter_slots > 0)

        self._decode_passes = CudaGraphs(decode_capture_sizes(spec.max_rows), make)
        self._prompt_passes: CudaGraphs[PiecewiseGraph] = CudaGraphs((), self._make_prompt_pass)

    def capture(self, report: Callable[[float], None]) -> None:
        """Capture passes as graphs; `report` is called with the fraction that is done."""
        pool, agree = torch.cuda.graph_pool_handle(), self._runner.agree if self._is_shared else None
        # Ranks must capture the same passes, since these contain collectives.
        budgets = (math.inf, math.inf) if self._is_shared else (_DECODE_BUDGET_S, _PROMPT_BUDGET_S)
        self._decode_passes.capture(lambda share: report(0.8 * share), budgets[0], pool, agree)
        most = largest_worthwhile_size(self._max_step_tokens, self._make_prompt_pass, pool, agree)
        self._prompt_passes = CudaGraphs(piecewise_capture_sizes(most), self._make_prompt_pass, UNIT)
        self._prompt_passes.capture(lambda share: report(0.8 + 0.2 * share), budgets[1], pool, agree)

    def decode(self, rows: int) -> DecodeGraph:
        """Return the pass that decodes so many rows, captured or not."""
        return self._decode_passes.of(rows)

    def prompt(self, tokens: int) -> PiecewiseGraph | None:
        """Return the captured pass for so many tokens, some of prompts; None: it runs kernel by kernel."""
        return self._prompt_passes.captured(tokens)

    def _make_prompt_pass(self, size: int) -> PiecewiseGraph:
        return PiecewiseGraph(size, self._rows, self._runner, self._ends)


def ends_of(runner: ModelRunner, spec: EngineSpec) -> StageEnds:
    """Return the ends of a rank's stage, for the largest pass that is captured."""
    most = max(spec.max_rows, min(spec.max_step_tokens, MOST_TOKENS))
    return StageEnds(runner.group.links, (most, runner.hidden_size), runner.activation_dtype, runner.device)

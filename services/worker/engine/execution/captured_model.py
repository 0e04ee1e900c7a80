"""Executors of captured passes and their runners: of a model in one stage, of the last stage, and of those before."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from services.worker.engine.execution.captured_stages import EarlierStageExecutor, LastStageExecutor
from services.worker.engine.execution.overlapped_executor import OverlappedExecutor
from services.worker.engine.execution.overlapped_runner import OverlappedRunner
from services.worker.engine.execution.pass_graphs import ends_of
from services.worker.engine.execution.staged_runner import StagedRunner
from services.worker.engine.measuring.warm_up import warm_up

if TYPE_CHECKING:
    from common.steps import EngineSpec
    from services.worker.engine.execution.interface import AdapterStore, ProgressReport, Transfers
    from services.worker.engine.grammars.row_masks import RowMasks
    from services.worker.engine.model_runner import ModelRunner
    from services.worker.engine.plans.plan import PlanLimits
    from services.worker.engine.plans.rows import RowStates
    from services.worker.engine.plans.saved_states import RowStateCopies
    from services.worker.engine.vision.row_images import RowImages

CapturedExecutor = OverlappedExecutor | LastStageExecutor | EarlierStageExecutor
CapturedRunner = OverlappedRunner | StagedRunner

# Pause between two looks at whether a pass of a GPU is ready.
_PAUSE_S = 20e-6


def capture(runner: ModelRunner, spec: EngineSpec, report: ProgressReport) -> CapturedExecutor:
    """Return the executor of a rank on a GPU, with its CUDA graphs; ranks of a group do so at the same time."""
    with torch.inference_mode():
        executor = _executor_of(runner, spec)
        executor.capture(lambda share: report(0.99 + 0.01 * share, "capturing graphs"))
        slots = runner.adapters.slots if runner.adapters else 0
        warm_up(partial(make_runner, executor), runner.capacity, spec, slots)
    return executor


def make_runner(  # noqa: PLR0913  (all that passes touch)
    executor: CapturedExecutor,
    rows: RowStates,
    limits: PlanLimits,
    *,
    transfers: Transfers | None = None,
    states: RowStateCopies | None = None,
    reports_tokens: bool = True,
    grammars: RowMasks | None = None,
    adapters: AdapterStore | None = None,
    images: RowImages | None = None,
) -> CapturedRunner:
    """Return a runner that takes over `rows`; see the runners for its arguments, of which stages have fewer."""
    if not isinstance(executor, EarlierStageExecutor):
        executor.use_grammars(grammars)
    if not isinstance(executor, OverlappedExecutor):
        return StagedRunner(
            rows, limits, executor, transfers=transfers, states=states, reports_tokens=reports_tokens, pause_s=_PAUSE_S
        )
    executor.use_images(images)
    return OverlappedRunner(
        rows, limits, executor, transfers=transfers, states=states, reports_tokens=reports_tokens, adapters=adapters,
        images=images,
    )  # fmt: skip


def _executor_of(runner: ModelRunner, spec: EngineSpec) -> CapturedExecutor:
    if spec.stages == 1:
        return OverlappedExecutor(runner, spec)
    if spec.is_last_stage:
        return LastStageExecutor(runner, spec, ends_of(runner, spec))
    return EarlierStageExecutor(runner, spec, ends_of(runner, spec))

"""Models that see images with the GPU's kernels and executor, in Triton's interpreter; importing this needs Triton."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

from common.steps import EngineSpec
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.overlapped_executor import OverlappedExecutor
from services.worker.engine.execution.overlapped_runner import OverlappedRunner
from services.worker.engine.kernels.gpu.backend import GpuBackend
from services.worker.engine.loader import load_decoder
from services.worker.engine.plans.plan import PlanLimits
from services.worker.engine.plans.rows import RowStates
from services.worker.engine.vision.row_images import RowImages
from tests.services.worker.engine.vision.driving import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from common.steps import StepPlan, StepResult
    from services.worker.engine.kernels.interface import KernelBackend

PAGES = 64


class _Interpreted(GpuBackend):
    """The same kernels, for a model that is loaded without graphs."""

    name = "interpreted"


class OverlappedEngine:
    """The part of an engine that a session uses, over the runner of GPUs."""

    def __init__(self, runner: OverlappedRunner) -> None:
        self._runner = runner

    @torch.inference_mode()
    def execute(self, plan: StepPlan, emit: Callable[[StepResult], None]) -> None:
        self._runner.run(plan, emit)

    @torch.inference_mode()
    def settle(self, is_wanted: Callable[[], bool]) -> None:
        self._runner.settle(is_wanted)


def overlapped(directory: Path, max_rows: int = 2, max_context: int = 96, pages: int = PAGES) -> OverlappedEngine:
    """Return an engine that has loaded a model and its encoder, in float32."""

    def select(_library: object, dtype: torch.dtype, device: torch.device, *_: object) -> KernelBackend:
        return _Interpreted(dtype, device, max_rows=max_rows)

    spec = EngineSpec(
        str(directory), dtype="float32", max_rows=max_rows, max_context=max_context, page_size=PAGE,
        device_pages=pages + 1, vision=True,
    )  # fmt: skip
    with patch("services.worker.engine.rank_model.select_backend", select):
        runner = load_decoder(spec, lambda *_: None, RunnerOptions(backend="torch", threads=1, device="cpu"))
    # One page is that of padding rows.
    runner.capacity = replace(runner.capacity, device_pages=pages)
    assert runner.vision is not None
    images = RowImages(runner, runner.vision.config)
    executor = OverlappedExecutor(runner, spec)
    executor.use_images(images)
    limits = PlanLimits(runner.capacity.vocabulary_size, pages, spec.max_step_tokens)
    return OverlappedEngine(OverlappedRunner(RowStates(max_rows, max_context, PAGE), limits, executor, images=images))

"""Images with the GPU's kernels and executor against `transformers`, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from common.steps import EngineSpec, StepPlan
from common.types import StepId
from services.worker.engine.loader import load_decoder
from services.worker.engine.plans.plan import PlanLimits
from services.worker.engine.plans.rows import RowStates
from services.worker.engine.vision.row_images import RowImages
from tests.services.worker.engine.scenario import chunk
from tests.services.worker.engine.vision.driving import GREEDY, PAGE, Session
from tests.services.worker.engine.vision.models import expected, picture, prompt, save

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.overlapped_executor import OverlappedExecutor
from services.worker.engine.execution.overlapped_runner import OverlappedRunner
from services.worker.engine.kernels.gpu.backend import GpuBackend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from common.steps import StepResult
    from services.worker.engine.kernels.interface import KernelBackend

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off where there is a GPU"),
]

PAGES = 64
TOKENS = 4


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


def overlapped(directory: Path, monkeypatch: pytest.MonkeyPatch) -> OverlappedEngine:
    def select(_library: object, dtype: torch.dtype, device: torch.device, *_: object) -> KernelBackend:
        return _Interpreted(dtype, device, max_rows=2)

    monkeypatch.setattr("services.worker.engine.loader.select_backend", select)
    spec = EngineSpec(
        str(directory), dtype="float32", max_rows=2, max_context=96, page_size=PAGE, device_pages=PAGES + 1, vision=True
    )
    runner = load_decoder(spec, lambda *_: None, RunnerOptions(backend="torch", threads=1, device="cpu"))
    # One page is that of padding rows.
    runner.capacity = replace(runner.capacity, device_pages=PAGES)
    assert runner.vision is not None
    images = RowImages(runner, runner.vision.config)
    executor = OverlappedExecutor(runner, spec)
    executor.use_images(images)
    limits = PlanLimits(runner.capacity.vocabulary_size, PAGES, spec.max_step_tokens)
    return OverlappedEngine(OverlappedRunner(RowStates(2, 96, PAGE), limits, executor, images=images))


@pytest.mark.parametrize("family", ["smolvlm", "qwen3-vl", "gemma3"])
def test_prompts_with_images_and_passes_after_them(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, family)
    # Six squares of patches take three positions.
    rows, columns = (2, 3) if family == "qwen3-vl" else (1, 1)
    asked = prompt([5, 17, 60], picture(family, rows, columns, seed=1), [3, 44, 8])
    session = Session(overlapped(tmp_path, monkeypatch), GREEDY)  # type: ignore[arg-type]  # all that a session uses
    opened, cut = session.open(0, asked), asked.border(len(asked.ids) - 6)
    session.run(replace(opened, prefills=(chunk(0, 0, cut),)))
    session.run(StepPlan(StepId(0), prefills=(chunk(0, cut, len(asked.ids) - cut),)))
    session.run(StepPlan(StepId(0), steps=TOKENS - 1))
    tokens, _ = expected(tmp_path, asked, TOKENS)
    assert session.answers[0].tokens == tokens

"""Images with the GPU's kernels and executor against `transformers`, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from common.steps import StepPlan
from common.types import StepId
from tests.services.worker.engine.scenario import chunk
from tests.services.worker.engine.vision.driving import GREEDY, Session
from tests.services.worker.engine.vision.models import expected, picture, prompt, save

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")
from tests.services.worker.engine.vision.interpreted import overlapped

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off where there is a GPU"),
]

TOKENS = 4


@pytest.mark.parametrize("family", ["smolvlm", "qwen3-vl", "gemma3"])
def test_prompts_with_images_and_passes_after_them(family: str, tmp_path: Path) -> None:
    save(tmp_path, family)
    # Six squares of patches take three positions.
    rows, columns = (2, 3) if family == "qwen3-vl" else (1, 1)
    asked = prompt([5, 17, 60], picture(family, rows, columns, seed=1), [3, 44, 8])
    session = Session(overlapped(tmp_path), GREEDY)  # type: ignore[arg-type]  # all that a session uses
    opened, cut = session.open(0, asked), asked.border(len(asked.ids) - 6)
    session.run(replace(opened, prefills=(chunk(0, 0, cut),)))
    session.run(StepPlan(StepId(0), prefills=(chunk(0, cut, len(asked.ids) - cut),)))
    session.run(StepPlan(StepId(0), steps=TOKENS - 1))
    tokens, _ = expected(tmp_path, asked, TOKENS)
    assert session.answers[0].tokens == tokens

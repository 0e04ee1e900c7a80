"""Prompts with images in piecewise CUDA graphs against passes kernel by kernel: the same logits, tokens, embeddings.

Without a GPU its kernels run in Triton's interpreter, and a pass is not replayed but computed on the memory of a graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from common.steps import StepPlan
from common.types import EncoderOutputId, Pooling, RowSlot, StepId
from services.worker.engine.vision.row_images import RowImages
from tests.services.worker.engine.driving import random_ids
from tests.services.worker.engine.scenario import chunk
from tests.services.worker.engine.vision.driving import GREEDY, PAGE, Session, engine_of
from tests.services.worker.engine.vision.models import VOCABULARY, Prompt, picture, prompt, save, save_wide

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")
from services.worker.engine.execution.overlapped_executor import OverlappedExecutor
from services.worker.engine.execution.pass_graphs import PassGraphs
from tests.services.worker.engine.vision.interpreted import overlapped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from services.worker.engine.execution.engine import ModelEngine
    from services.worker.engine.execution.piecewise_graphs import PiecewiseGraph
    from services.worker.engine.model.batch import ForwardBatch
    from services.worker.engine.plans.passes import ForwardPass
    from services.worker.engine.plans.rows import RowStates

pytestmark = pytest.mark.slow

ON_GPU = torch.cuda.is_available()
DEVICES = (
    pytest.param("cpu", marks=pytest.mark.skipif(ON_GPU, reason="Triton's interpreter is off where there is a GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
)
# Of logits and embeddings, relative to their norm. On a GPU they are bfloat16, and products of padded passes may have
# other orders of sums; another picture changes far more.
TOLERANCES = {"cpu": 1e-4, "cuda": 3e-2}
# Graphs of a CPU; of several passes in one of them, those before leave other tokens in the padding.
SIZES = (16, 40)
KEPT = EncoderOutputId(1)


def text(count: int, seed: int) -> list[int]:
    return random_ids(count, VOCABULARY - 5, seed)


@dataclass
class Recorded:
    """One pass with prompts."""

    has_images: bool = False
    has_coordinates: bool = False
    is_captured: bool = False
    logits: dict[tuple[int, tuple[int, ...]], torch.Tensor] = field(default_factory=dict)
    """Of a row and its tokens so far."""


@dataclass
class Recorder:
    """Lets a session compute, and keeps what its passes with prompts return."""

    session: Session
    passes: list[Recorded] = field(default_factory=list)

    def into(self, images: RowImages, batch: ForwardBatch, forward: ForwardPass) -> ForwardBatch:
        seeing = INTO(images, batch, forward)
        self.passes[-1].has_images = seeing.images is not None
        self.passes[-1].has_coordinates = seeing.coordinates is not None
        return seeing

    def compute(
        self, executor: OverlappedExecutor, rows: RowStates, forward: ForwardPass, report_ready: Callable[[], None]
    ) -> Any:
        self.passes.append(Recorded())
        sampled = [(row, tuple(self.session.answers[row].tokens)) for row in forward.sampled_rows.tolist()]
        logits, scored = COMPUTE(executor, rows, forward, report_ready)
        for key, its in zip(sampled, logits.float().cpu(), strict=True):
            self.passes[-1].logits[key] = its.clone()
        return logits, scored

    def record(self, life: Iterable[StepPlan], prompt: Any) -> None:
        """Carry plans out with `prompt` in place of `PassGraphs.prompt`."""

        def counted(graphs: PassGraphs, tokens: int) -> PiecewiseGraph | None:
            one: PiecewiseGraph | None = prompt(graphs, tokens)
            self.passes[-1].is_captured = one is not None
            return one

        with (
            patch.object(RowImages, "into", lambda *given: self.into(*given)),
            patch.object(OverlappedExecutor, "_compute_mixed", lambda *given: self.compute(*given)),
            patch.object(PassGraphs, "prompt", counted),
        ):
            for plan in life:
                self.session.run(plan)


INTO, COMPUTE, PROMPT = RowImages.into, OverlappedExecutor._compute_mixed, PassGraphs.prompt


def captured_prompts(device: str) -> Any:
    """Return a function that finds the graph of a pass on a device."""
    if device == "cuda":
        return PROMPT
    made: dict[int, PiecewiseGraph] = {}

    def find(graphs: PassGraphs, tokens: int) -> PiecewiseGraph:
        size = next(size for size in SIZES if size >= tokens)
        return made.setdefault(size, graphs._make_prompt_pass(size))

    return find


def bare(prompt: Prompt, *places: int, output: EncoderOutputId | None = None) -> Prompt:
    """Return a prompt some of whose images have no pixels, as they are computed, or kept as `output`."""
    images = [
        replace(image, pixels=None, output=output) if i in places else image for i, image in enumerate(prompt.images)
    ]
    return replace(prompt, images=tuple(images))


def life_of(session: Session, family: str) -> Iterator[StepPlan]:
    """Yield plans of rows with images new and known, cut in two, beside and between texts and rows that decode."""
    sizes = ((1, 1), (1, 1)) if family == "gemma3" else ((2, 3), (1, 2))
    large, small = (picture(family, *size, seed=seed) for seed, size in enumerate(sizes, 1))
    ids = text(12, 1), text(20, 2), text(4, 3)
    first = prompt(ids[0], large, ids[1])
    keeping = replace(first, images=(replace(first.images[0], output=KEPT),))
    # Chunks end before the image's first token, and at a later one, which is that of a block.
    border, middle = 13, 23 if family == "gemma3" else 16
    total, known = len(first.ids), (12 + len(large.ids)) // PAGE * PAGE + PAGE
    nothing = StepPlan(StepId(0))
    yield replace(session.open(1, prompt(text(6, 5))), prefills=(chunk(1, 0, 6),))
    yield replace(session.open(0, keeping), prefills=(chunk(0, 0, border),))
    yield replace(nothing, prefills=(chunk(0, border, middle - border),))
    beside = chunk(0, middle, total - middle), chunk(2, 0, 5)
    yield replace(session.open(2, prompt(text(5, 6))), prefills=beside)
    yield nothing
    # Later turns, whose prefix is in the pages of the row before: without a new image, and with one.
    for closed, after in (((0, 1, 2), (ids[2],)), ((0,), (small, ids[2]))):
        turn = bare(prompt(ids[0], large, ids[1], *after), 0)
        opened, length = session.open(0, turn, computed=known), len(turn.ids) - known
        yield replace(opened, closes=tuple(map(RowSlot, closed)), prefills=(chunk(0, known, length),))
    # An image that is kept as another row left it, where nothing of the row is computed, and where a part of it is.
    kept = bare(prompt(text(4, 7), large, text(3, 8)), 0, output=KEPT)
    yield replace(session.open(3, kept), prefills=(chunk(3, 0, len(kept.ids)),))
    if family != "gemma3":
        half = session.open(0, bare(first, 0, output=KEPT), computed=PAGE)
        yield replace(half, closes=(RowSlot(0), RowSlot(3)), prefills=(chunk(0, PAGE, total - PAGE),))
    # One that is pooled.
    pooled = session.open(0, prompt(text(3, 9), small, text(2, 4)))
    length = len(pooled.opens[0].token_ids)
    opens = (replace(pooled.opens[0], pooling=Pooling.MEAN, max_total_tokens=length),)
    yield replace(pooled, closes=(RowSlot(0),), opens=opens, prefills=(chunk(0, 0, length),))
    yield replace(nothing, closes=(RowSlot(0), RowSlot(3)) if family == "gemma3" else (RowSlot(0),))


# Whether passes of `life_of` have images, and whether their coordinates are others than positions.
NEITHER, COORDINATES, IMAGES, BOTH = (False, False), (False, True), (True, False), (True, True)
KINDS = [NEITHER, COORDINATES, BOTH, BOTH, NEITHER, BOTH, BOTH, BOTH, BOTH]
# Positions have one axis, and no chunk ends within an image.
KINDS_OF_BLOCKS = [NEITHER, NEITHER, IMAGES, IMAGES, NEITHER, IMAGES, IMAGES, IMAGES]
FAMILIES = [
    pytest.param("qwen2.5-vl", marks=pytest.mark.extended),
    "qwen3-vl",
    pytest.param("gemma3", marks=pytest.mark.extended),
]


def engine_on(directory: Path, family: str, device: str) -> ModelEngine:
    if device == "cuda":
        # Where programs are compiled for the first time, too, all sizes are captured.
        with patch("services.worker.engine.execution.pass_graphs._PROMPT_BUDGET_S", math.inf):
            return engine_of(save_wide(directory, family), "auto", device=device, dtype="bfloat16")
    return overlapped(save(directory, family), max_rows=4, max_context=320, pages=80)  # type: ignore[return-value]  # all that a session uses


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_with_images_are_computed_in_graphs_as_without_them(family: str, device: str, tmp_path: Path) -> None:
    engine, tolerance = engine_on(tmp_path, family, device), TOLERANCES[device]
    alone, captured = (Recorder(Session(engine, GREEDY)) for _ in range(2))
    alone.record(life_of(alone.session, family), lambda _graphs, _tokens: None)
    captured.record(life_of(captured.session, family), captured_prompts(device))
    assert [(each.has_images, each.has_coordinates) for each in captured.passes] == (
        KINDS_OF_BLOCKS if family == "gemma3" else KINDS
    )
    assert all(each.is_captured for each in captured.passes)
    assert not any(each.is_captured for each in alone.passes)
    compared = 0
    for without, within in zip(alone.passes, captured.passes, strict=True):
        # Rows that decode may have other tokens on a GPU, after logits that were nearly the same.
        for row in without.logits.keys() & within.logits.keys():
            reference, own = without.logits[row], within.logits[row]
            assert (own - reference).norm() < tolerance * reference.norm()
            first, second = reference.topk(2).values
            if first - second > 4 * (own - reference).abs().max():
                assert own.argmax() == reference.argmax()
            compared += 1
    # The rows that end a prompt have had no tokens before.
    assert compared >= 7
    vectors = [np.frombuffer(each.session.embeddings[0], np.float32) for each in (alone, captured)]
    assert np.linalg.norm(vectors[1] - vectors[0]) < tolerance * np.linalg.norm(vectors[0])
    if device == "cpu":
        assert captured.session.answers == alone.session.answers
        assert sum(len(answer.tokens) for answer in alone.session.answers.values()) >= 8

"""When images are encoded, how long their embeddings stay, and which plans are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from common.steps import RowOpen, StepPlan
from common.types import EncoderOutputId, RowImage, RowSlot, StepId
from services.worker.engine.encoder.config import EncoderActivation
from services.worker.engine.execution.interface import InvalidPlanError
from services.worker.engine.model.batch import ForwardBatch, PlacedImages
from services.worker.engine.plans.passes import ForwardPass, gather, make_pass
from services.worker.engine.plans.plan import PlanLimits, apply_bookkeeping
from services.worker.engine.plans.rows import RowStates
from services.worker.engine.vision.config import VisionConfig
from services.worker.engine.vision.row_images import RowImages
from tests.services.worker.engine.scenario import chunk, open_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.worker.engine.vision.encoder import EncoderImage

PLACEHOLDER = 7
CONFIG = VisionConfig(
    "", PLACEHOLDER, width=1, hidden_size=1, intermediate_size=1, layers=0, heads=1, patch_size=1,
    activation=EncoderActivation.GELU, merge=2,
)  # fmt: skip
LIMITS = PlanLimits(vocabulary_size=10, device_pages=64, max_step_tokens=256)


def batch_of(forward: ForwardPass) -> ForwardBatch:
    """Return a batch of a pass of which only the positions count."""
    nothing = torch.empty(0)
    return ForwardBatch(
        nothing, torch.arange(100, 100 + forward.tokens), *(nothing,) * 5, decode_rows=0, max_query_length=1,
        max_key_length=1,
    )  # fmt: skip


class CountingModel:
    """Embeds each row of pixels [embeddings, width] as itself, and keeps what it was asked for."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.activation_dtype = torch.float32
        self.asked: list[int] = []
        # Results are then parts of one tensor.
        self.computes_together = False

    def encode_images(self, images: Sequence[EncoderImage]) -> list[torch.Tensor]:
        self.asked.append(len(images))
        own = [image.pixels(self.device, torch.float32) for image in images]
        return list(torch.split(torch.cat(own), [len(each) for each in own])) if self.computes_together else own

    def count_embeddings(self, image: EncoderImage) -> int:
        if len(image.shape) != 2:
            raise ValueError("no image")
        return image.shape[0]


class Rows:
    """Rows, their images, and the plans that both take."""

    def __init__(self) -> None:
        self.model = CountingModel()
        self.images = RowImages(self.model, CONFIG)
        self.states = RowStates(4, 64, 16)

    def run(self, plan: StepPlan) -> ForwardPass:
        chunks = apply_bookkeeping(self.images.admit(plan, self.states), self.states, LIMITS)
        return make_pass(self.states, self.states.decoding(), chunks)

    def compute(self, plan: StepPlan) -> list[tuple[int, float]]:
        """Return the places of embeddings of a pass, and their first components."""
        forward = self.run(plan)
        placed = self.images.into(batch_of(forward), forward).images
        self.states.advance_prefill(forward.chunks.rows, forward.chunks.lengths)
        self.states.append_tokens(forward.sampled_rows, np.ones(forward.sampled_rows.size, np.int32))
        if placed is None:
            return []
        assert isinstance(placed, PlacedImages)
        return list(zip(placed.places.tolist(), placed.embeddings[:, 0].tolist(), strict=True))


def image(offset: int, first: float, length: int) -> RowImage:
    pixels = np.arange(first, first + length, dtype=np.float32)[:, None]
    return RowImage(bytes(32), offset, length, (1, 1), pixels)


def opened(row: int, ids: list[int], *images: RowImage, computed: int = 0) -> RowOpen:
    return replace(open_row(row, ids, range(row * 4, row * 4 + 4), computed=computed), images=images)


def plan(*opens: RowOpen, chunks: Sequence[tuple[int, int, int]] = (), closes: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(
        StepId(0), opens=opens, prefills=tuple(chunk(*each) for each in chunks), closes=tuple(map(RowSlot, closes))
    )


CUT = [1, -5, -5, 2, -5, 3]


def test_an_image_that_chunks_cut_is_encoded_once_and_placed_between_marks() -> None:
    rows = Rows()
    assert rows.compute(plan(opened(1, CUT, image(1, 10.0, 3)), chunks=[(1, 0, 2)])) == [(1, 10.0)]
    assert rows.states.token_ids[1, :6].tolist() == [1, PLACEHOLDER, PLACEHOLDER, 2, PLACEHOLDER, 3]
    assert rows.compute(plan(chunks=[(1, 2, 2)])) == [(0, 11.0)]
    assert rows.compute(plan(chunks=[(1, 4, 2)])) == [(0, 12.0)]
    assert rows.compute(plan()) == []
    assert rows.model.asked == [1]
    assert not rows.images.held


def test_new_images_of_a_pass_are_encoded_together_and_later_ones_when_they_are_reached() -> None:
    rows = Rows()
    both = opened(0, [-1, -1, 4, -2, -2], image(0, 10.0, 2), image(3, 20.0, 2))
    other = opened(2, [5, -3], image(1, 30.0, 1))
    assert rows.compute(plan(both, other, chunks=[(0, 0, 3), (2, 0, 2)])) == [(0, 10.0), (1, 11.0), (4, 30.0)]
    # Row 2 decodes, and comes first.
    assert rows.compute(plan(chunks=[(0, 3, 2)])) == [(1, 20.0), (2, 21.0)]
    assert rows.model.asked == [2, 1]


def test_computed_images_come_without_pixels_and_are_not_encoded() -> None:
    rows = Rows()
    known = RowImage(bytes(32), 0, 2, (1, 1))
    row = opened(0, [-1, -1, 4, -2, -2], known, image(3, 20.0, 2), computed=2)
    assert rows.compute(plan(row, chunks=[(0, 2, 3)])) == [(1, 20.0), (2, 21.0)]
    assert rows.model.asked == [1]


def test_an_image_of_which_a_part_is_computed_is_encoded_for_the_rest() -> None:
    rows = Rows()
    row = opened(0, [-1, -1, 4], image(0, 10.0, 2), computed=1)
    assert rows.compute(plan(row, chunks=[(0, 1, 2)])) == [(0, 11.0)]


@pytest.mark.parametrize("ends", ["closed", "reset"])
def test_nothing_is_kept_of_rows_that_end_before_their_images(ends: str) -> None:
    rows = Rows()
    rows.compute(plan(opened(1, CUT, image(1, 10.0, 3)), chunks=[(1, 0, 2)]))
    assert rows.images.held
    if ends == "closed":
        rows.run(plan(closes=(1,)))
    else:
        rows.images.reset()
    assert not rows.images.held


def kept_as(number: int, given: RowImage, *, with_pixels: bool = True) -> RowImage:
    return replace(given, output=EncoderOutputId(number), pixels=given.pixels if with_pixels else None)


def test_kept_embeddings_outlive_their_row_and_need_no_pixels() -> None:
    rows = Rows()
    rows.compute(plan(opened(0, [-1, -1, 4], kept_as(7, image(0, 10.0, 2))), chunks=[(0, 0, 3)]))
    rows.compute(plan(closes=(0,)))
    assert rows.images.kept_embeddings == 2
    later = kept_as(7, image(1, 10.0, 2), with_pixels=False)
    assert rows.compute(plan(opened(1, [5, -1, -1, 4], later), chunks=[(1, 0, 2)])) == [(1, 10.0)]
    # What a row was opened with stays, although no other row may use it any more.
    rows.run(replace(plan(), dropped_outputs=(EncoderOutputId(7), EncoderOutputId(8))))
    assert not rows.images.kept_embeddings
    assert rows.compute(plan(chunks=[(1, 2, 2)])) == [(0, 11.0)]
    assert rows.model.asked == [1]
    with pytest.raises(InvalidPlanError, match="no output 7 of 2 embeddings is kept"):
        rows.run(plan(opened(2, [5, -1, -1, 4], later)))


def test_kept_embeddings_have_no_other_images_in_their_memory() -> None:
    rows = Rows()
    rows.model.computes_together = True
    row = opened(0, [*[-1] * 4, *[-2] * 2, 4], kept_as(7, image(0, 0.0, 4)), image(4, 4.0, 2))
    assert len(rows.compute(plan(row, chunks=[(0, 0, 7)]))) == 6
    (tensor,) = rows.images._outputs.values()
    assert tensor.untyped_storage().nbytes() == 4 * tensor.element_size()


def test_the_same_image_in_one_pass_or_in_a_later_one_is_encoded_once() -> None:
    rows = Rows()
    same = [kept_as(7, image(offset, 10.0, 1)) for offset in (0, 2, 4)]
    row = opened(0, [-1, 5, -1, 5, -1, 5], *same)
    assert rows.compute(plan(row, chunks=[(0, 0, 4)])) == [(0, 10.0), (2, 10.0)]
    assert rows.compute(plan(chunks=[(0, 4, 2)])) == [(0, 10.0)]
    assert rows.model.asked == [1]
    assert rows.images.kept_embeddings == 1


def test_a_dropped_output_is_encoded_from_the_pixels_that_came_with_it() -> None:
    rows = Rows()
    same = [kept_as(7, image(offset, 10.0, 1)) for offset in (0, 2)]
    rows.compute(plan(opened(0, [-1, 5, -1, 5], *same), chunks=[(0, 0, 2)]))
    dropping = replace(plan(chunks=[(0, 2, 2)]), dropped_outputs=(EncoderOutputId(7),))
    assert rows.compute(dropping) == [(0, 10.0)]
    assert rows.model.asked == [1, 1]


def test_a_reset_forgets_what_was_kept() -> None:
    rows = Rows()
    rows.compute(plan(opened(0, [-1, 4], kept_as(7, image(0, 10.0, 1))), chunks=[(0, 0, 2)]))
    rows.images.reset()
    assert not rows.images.kept_embeddings


def test_rows_without_images_ask_for_nothing() -> None:
    rows = Rows()
    given = plan(opened(0, [1, 2, 3]), chunks=[(0, 0, 3)])
    assert rows.images.admit(given, rows.states) is given
    assert rows.compute(given) == []
    assert rows.model.asked == []


@pytest.mark.parametrize(
    ("ids", "images", "complaint"),
    [
        ([1, -5, 2], (), "outside the vocabulary"),
        ([1, -5, 2], (image(0, 0.0, 1),), "no places of 1 embeddings"),
        ([1, -5, 2], (image(1, 0.0, 2),), "no places of 2 embeddings"),
        ([1, -5, -5], (image(1, 0.0, 1),), "belong to no image"),
        ([1, -5, 2], (RowImage(bytes(32), 1, 1, (1, 1)),), "has no pixels"),
        ([1, -5, 2], (replace(image(1, 0.0, 1), pixels=np.zeros(1, np.float32)),), "no image"),
        ([1, -5, 2], (replace(image(1, 0.0, 1), pixels=np.zeros((3, 1), np.float32)),), "3 embeddings at 1 places"),
        ([1, -5, 2], (RowImage(bytes(32), 1, 0, (1, 1)),), "no places of 0"),
        ([1, -5, 2], (RowImage(bytes(32), 1, 1, (1, 1), output=EncoderOutputId(3)),), "no output 3 of 1 embeddings"),
    ],
    ids=str,
)
def test_images_that_do_not_fit_their_row_are_refused(
    ids: list[int], images: tuple[RowImage, ...], complaint: str
) -> None:
    with pytest.raises(InvalidPlanError, match=complaint):
        Rows().run(plan(opened(0, ids, *images)))


def with_axes() -> Rows:
    """Return rows of a model with positions on three axes."""
    rows = Rows()
    rows.images = RowImages(rows.model, replace(CONFIG, axes=(0, 1, 2)))
    return rows


def coordinates_of_pass(rows: Rows, forward: ForwardPass) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the coordinates of a pass, which is then over, and its positions."""
    positions = torch.from_numpy(gather(rows.states, forward).positions)
    coordinates = rows.images.into(replace(batch_of(forward), positions=positions), forward).coordinates
    rows.states.advance_prefill(forward.chunks.rows, forward.chunks.lengths)
    return coordinates, positions


# Of a text, an image in two rows of three squares, and a text.
AXES = [
    [0, 1, 2, 2, 2, 2, 2, 2, 5, 6], [0, 1, 2, 2, 2, 3, 3, 3, 5, 6], [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
]  # fmt: skip
SQUARES = replace(image(2, 10.0, 6), grid=(1, 4, 6))


def test_images_take_coordinates_on_three_axes_and_fewer_positions_than_tokens() -> None:
    rows = with_axes()
    forward = rows.run(plan(opened(0, [5, 5, *(-4,) * 6, 3, 3], SQUARES), chunks=[(0, 0, 10)]))
    coordinates, _ = coordinates_of_pass(rows, forward)
    assert coordinates is not None
    assert coordinates.tolist() == AXES
    # The next token is the eleventh, at position 7.
    assert rows.states.position_offsets[0] == -3


def test_a_text_after_the_last_image_is_at_positions_and_needs_no_coordinates() -> None:
    rows, ids = with_axes(), [5, 5, *(-4,) * 6, 3, 3]
    coordinates, _ = coordinates_of_pass(rows, rows.run(plan(opened(0, ids, SQUARES), chunks=[(0, 0, 5)])))
    assert coordinates is not None
    assert coordinates.tolist() == [axis[:5] for axis in AXES]
    # The rest of the image and the text beside another text, which comes first in the batch.
    both = plan(opened(1, [1, 2]), chunks=[(1, 0, 2), (0, 5, 4)])
    coordinates, positions = coordinates_of_pass(rows, rows.run(both))
    assert coordinates is not None
    assert coordinates.tolist() == [[0, 1, *axis[5:9]] for axis in AXES]
    coordinates, positions = coordinates_of_pass(rows, rows.run(plan(chunks=[(0, 9, 1)])))
    assert coordinates is None
    assert positions.tolist()[-1] == 6


def test_nothing_is_kept_of_a_row_whose_images_are_computed() -> None:
    rows, known = with_axes(), replace(SQUARES, pixels=None)
    row = opened(0, [5, 5, *(-4,) * 6, 3, 3], known, computed=8)
    coordinates, positions = coordinates_of_pass(rows, rows.run(plan(row, chunks=[(0, 8, 2)])))
    assert coordinates is None
    assert positions.tolist() == AXES[0][8:]
    assert not rows.images._rows


def test_a_grid_of_other_tokens_than_the_image_has_is_refused() -> None:
    rows = Rows()
    rows.images = RowImages(rows.model, replace(CONFIG, axes=(0, 1, 2)))
    for grid, complaint in (((1, 4, 4), "1 x 2 x 2"), ((4, 6), "2 axes")):
        with pytest.raises(InvalidPlanError, match=complaint):
            rows.run(plan(opened(0, [5, *(-4,) * 6], replace(image(1, 0.0, 6), grid=grid))))


def in_blocks(*images: RowImage) -> tuple[Rows, RowOpen]:
    """Return rows of a model whose images are blocks of two tokens, and one with two such blocks in each image."""
    rows = Rows()
    rows.images = RowImages(rows.model, replace(CONFIG, block=2))
    return rows, opened(0, [5, -1, -1, 4, -1, -1, 6], *(images or (image(1, 10.0, 4),)))


def test_tokens_of_an_image_that_see_each_other_are_told_to_attention() -> None:
    rows, row = in_blocks()
    decoding = opened(2, [5, 5])
    rows.compute(plan(decoding, chunks=[(2, 0, 2)]))
    forward = rows.run(plan(row, chunks=[(0, 0, 4)]))
    assert rows.images.have_blocks(forward)
    blocks = rows.images.into(batch_of(forward), forward).blocks
    assert blocks is not None
    # The row that decodes is the first row of the batch, with one token.
    assert blocks.tolist() == [[1, 2, 4, 3]]
    rows.states.advance_prefill(forward.chunks.rows, forward.chunks.lengths)
    forward = rows.run(plan(chunks=[(0, 4, 3)]))
    (block,) = rows.images.into(batch_of(forward), forward).blocks.tolist()  # type: ignore[union-attr]  # there is one
    assert block == [1, 1, 3, 6]
    rows.states.advance_prefill(forward.chunks.rows, forward.chunks.lengths)
    assert not rows.images.have_blocks(rows.run(plan()))


@pytest.mark.parametrize("chunks", [(0, 2), (0, 5)])
def test_chunks_that_cut_what_must_be_whole_are_refused(chunks: tuple[int, int]) -> None:
    rows, row = in_blocks()
    with pytest.raises(InvalidPlanError, match="must be computed in one pass"):
        rows.run(plan(row, chunks=[(0, *chunks)]))


def test_a_prefix_that_ends_within_an_image_is_refused() -> None:
    rows, row = in_blocks()
    with pytest.raises(InvalidPlanError, match="tokens 4 to 6 of an image"):
        rows.run(plan(replace(row, computed_tokens=5), chunks=[(0, 5, 2)]))


def test_images_in_other_runs_are_refused() -> None:
    rows, _ = in_blocks()
    with pytest.raises(InvalidPlanError, match="other runs than of 2"):
        rows.run(plan(opened(0, [5, -1, 4, -1], image(1, 10.0, 2))))

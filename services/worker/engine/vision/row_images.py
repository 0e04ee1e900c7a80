"""The images of running rows: which are encoded when, and where their embeddings belong in a pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from common.images import runs_of
from services.worker.engine.execution.interface import InvalidPlanError
from services.worker.engine.model.batch import PlacedImages
from services.worker.engine.uploads import to_device, upload
from services.worker.engine.vision.axes import coordinates_of
from services.worker.engine.vision.encoder import EncoderImage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from common.steps import RowOpen, StepPlan
    from common.types import EncoderOutputId, RowImage, RowSlot
    from services.worker.engine.model.batch import ForwardBatch
    from services.worker.engine.plans.passes import ForwardPass, IntArray
    from services.worker.engine.plans.rows import RowStates
    from services.worker.engine.vision.config import VisionConfig


class ImageModel(Protocol):
    """What computes images, as `ModelRunner` does."""

    @property
    def device(self) -> torch.device:
        """Where embeddings are."""

    @property
    def activation_dtype(self) -> torch.dtype:
        """The type of embeddings."""

    def encode_images(self, images: Sequence[EncoderImage]) -> list[torch.Tensor]:
        """Return the embeddings of each image."""

    def count_embeddings(self, image: EncoderImage) -> int:
        """Return how many embeddings an image has, or raise ValueError."""


@dataclass(slots=True)
class _Image:
    """An image of a row, and its embeddings from the first pass that needs them to the last."""

    positions: IntArray
    """[embeddings] ascending, where they belong in the row."""
    source: EncoderImage | None
    """None: encoded."""
    embeddings: torch.Tensor | None = None
    output: EncoderOutputId | None = None
    """Where the embeddings are kept beyond that; None: nowhere."""
    blocks: tuple[tuple[int, int], ...] = ()
    """Where tokens that see each other begin and end in the row."""


@dataclass(slots=True)
class _Row:
    images: list[_Image]
    coordinates: IntArray | None
    """[axes, tokens] of the tokens up to the last one of an image: those of later ones are their positions on each
    axis. None: positions have one axis."""

    def drop_computed(self, computed: int) -> bool:
        """Drop images that are computed; return whether anything is left that passes need."""
        self.images = [image for image in self.images if image.positions[-1] >= computed]
        return bool(self.images) or (self.coordinates is not None and computed < self.coordinates.shape[1])


@dataclass(frozen=True, slots=True)
class _RowChunk:
    """A chunk of a row with images: `length` tokens from `start` on, which are those from `first` on of the batch."""

    row: _Row
    number: int
    """Of the row in the batch."""
    first: int
    start: int
    length: int


class RowImages:
    """Keeps what passes still need of the images of open rows.

    An image is encoded in the first pass that computes one of its tokens, together with the other new images of that
    pass, and its embeddings are kept until the last of its tokens is computed: a prompt's chunks may cut it. On the
    device there are so never more embeddings than a pass has tokens, and those of one cut image for each row that
    prefills. Beyond that they are kept as outputs, if the scheduler says so, until it says that they are dropped.
    """

    def __init__(self, model: ImageModel, config: VisionConfig) -> None:
        """Encode with `model`, whose encoder is `config`'s."""
        self._model = model
        self._config = config
        self._rows: dict[RowSlot, _Row] = {}
        self._outputs: dict[EncoderOutputId, torch.Tensor] = {}

    @property
    def kept_embeddings(self) -> int:
        """How many embeddings are kept as outputs."""
        return sum(len(each) for each in self._outputs.values())

    @property
    def held(self) -> int:
        """How many images are kept."""
        return sum(len(row.images) for row in self._rows.values())

    def admit(self, plan: StepPlan, rows: RowStates) -> StepPlan:
        """Take over the images of new rows, and drop those that are not needed; see `ImageStore.admit`."""
        for row in plan.closes:
            self._rows.pop(row, None)
        for output in plan.dropped_outputs:
            self._outputs.pop(output, None)
        self._rows = {row: known for row, known in self._rows.items() if known.drop_computed(int(rows.computed[row]))}
        if any(opened.images for opened in plan.opens):
            opens = tuple(self._open(opened) if opened.images else opened for opened in plan.opens)
            plan = replace(plan, opens=opens)
        if self._config.block:
            self._check_borders(plan)
        return plan

    def have_blocks(self, forward: ForwardPass) -> bool:
        """Whether a pass may have tokens that see each other, so that it must not be cut."""
        rows = (self._rows.get(row) for row in forward.chunks.rows.tolist())
        return any(image.blocks for row in rows if row is not None for image in row.images)

    def keep(self, output: EncoderOutputId, content: memoryview) -> None:
        """Keep embeddings that another process has encoded; see `ImageStore.keep`."""
        embeddings = torch.frombuffer(content, dtype=self._model.activation_dtype).view(-1, self._config.components)
        self._outputs[output] = upload(embeddings, self._model.device)

    def into(self, batch: ForwardBatch, forward: ForwardPass) -> ForwardBatch:
        """Return `batch`, that of a pass, with the embeddings that belong there; images that it begins are encoded."""
        chunks = forward.chunks
        if not self._rows or not chunks.rows.size:
            return batch
        at: list[_RowChunk] = []
        first = forward.decode_rows.size
        for number, (row, start, length) in enumerate(
            zip(chunks.rows.tolist(), chunks.starts.tolist(), chunks.lengths.tolist(), strict=True),
            forward.decode_rows.size,
        ):
            if row in self._rows:
                at.append(_RowChunk(self._rows[row], number, first, start, length))
            first += length
        if not at:
            return batch
        return replace(
            batch, images=self._placed(at), coordinates=self._coordinates(batch.positions, at), blocks=self._blocks(at)
        )

    def _placed(self, at: Sequence[_RowChunk]) -> PlacedImages | None:
        places: list[IntArray] = []
        parts: list[tuple[_Image, slice]] = []
        for chunk in at:
            for image in chunk.row.images:
                begin, end = np.searchsorted(image.positions, (chunk.start, chunk.start + chunk.length)).tolist()
                if begin < end:
                    places.append(image.positions[begin:end] - chunk.start + chunk.first)
                    parts.append((image, slice(begin, end)))
        if not parts:
            return None
        self._encode([image for image, _ in parts])
        embeddings = [image.embeddings[part] for image, part in parts if image.embeddings is not None]
        own, *deep = torch.split(torch.cat(embeddings), self._config.width, dim=1)
        return PlacedImages(self._sent(np.concatenate(places)), own, tuple(deep))

    def _blocks(self, at: Sequence[_RowChunk]) -> torch.Tensor | None:
        """Return the tokens that see each other; see `ForwardBatch.blocks`."""
        if not self._config.block:
            return None
        blocks = [
            (chunk.number, begin - chunk.start + chunk.first, end - chunk.start + chunk.first, end)
            for chunk in at
            for image in chunk.row.images
            for begin, end in image.blocks
            if chunk.start <= begin < chunk.start + chunk.length
        ]
        return torch.tensor(blocks, dtype=torch.int32) if blocks else None

    def _coordinates(self, positions: torch.Tensor, at: Sequence[_RowChunk]) -> torch.Tensor | None:
        """Return the coordinates of a pass's tokens; None: all of them are positions."""
        known = [
            (chunk.first, chunk.row.coordinates[:, chunk.start : chunk.start + chunk.length])
            for chunk in at
            if chunk.row.coordinates is not None and chunk.start < chunk.row.coordinates.shape[1]
        ]
        if not known:
            return None
        coordinates = positions.expand(len(known[0][1]), -1).clone()
        places = np.concatenate([np.arange(first, first + own.shape[1]) for first, own in known])
        coordinates[:, self._sent(places)] = self._sent(np.concatenate([own for _, own in known], axis=1))
        return coordinates

    def _sent(self, values: IntArray) -> torch.Tensor:
        return to_device(values, self._model.device)

    def reset(self) -> None:
        """Drop everything: all rows are free, and no output is known any more."""
        self._rows.clear()
        self._outputs.clear()

    def _encode(self, images: Sequence[_Image]) -> None:
        """Encode those that have no embeddings yet; of several with the same output, one is encoded."""
        new = [image for image in images if image.source is not None]
        for image in new:
            self._take_kept(image)
        promised: set[EncoderOutputId | None] = set()
        first: list[tuple[_Image, EncoderImage]] = []
        for image in new:
            if image.source is not None and (image.output is None or image.output not in promised):
                first.append((image, image.source))
                promised.add(image.output)
        if not first:
            return
        for (image, _), embeddings in zip(first, self._model.encode_images([each for _, each in first]), strict=True):
            image.embeddings, image.source = embeddings, None
            if image.output is not None:
                # A part of a tensor would keep the memory of all images that were encoded together.
                self._outputs[image.output] = image.embeddings = embeddings.clone()
        for image in new:
            self._take_kept(image)

    def _take_kept(self, image: _Image) -> None:
        """Use embeddings that are kept, if they are; the pixels are not needed any more then."""
        if image.source is not None and image.output in self._outputs:
            image.embeddings, image.source = self._outputs[image.output], None

    def _open(self, opened: RowOpen) -> RowOpen:
        what, ids = f"open of row {opened.row}", opened.token_ids
        below: NDArray[np.int64] = np.flatnonzero(ids < 0)
        taken, images = 0, []
        for image in opened.images:
            positions = below[taken : taken + image.length]
            if not 0 < image.length == positions.size or positions[0] != image.offset:
                raise InvalidPlanError(f"{what}: no places of {image.length} embeddings of an image at {image.offset}")
            taken += image.length
            if positions[-1] >= opened.computed_tokens:
                pending = self._pending(image, positions, what)
                pending.blocks = self._blocks_of(positions, what)
                images.append(pending)
        if taken != below.size:
            raise InvalidPlanError(f"{what}: {below.size - taken} ids below 0 belong to no image")
        coordinates, offset = None, 0
        if self._config.axes:
            try:
                coordinates, offset = coordinates_of(ids, opened.images, self._config.merge)
            except ValueError as error:
                raise InvalidPlanError(f"{what}: {error}") from error
            coordinates = coordinates[:, : below[-1] + 1]
        row = _Row(images, coordinates)
        if row.drop_computed(opened.computed_tokens):
            self._rows[opened.row] = row
        known = np.where(ids < 0, np.int32(self._config.placeholder_id), ids)
        return replace(opened, token_ids=known, images=(), position_offset=offset)

    def _blocks_of(self, positions: IntArray, what: str) -> tuple[tuple[int, int], ...]:
        block = self._config.block
        blocks = runs_of(positions) if block else ()
        if any(end - begin != block for begin, end in blocks):
            raise InvalidPlanError(f"{what}: tokens of an image in other runs than of {block}")
        return blocks

    def _check_borders(self, plan: StepPlan) -> None:
        """Raise InvalidPlanError if a chunk of a plan begins or ends within tokens that see each other."""
        for chunk in plan.prefills:
            row = self._rows.get(chunk.row)
            for begin, end in [] if row is None else [block for image in row.images for block in image.blocks]:
                if begin < chunk.start < end or begin < chunk.start + chunk.length < end:
                    raise InvalidPlanError(
                        f"chunk of row {chunk.row}: tokens {begin} to {end} of an image must be computed in one pass"
                    )

    def _pending(self, image: RowImage, positions: IntArray, what: str) -> _Image:
        if image.pixels is not None:
            source = EncoderImage(image.pixels, image.grid)
            self._check(source, image.length, what)
            return _Image(positions, source, output=image.output)
        if image.output is None:
            raise InvalidPlanError(f"{what}: an image at {image.offset} that is not computed has no pixels")
        embeddings = self._outputs.get(image.output)
        if embeddings is None or len(embeddings) != image.length:
            raise InvalidPlanError(f"{what}: no output {image.output} of {image.length} embeddings is kept")
        return _Image(positions, None, embeddings)

    def _check(self, source: EncoderImage, length: int, what: str) -> None:
        try:
            count = self._model.count_embeddings(source)
        except ValueError as error:
            raise InvalidPlanError(f"{what}: {error}") from error
        if count != length:
            raise InvalidPlanError(f"{what}: an image of {count} embeddings at {length} places")

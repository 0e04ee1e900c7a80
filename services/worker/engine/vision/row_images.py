"""The images of running rows: which are encoded when, and where their embeddings belong in a pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from services.worker.engine.execution.interface import InvalidPlanError
from services.worker.engine.model.batch import PlacedImages
from services.worker.engine.vision.encoder import EncoderImage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from common.steps import RowImage, RowOpen, StepPlan
    from common.types import RowSlot
    from services.worker.engine.plans.passes import ForwardPass, IntArray
    from services.worker.engine.plans.rows import RowStates


class ImageModel(Protocol):
    """What computes images, as `ModelRunner` does."""

    @property
    def device(self) -> torch.device:
        """Where embeddings are."""

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


class RowImages:
    """Keeps what passes still need of the images of open rows.

    An image is encoded in the first pass that computes one of its tokens, together with the other new images of that
    pass, and its embeddings are kept until the last of its tokens is computed: a prompt's chunks may cut it. On the
    device there are so never more embeddings than a pass has tokens, and those of one cut image for each row that
    prefills.
    """

    def __init__(self, model: ImageModel, placeholder_id: int) -> None:
        """Encode with `model`; `placeholder_id` is the token of the vocabulary that stands for an embedding."""
        self._model = model
        self._placeholder_id = placeholder_id
        self._rows: dict[RowSlot, list[_Image]] = {}

    @property
    def held(self) -> int:
        """How many images are kept."""
        return sum(map(len, self._rows.values()))

    def admit(self, plan: StepPlan, rows: RowStates) -> StepPlan:
        """Take over the images of new rows, and drop those that are not needed; see `ImageStore.admit`."""
        for row in plan.closes:
            self._rows.pop(row, None)
        for row, images in list(self._rows.items()):
            left = [image for image in images if image.positions[-1] >= rows.computed[row]]
            if left:
                self._rows[row] = left
            else:
                del self._rows[row]
        if not any(opened.images for opened in plan.opens):
            return plan
        return replace(plan, opens=tuple(self._open(opened) if opened.images else opened for opened in plan.opens))

    def of(self, forward: ForwardPass) -> PlacedImages | None:
        """Return the embeddings that belong into a pass, having encoded images that it begins; None: there are none."""
        chunks = forward.chunks
        if not self._rows or not chunks.rows.size:
            return None
        places: list[IntArray] = []
        parts: list[tuple[_Image, slice]] = []
        first = forward.decode_rows.size
        for row, start, length in zip(
            chunks.rows.tolist(), chunks.starts.tolist(), chunks.lengths.tolist(), strict=True
        ):
            for image in self._rows.get(row, ()):
                begin, end = np.searchsorted(image.positions, (start, start + length)).tolist()
                if begin < end:
                    places.append(image.positions[begin:end] - start + first)
                    parts.append((image, slice(begin, end)))
            first += length
        if not parts:
            return None
        self._encode([image for image, _ in parts])
        embeddings = [image.embeddings[part] for image, part in parts if image.embeddings is not None]
        at = torch.from_numpy(np.concatenate(places)).to(self._model.device, non_blocking=True)
        return PlacedImages(at, torch.cat(embeddings))

    def reset(self) -> None:
        """Drop everything: all rows are free."""
        self._rows.clear()

    def _encode(self, images: Sequence[_Image]) -> None:
        """Encode those that have no embeddings yet."""
        new = [(image, image.source) for image in images if image.source is not None]
        if not new:
            return
        for (image, _), embeddings in zip(new, self._model.encode_images([source for _, source in new]), strict=True):
            # Pixels are not needed any more.
            image.embeddings, image.source = embeddings, None

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
                images.append(_Image(positions, self._source(image, what)))
        if taken != below.size:
            raise InvalidPlanError(f"{what}: {below.size - taken} ids below 0 belong to no image")
        if images:
            self._rows[opened.row] = images
        return replace(opened, token_ids=np.where(ids < 0, np.int32(self._placeholder_id), ids), images=())

    def _source(self, image: RowImage, what: str) -> EncoderImage:
        if image.pixels is None:
            raise InvalidPlanError(f"{what}: an image at {image.offset} that is not computed has no pixels")
        pixels = image.pixels if image.pixels.flags.writeable else image.pixels.copy()
        source = EncoderImage(torch.from_numpy(pixels), image.grid)
        try:
            count = self._model.count_embeddings(source)
        except ValueError as error:
            raise InvalidPlanError(f"{what}: {error}") from error
        if count != image.length:
            raise InvalidPlanError(f"{what}: an image of {count} embeddings at {image.length} places")
        return source

"""Places images in prompts: in place of each placeholder stand the tokens that the model's processor writes for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from common.errors import InvalidRequestError
from common.images import image_ids
from common.types import RowImage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

    from common.requests import ImageFile
    from common.types import Subject, TokenIds
    from services.tokenizer.images.pool import ImagePool
    from services.tokenizer.images.processor import PreparedImage

# Pixels of a request, as they travel. Messages of 64 MiB have its tokens and options beside them.
MAX_PIXEL_BYTES = 48 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class PlacedPrompt:
    """A prompt with ids below 0 at the places of its images' embeddings."""

    token_ids: TokenIds
    images: tuple[RowImage, ...]


class ImagePrompts(Protocol):
    """Prepares the images of prompts; `are_taken`: whether the model takes any."""

    are_taken: bool

    async def place(
        self, subject: Subject, token_ids: TokenIds, files: Sequence[ImageFile], param: str
    ) -> PlacedPrompt:
        """Return an encoded prompt with its images in place of its placeholders; `param` names it in errors.

        Raises:
            InvalidRequestError: an image is refused, or there are more or fewer placeholders than images.
            QueueFullError: too many images are waiting.
        """
        ...

    def shown(self, token_ids: TokenIds) -> TokenIds:
        """Return ids with the vocabulary's own placeholder in place of those of images."""
        ...


class NoImages:
    """Implements `ImagePrompts` for models that take no images."""

    are_taken = False

    async def place(
        self, subject: Subject, token_ids: TokenIds, files: Sequence[ImageFile], param: str
    ) -> PlacedPrompt:
        raise InvalidRequestError("The model does not take images.", param=param)

    def shown(self, token_ids: TokenIds) -> TokenIds:
        return token_ids


class PreparedPrompts:
    """Implements `ImagePrompts` with a pool of processes."""

    are_taken = True

    def __init__(self, pool: ImagePool, tokenizer: Tokenizer, placeholder: int) -> None:
        """`placeholder` is the token that stands for an image in the model's texts, and for each of its embeddings."""
        self._pool = pool
        self._tokenizer = tokenizer
        self._placeholder = placeholder

    async def place(
        self, subject: Subject, token_ids: TokenIds, files: Sequence[ImageFile], param: str
    ) -> PlacedPrompt:
        places = np.flatnonzero(token_ids == self._placeholder)
        if places.size != len(files):
            token = self._tokenizer.id_to_token(self._placeholder)
            message = (
                f"The prompt has {places.size} placeholders {token} for {len(files)} images."
                if param == "prompt"
                else f"The model's chat template has places for {places.size} of {len(files)} images; put them into "
                "messages of the user."
            )
            raise InvalidRequestError(message, param=param)
        prepared = await self._pool.prepare(subject, files, param, MAX_PIXEL_BYTES)
        return self._placed(token_ids, places.tolist(), prepared)

    def shown(self, token_ids: TokenIds) -> TokenIds:
        return np.where(token_ids < 0, np.int32(self._placeholder), token_ids)

    def _placed(self, token_ids: TokenIds, places: Sequence[int], prepared: Sequence[PreparedImage]) -> PlacedPrompt:
        parts: list[TokenIds] = []
        images = []
        start = length = 0
        for place, image in zip(places, prepared, strict=True):
            before, own = token_ids[start:place], self._tokens_of(image)
            offset = length + before.size + int(np.flatnonzero(own < 0)[0])
            images.append(RowImage(image.digest, offset, image.embeddings, image.grid, image.pixels))
            parts += [before, own]
            start, length = place + 1, length + before.size + own.size
        return PlacedPrompt(np.concatenate([*parts, token_ids[start:]]), tuple(images))

    def _tokens_of(self, image: PreparedImage) -> TokenIds:
        """Return the ids that stand for an image; special tokens are at both ends, so text beside it is separate."""
        ids = np.array(self._tokenizer.encode(image.text, add_special_tokens=False).ids, dtype=np.int32)
        places = np.flatnonzero(ids == self._placeholder)
        assert places.size == image.embeddings, "the placeholder is a token of its own"
        ids[places] = image_ids(image.digest, image.embeddings)
        return ids

"""Places images in prompts: in place of each placeholder stand the tokens that the model's processor writes for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from common.errors import InvalidRequestError
from common.images import image_ids
from common.types import RowImage
from services.tokenizer.special_text import SpecialText

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

    def __init__(self, pool: ImagePool, tokenizer: Tokenizer, mark: int, placeholder: int) -> None:
        """`mark` is the token that stands for an image in prompts, `placeholder` the one for each of its embeddings."""
        self._pool = pool
        self._tokenizer = tokenizer
        self._mark = mark
        self._placeholder = placeholder
        self._special = SpecialText(tokenizer)
        self._special_ids = [
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        ]

    async def place(
        self, subject: Subject, token_ids: TokenIds, files: Sequence[ImageFile], param: str
    ) -> PlacedPrompt:
        places = np.flatnonzero(token_ids == self._mark)
        if places.size != len(files):
            token = self._tokenizer.id_to_token(self._mark)
            message = (
                f"The prompt has {places.size} placeholders {token} for {len(files)} images."
                if param == "prompt"
                else f"The model's chat template has places for {places.size} of {len(files)} images; put them into "
                "messages of the user."
            )
            raise InvalidRequestError(message, param=param)
        prepared = await self._pool.prepare(subject, files, param, MAX_PIXEL_BYTES)
        # Off the event loop: much text may stand beside an image.
        return await asyncio.to_thread(self._placed, token_ids, places.tolist(), prepared)

    def shown(self, token_ids: TokenIds) -> TokenIds:
        return np.where(token_ids < 0, np.int32(self._placeholder), token_ids)

    def _placed(self, token_ids: TokenIds, places: Sequence[int], prepared: Sequence[PreparedImage]) -> PlacedPrompt:
        parts: list[TokenIds] = []
        images = []
        start = length = 0
        after = ""
        for place, image in zip(places, prepared, strict=True):
            text, own = self._between(after, token_ids[start:place], image.before), self._tokens_of(image)
            offset = length + text.size + int(np.flatnonzero(own < 0)[0])
            images.append(RowImage(image.digest, offset, image.embeddings, image.grid, image.pixels))
            parts += [text, own]
            start, length, after = place + 1, length + text.size + own.size, image.after
        return PlacedPrompt(np.concatenate([*parts, self._between(after, token_ids[start:], "")]), tuple(images))

    def _between(self, left: str, ids: TokenIds, right: str) -> TokenIds:
        """Return the ids of text between images, with the texts that these have on its left and on its right."""
        special = np.flatnonzero(np.isin(ids, self._special_ids))
        if not special.size:
            return self._joined(left, ids, right)
        # Special tokens part texts: what is beyond them does not change.
        first, last = special[0], special[-1] + 1
        return np.concatenate(
            [self._joined(left, ids[:first], ""), ids[first:last], self._joined("", ids[last:], right)]
        )

    def _joined(self, left: str, ids: TokenIds, right: str) -> TokenIds:
        """Return `ids`, which have no special token, with texts on both sides, as if all of it were encoded at once."""
        if not (left or right):
            return ids
        text = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        if not np.array_equal(self._encoded(text), ids):
            # Ids of a client, which are not those of their text, stay as they are.
            return np.concatenate([self._encoded(left), ids, self._encoded(right)])
        return self._encoded(left + text + right)

    def _encoded(self, text: str) -> TokenIds:
        """Return the ids of a text; names of special tokens in it are text, too."""
        shield = self._special.shield()
        marked = shield(text)
        if shield.is_used:
            return self._special.encode(marked)
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def _tokens_of(self, image: PreparedImage) -> TokenIds:
        """Return the ids that stand for an image; special tokens are at both ends, so text beside it is separate."""
        ids = np.array(self._tokenizer.encode(image.text, add_special_tokens=False).ids, dtype=np.int32)
        places = np.flatnonzero(ids == self._placeholder)
        assert places.size == image.embeddings, "the placeholder is a token of its own"
        ids[places] = image_ids(image.digest, image.embeddings)
        return ids

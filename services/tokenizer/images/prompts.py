"""Places images in prompts: in place of each placeholder stand the tokens that the model's processor writes for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Protocol

import numpy as np

from common.errors import InvalidRequestError
from common.images import image_ids
from common.types import RowImage
from services.tokenizer.images.processor import MAX_PIXEL_BYTES
from services.tokenizer.special_text import SpecialText

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

    from common.requests import ImageFile
    from common.types import Subject, TokenIds, View
    from services.tokenizer.images.pool import ImagePool
    from services.tokenizer.images.processor import PreparedImage


@dataclass(frozen=True, slots=True)
class PlacedPrompt:
    """A prompt with ids below 0 at the places of its images' embeddings."""

    token_ids: TokenIds
    images: tuple[RowImage, ...]
    # Whether the next requests of the view may name them by their keys alone.
    are_kept: bool = False


class ImagePrompts(Protocol):
    """Prepares the images of prompts; `are_taken`: whether the model takes any, and `videos_are_taken`: videos, too."""

    are_taken: bool
    videos_are_taken: bool

    async def place(
        self, subject: Subject, token_ids: TokenIds, files: Sequence[ImageFile], param: str, view: View | None = None
    ) -> PlacedPrompt:
        """Return an encoded prompt with its images in place of its placeholders; `param` names it in errors.

        Images are kept for further requests of `view`, if there is one, and need not be decoded again then.

        Raises:
            MissingImageError: an image has nothing but its key, and is not kept.
            InvalidRequestError: an image is refused, or there are more or fewer placeholders than images.
            QueueFullError: too many images are waiting.
        """
        ...

    def shown(self, token_ids: TokenIds) -> TokenIds:
        """Return ids with the vocabulary's own placeholder in place of those of images."""
        ...


class NoImages:
    """Implements `ImagePrompts` for models that take no images."""

    are_taken = videos_are_taken = False

    async def place(
        self, subject: Subject, token_ids: TokenIds, files: Sequence[ImageFile], param: str, view: View | None = None
    ) -> PlacedPrompt:
        raise InvalidRequestError("The model does not take images.", param=param)

    def shown(self, token_ids: TokenIds) -> TokenIds:
        return token_ids


class PreparedPrompts:
    """Implements `ImagePrompts` with a pool of processes."""

    are_taken = True

    def __init__(
        self, pool: ImagePool, tokenizer: Tokenizer, mark: int, placeholder: int, video_mark: int | None = None
    ) -> None:
        """`mark` is the token that stands for an image in prompts, `placeholder` the one for each of its embeddings.

        `video_mark` stands for a video; None: the model takes none.
        """
        self.videos_are_taken = video_mark is not None
        self._pool = pool
        self._tokenizer = tokenizer
        self._mark = mark
        self._video_mark = video_mark
        self._placeholder = placeholder
        self._placeholder_text = tokenizer.id_to_token(placeholder) or ""
        self._special = SpecialText(tokenizer)
        self._special_ids = [
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        ]

    async def place(
        self, subject: Subject, token_ids: TokenIds, files: Sequence[ImageFile], param: str, view: View | None = None
    ) -> PlacedPrompt:
        pictures, videos = ([file for file in files if file.is_video is which] for which in (False, True))
        placed = self._at_marks(token_ids, self._mark, pictures, "images", param)
        if self._video_mark is not None:
            placed += self._at_marks(token_ids, self._video_mark, videos, "videos", param)
        placed.sort(key=itemgetter(0))
        prepared = await self._pool.prepare(subject, [file for _, file in placed], param, MAX_PIXEL_BYTES, view)
        # Off the event loop: much text may stand beside an image.
        prompt = await asyncio.to_thread(self._placed, token_ids, placed, prepared.images)
        return replace(prompt, are_kept=prepared.are_kept)

    def shown(self, token_ids: TokenIds) -> TokenIds:
        return np.where(token_ids < 0, np.int32(self._placeholder), token_ids)

    def _at_marks(
        self, token_ids: TokenIds, mark: int, files: Sequence[ImageFile], kind: str, param: str
    ) -> list[tuple[int, ImageFile]]:
        """Return the places of marks of one kind, and the files for them.

        Raises:
            InvalidRequestError: there are more or fewer.
        """
        places: list[int] = np.flatnonzero(token_ids == mark).tolist()
        if len(places) != len(files):
            token = self._tokenizer.id_to_token(mark)
            message = (
                f"The prompt has {len(places)} placeholders {token} for {len(files)} {kind}."
                if param == "prompt"
                else f"The model's chat template has places for {len(places)} of {len(files)} {kind}; put them into "
                "messages of the user."
            )
            raise InvalidRequestError(message, param=param)
        return list(zip(places, files, strict=True))

    def _placed(
        self, token_ids: TokenIds, placed: Sequence[tuple[int, ImageFile]], prepared: Sequence[PreparedImage]
    ) -> PlacedPrompt:
        parts: list[TokenIds] = []
        images = []
        start = length = 0
        after = ""
        for (place, file), image in zip(placed, prepared, strict=True):
            own = self._tokens_of(image)
            # The text of a video may have the marks that stand around its placeholder.
            around = token_ids[place - 1 : place + 2 : 2]
            has_marks = file.is_video and start < place and np.array_equal(around, own[[0, -1]])
            text = self._between(after, token_ids[start : place - has_marks], image.before)
            offset = length + text.size + int(np.flatnonzero(own < 0)[0])
            images.append(RowImage(image.digest, offset, image.embeddings, image.grid, image.pixels))
            parts += [text, own]
            start, length, after = place + 1 + has_marks, length + text.size + own.size, image.after
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
        if image.text == self._placeholder_text * image.embeddings:
            # Encoding it takes a millisecond for the thousand embeddings of a photograph.
            return image_ids(image.digest, image.embeddings)
        ids = np.array(self._tokenizer.encode(image.text, add_special_tokens=False).ids, dtype=np.int32)
        places = np.flatnonzero(ids == self._placeholder)
        assert places.size == image.embeddings, "the placeholder is a token of its own"
        ids[places] = image_ids(image.digest, image.embeddings)
        return ids

"""Reads the images of a request: decodes base64, and gets what uploaded files and URLs have."""

from __future__ import annotations

import asyncio
import base64
import binascii
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import pybase64

from common.errors import InvalidRequestError
from common.recent_images import key_of
from common.requests import ImageFile
from gateway.batches.files import FileOwner, file_missing
from gateway.images.formats import problem_of, problem_of_video
from gateway.images.references import ImageSource

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.requests import ImageLimits
    from common.types import Subject
    from gateway.batches.files import Files
    from gateway.identity.caller import Requester
    from gateway.images.references import ImageReference
    from gateway.pipeline.port import ModelInfo

# Purposes of files whose images may be used.
PURPOSES = ("vision", "user_data")
# Characters that are decoded before other requests have their turn; a multiple of four.
PIECE_CHARACTERS = 4 * 1024 * 1024
NO_URLS = "this server fetches no URLs; send a data URL (data:image/png;base64,…)"


class ImageFetcher(Protocol):
    """Fetches images from URLs."""

    async def fetch(self, url: str, subject: Subject, max_bytes: int) -> bytes:
        """Return the bytes at `url`.

        Raises:
            RefusedUrlError: the URL may not be fetched, or there is no image of up to `max_bytes`; the text says why.
            PandoError: the gateway has no room for more fetches.
        """

    async def close(self) -> None:
        """Release what the fetcher holds."""


class RefusedUrlError(Exception):
    """An image that is not fetched; its text completes the sentence "the image …"."""


class NoFetcher:
    """Implements `ImageFetcher` by refusing every URL."""

    async def fetch(self, url: str, subject: Subject, max_bytes: int) -> bytes:
        raise RefusedUrlError(f"is at a URL, and {NO_URLS}")

    async def close(self) -> None:
        """Do nothing."""


class Images:
    """Reads images within the limits of the model that they are for."""

    def __init__(self, files: Files, fetcher: ImageFetcher, max_total_bytes: int) -> None:
        """Files come from `files`, URLs from `fetcher`; a request may have `max_total_bytes` of images."""
        self.max_total_bytes = max_total_bytes
        self._files = files
        self._fetcher = fetcher

    async def close(self) -> None:
        """Close the connections to other servers; the files stay open."""
        await self._fetcher.close()

    async def find(self, card: ModelInfo, requester: Requester, references: Sequence[ImageReference]) -> dict[str, str]:
        """Return the contents of uploaded files and URLs, in base64 by the references' keys.

        Raises:
            InvalidRequestError: the model takes no such images, or an image cannot be used.
            HttpError: 404: the caller has no such file.
            PandoError: the gateway has no room for more fetches, or the files are unavailable.
        """
        limits = check_images(card, references)
        found: dict[str, str] = {}
        left = self.max_total_bytes
        for reference in references:
            if reference.source is ImageSource.INLINE or reference.key in found:
                continue
            if reference.source is ImageSource.FILE:
                content = await self._content_of(reference, FileOwner.of(requester.caller), limits.max_file_bytes)
            else:
                content = await self._fetched(reference, requester.subject, limits.max_file_bytes)
            left -= len(content)
            if left < 0:
                raise self._too_many_bytes(reference)
            found[reference.key] = base64.b64encode(content).decode()
        return found

    async def read(
        self, card: ModelInfo, references: Sequence[ImageReference], found: Mapping[str, str]
    ) -> tuple[ImageFile, ...]:
        """Return the images in the order of `references`; `found` is the result of `find`.

        Raises:
            InvalidRequestError: the model takes no such images, or one is not base64, too large or of another format.
        """
        if not references:
            return ()
        limits = check_images(card, references)
        left = self.max_total_bytes
        images = []
        for reference in references:
            if reference.is_video and not reference.is_video_file:
                video = await _video(reference, limits)
                left -= video.size
                if left < 0:
                    raise self._too_many_bytes(reference)
                images.append(video)
                continue
            is_inline = reference.source is ImageSource.INLINE
            text = reference.value if is_inline else found[reference.key]
            start = reference.start if is_inline else 0
            # Before anything is decoded. Padding makes it at most two bytes too large.
            _check_size((len(text) - start) // 4 * 3 - 2, limits, reference)
            data = await _decoded(text, start, reference)
            _check_size(len(data), limits, reference)
            left -= len(data)
            if left < 0:
                raise self._too_many_bytes(reference)
            _check_format(data, reference)
            rate, is_video = reference.frames_per_second, reference.is_video_file
            images.append(ImageFile(data, reference.detail, (), rate, is_video))
        keys = await asyncio.gather(*(asyncio.to_thread(key_of, image) for image in images))
        return tuple(replace(image, key=key) for image, key in zip(images, keys, strict=True))

    async def _content_of(self, reference: ImageReference, owner: FileOwner, max_bytes: int) -> bytes:
        file = await self._files.get(owner, reference.value)
        if file["purpose"] not in PURPOSES:
            purposes = " or ".join(PURPOSES)
            raise _refused(reference, f"was uploaded with the purpose {file['purpose']}, which should be {purposes}")
        if file["bytes"] > max_bytes:
            raise _too_large(reference, file["bytes"], max_bytes)
        content = b"".join([piece async for piece in self._files.content(reference.value)])
        if len(content) != file["bytes"]:
            raise file_missing(reference.value)
        return content

    async def _fetched(self, reference: ImageReference, subject: Subject, max_bytes: int) -> bytes:
        try:
            return await self._fetcher.fetch(reference.value, subject, max_bytes)
        except RefusedUrlError as error:
            raise _refused(reference, str(error)) from error

    def _too_many_bytes(self, reference: ImageReference) -> InvalidRequestError:
        message = f"The images of the request have more than {self.max_total_bytes} bytes together."
        return InvalidRequestError(message, param=reference.param)


def check_images(card: ModelInfo, references: Sequence[ImageReference]) -> ImageLimits:
    """Return the model's limits of images, of which the request has at least one.

    Raises:
        InvalidRequestError: the model takes no images, or fewer.
    """
    first = references[0]
    if card.images is None:
        message = f"The model '{card.name}' takes no images; it reads text only."
        raise InvalidRequestError(message, param=first.param)
    if len(references) > card.images.max_images:
        message = f"The request has {len(references)} images; the model takes at most {card.images.max_images}."
        raise InvalidRequestError(message, param=references[card.images.max_images].param)
    video = next((each for each in references if each.is_video), None)
    if video is not None and not card.images.max_frames:
        raise InvalidRequestError(f"The model '{card.name}' takes no videos.", param=video.param)
    file = next((each for each in references if each.is_video_file), None)
    if file is not None and not card.images.video_files:
        message = (
            f"The model '{card.name}' takes videos as frames only (data:video/jpeg;base64,<first frame>,<second "
            "frame>,…): the decoder of MP4 and WebM, Pando's extra 'video', is not installed at its tokenizer."
        )
        raise InvalidRequestError(message, param=file.param)
    return card.images


async def _video(reference: ImageReference, limits: ImageLimits) -> ImageFile:
    text, start = reference.value, reference.start
    count = text.count(",", start) + 1
    if count > limits.max_frames:
        raise _refused(reference, f"has {count} frames; the model takes at most {limits.max_frames}")
    _check_size((len(text) - start) // 4 * 3 - 3 * count, limits, reference)
    frames = []
    for frame in text[start:].split(","):
        frames.append(await _decoded(frame, 0, reference))
        _check_format(frames[-1], reference)
        # As between the pieces of a large file.
        await asyncio.sleep(0)
    video = ImageFile(b"", reference.detail, tuple(frames), reference.frames_per_second)
    _check_size(video.size, limits, reference)
    return video


def _check_format(data: bytes, reference: ImageReference) -> None:
    problem = problem_of_video(data) if reference.is_video_file else problem_of(data)
    if problem is not None:
        is_frame = reference.is_video and not reference.is_video_file
        raise _refused(reference, f"has a frame that {problem}" if is_frame else problem)


async def _decoded(text: str, start: int, reference: ImageReference) -> bytes:
    """Return the bytes of the base64 in `text` from `start` on, without blocking other requests for long."""
    if (len(text) - start) % 4:
        raise _refused(reference, "is not valid base64: its length is not a multiple of four characters")
    pieces = []
    for place in range(start, len(text), PIECE_CHARACTERS):
        piece = text[place : place + PIECE_CHARACTERS]
        try:
            decoded = _decode(piece)
        except ValueError as error:  # also of characters that are not ASCII
            raise _refused(reference, f"is not valid base64: {error}") from error
        is_last = place + PIECE_CHARACTERS >= len(text)
        if not is_last:
            if len(decoded) != PIECE_CHARACTERS // 4 * 3:
                raise _refused(reference, "is not valid base64: padding in the middle")
            await asyncio.sleep(0)
        pieces.append(decoded)
    return b"".join(pieces)


def _decode(piece: str) -> bytes:
    """Return the bytes of strict base64.

    Raises:
        ValueError: it is none.
    """
    try:
        # Much faster than `binascii`, which decides about the rest: bits after the last byte may be set.
        return pybase64.b64decode(piece, validate=True)
    except ValueError:
        return binascii.a2b_base64(piece, strict_mode=True)


def _check_size(size: int, limits: ImageLimits, reference: ImageReference) -> None:
    if size > limits.max_file_bytes:
        raise _too_large(reference, size, limits.max_file_bytes)


def _too_large(reference: ImageReference, size: int, limit: int) -> InvalidRequestError:
    return _refused(reference, f"has {size} bytes, and may have {limit}")


def _refused(reference: ImageReference, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"The {reference.kind} '{reference.param}' {problem}.", param=reference.param)

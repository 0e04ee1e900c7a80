"""Images in prompts: the ids below 0 that stand for their embeddings, and so key them in the cache."""

from __future__ import annotations

from hashlib import shake_256
from typing import TYPE_CHECKING

import numpy as np

from common.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from common.types import RowImage, TokenIds

    IntArray = NDArray[np.int64]

DIGEST_BYTES = 32


def image_ids(digest: bytes, length: int) -> TokenIds:
    """Return the ids of an image of `length` embeddings, [length] int32.

    They are -1 - w for words w of 31 bits of SHAKE-256 of the digest: all of them are below 0, as no token's are.
    """
    words = np.frombuffer(shake_256(digest).digest(4 * length), "<u4") & 0x7FFFFFFF
    return (-1 - words.astype(np.int64)).astype(np.int32)


def runs_of(positions: IntArray) -> tuple[tuple[int, int], ...]:
    """Return where the neighbours among ascending positions begin, and the positions after them."""
    borders = np.flatnonzero(np.diff(positions) > 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(positions, borders) if run.size)


def image_spans(token_ids: TokenIds, images: Sequence[RowImage]) -> tuple[tuple[int, int], ...]:
    """Return of each image the positions of its first embedding and after its last one; tokens may be between.

    Raises:
        InvalidRequestError: ids below 0 are not those of `images`.
    """
    below = np.flatnonzero(token_ids < 0)
    taken, spans = 0, []
    for image in images:
        places = below[taken : taken + image.length]
        if not 0 < image.length == places.size or places[0] != image.offset or len(image.digest) != DIGEST_BYTES:
            raise InvalidRequestError("The prompt has no places for the embeddings of its images.", param="prompt")
        if (token_ids[places] != image_ids(image.digest, image.length)).any():
            raise InvalidRequestError("Ids in the prompt are not those of its images.", param="prompt")
        taken += image.length
        spans.append((int(places[0]), int(places[-1]) + 1))
    if taken != below.size:
        raise InvalidRequestError("Token ids must not be negative.", param="prompt")
    return tuple(spans)

"""Keeps prepared images of recent requests: one that is sent again with each turn of a conversation is decoded once.

A request finds only what requests of the same view have left, so times of requests say nothing about others' images.
"""

from __future__ import annotations

import json
import time
from collections import Counter, OrderedDict
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.requests import ImageFile
    from common.types import View
    from services.tokenizer.images.processor import PreparedImage

# From its last use on.
KEPT_S = 300.0
# An image counts as so many bytes at least, so that there are at most a few thousand.
LEAST_BYTES = 64 * 1024


class RecentImages:
    """Images by view and key, of at most `max_bytes` together.

    If they take more, the view that holds most loses those that it has not used for longest: views that hold less than
    their share keep theirs, whatever others send.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Start empty; `clock` returns seconds."""
        self._max_bytes = max_bytes
        self._clock = clock
        self._images: dict[View, OrderedDict[bytes, tuple[PreparedImage, float]]] = {}
        self._bytes: Counter[View] = Counter()
        self._total = 0

    @property
    def nbytes(self) -> int:
        """The bytes that all images count as."""
        return self._total

    def get(self, view: View, key: bytes) -> PreparedImage | None:
        """Return an image that a request of the view has left, or used, in the last `KEPT_S` seconds."""
        images = self._images.get(view)
        if images is None or key not in images:
            return None
        image, used_at = images[key]
        now = self._clock()
        if used_at <= now - KEPT_S:
            return None
        images[key] = image, now
        images.move_to_end(key)
        return image

    def put(self, view: View, key: bytes, image: PreparedImage) -> None:
        """Keep an image, unless it is larger than all that may be kept."""
        if _size(image) > self._max_bytes:
            return
        images = self._images.setdefault(view, OrderedDict())
        if key not in images:
            self._bytes[view] += _size(image)
            self._total += _size(image)
        images[key] = image, self._clock()
        images.move_to_end(key)
        while self._total > self._max_bytes:
            ((most, _),) = self._bytes.most_common(1)
            self._drop_oldest(most)

    def expire(self) -> None:
        """Drop the images that have not been used for `KEPT_S` seconds."""
        limit = self._clock() - KEPT_S
        for view in list(self._images):
            while view in self._images and next(iter(self._images[view].values()))[1] <= limit:
                self._drop_oldest(view)

    def _drop_oldest(self, view: View) -> None:
        images = self._images[view]
        _, (image, _) = images.popitem(last=False)
        self._bytes[view] -= _size(image)
        self._total -= _size(image)
        if not images:
            del self._images[view], self._bytes[view]


def key_of(file: ImageFile) -> bytes:
    """Return the SHA-256 digest of a file and of how it is to be prepared."""
    parts = file.frames or (file.data,)
    # Lengths, as other parts could be the same bytes put together.
    asked = [file.detail, file.frames_per_second, file.is_video_file, bool(file.frames), *map(len, parts)]
    digest = sha256(json.dumps(asked).encode())
    for part in parts:
        digest.update(part)
    return digest.digest()


def _size(image: PreparedImage) -> int:
    return max(image.pixels.nbytes, LEAST_BYTES)

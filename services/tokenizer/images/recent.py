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
    from common.types import Subject, View
    from services.tokenizer.images.processor import PreparedImage

    # Salt of a view, and key of an image.
    _Name = tuple[str, bytes]

# From its last use on.
KEPT_S = 300.0
# An image counts as so many bytes at least, so that there are at most a few thousand.
LEAST_BYTES = 64 * 1024


class RecentImages:
    """Images by view and key, of at most `max_bytes` together.

    If they take more, the tenant that holds most loses some: of its subject that holds most, those that have not been
    used for longest. Tenants, and in each tenant its subjects, that hold less than their share keep theirs, whatever
    others send. Views count for nothing there, as a subject can have any number of them.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Start empty; `clock` returns seconds."""
        self._max_bytes = max_bytes
        self._clock = clock
        # By subject, in the order of their last use.
        self._images: dict[Subject, OrderedDict[_Name, tuple[PreparedImage, float]]] = {}
        self._by_tenant: Counter[str] = Counter()
        self._by_subject: dict[str, Counter[Subject]] = {}

    @property
    def nbytes(self) -> int:
        """The bytes that all images count as."""
        return self._by_tenant.total()

    def get(self, view: View, key: bytes) -> PreparedImage | None:
        """Return an image that a request of the view has left, or used, in the last `KEPT_S` seconds."""
        images, name = self._images.get(view.subject), (view.salt, key)
        if images is None or name not in images:
            return None
        image, used_at = images[name]
        now = self._clock()
        if used_at <= now - KEPT_S:
            return None
        images[name] = image, now
        images.move_to_end(name)
        return image

    def put(self, view: View, key: bytes, image: PreparedImage) -> None:
        """Keep an image, unless it is larger than all that may be kept."""
        if _size(image) > self._max_bytes:
            return
        subject, name = view.subject, (view.salt, key)
        images = self._images.setdefault(subject, OrderedDict())
        if name not in images:
            self._count(subject, _size(image))
        images[name] = image, self._clock()
        images.move_to_end(name)
        while self.nbytes > self._max_bytes:
            ((tenant, _),) = self._by_tenant.most_common(1)
            ((most, _),) = self._by_subject[tenant].most_common(1)
            self._drop_oldest(most)

    def expire(self) -> None:
        """Drop the images that have not been used for `KEPT_S` seconds."""
        limit = self._clock() - KEPT_S
        for subject in list(self._images):
            while subject in self._images and next(iter(self._images[subject].values()))[1] <= limit:
                self._drop_oldest(subject)

    def _drop_oldest(self, subject: Subject) -> None:
        images = self._images[subject]
        _, (image, _) = images.popitem(last=False)
        self._count(subject, -_size(image))
        if not images:
            del self._images[subject]

    def _count(self, subject: Subject, nbytes: int) -> None:
        """Count bytes of a subject and its tenant; those that hold none are not named any longer."""
        subjects = self._by_subject.setdefault(subject.tenant, Counter())
        subjects[subject] += nbytes
        self._by_tenant[subject.tenant] += nbytes
        if not subjects[subject]:
            del subjects[subject]
        if not subjects:
            del self._by_subject[subject.tenant], self._by_tenant[subject.tenant]


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

"""Images of recent requests that a service keeps, so that the next requests of their view need only name them.

One that is sent again with each turn of a conversation crosses from gateway to tokenizer, is decoded, and crosses from
tokenizer to scheduler once. A service names an image without its content if the receiver has said that it keeps it
(`KeptElsewhere`); a receiver that does not keep it any more refuses the request, and gets it again with all of them.

A request finds only what requests of the same view have left, so times of requests say nothing about others' images.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, OrderedDict
from hashlib import sha256
from typing import TYPE_CHECKING, Generic, NoReturn, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from common.requests import ImageFile
    from common.types import RowImage, Subject, View

    # Salt of a view, and key of an image.
    _Name = tuple[str, bytes]

# From its last use on.
KEPT_S = 300.0
# Between searches for images that are not kept any longer.
EXPIRY_S = 15.0
# From its last use on, an image is not dropped for others' sake for so long if its owner holds less than a fair share:
# long enough to read an answer and ask on.
PROTECTED_S = 60.0
# An image counts as so many bytes at least, and as more where there would be room for more images than these:
# dropping one takes time that grows with their number.
LEAST_BYTES = 64 * 1024
MOST_IMAGES = 8192
# Of the memory that is free, for images, where it is not configured; and its least and greatest result. A picture of
# a megapixel has 3 MB, so that a busy server's of a minute need some gigabytes.
USUAL_SHARE = 1 / 16
USUAL_LEAST_BYTES, USUAL_MOST_BYTES = 256 * 1024 * 1024, 4 * 1024 * 1024 * 1024
# Images that a service knows to be kept by another one.
MOST_KNOWN = 65_536
NOT_KEPT = "an image of the request is not kept any more; send the request again"


class HasBytes(Protocol):
    """An image in the form in which a service keeps it."""

    @property
    def nbytes(self) -> int:
        """The room that it takes."""


ImageT = TypeVar("ImageT", bound=HasBytes)


class RecentImages(Generic[ImageT]):
    """Images by view and key, of at most `max_bytes` together.

    If they take more, those are dropped first that have not been used for `PROTECTED_S`, in the order of their last
    use. If all have been, the tenant that holds most loses some: of its subject that holds most, those that have not
    been used for longest. So for that time tenants, and in each tenant its subjects, that hold less than their share
    keep theirs, whatever others send; and those who are away hold no room that others' next turns need. Views count for
    nothing there, as a subject can have any number of them.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Start empty; `clock` returns seconds."""
        self._max_bytes = max_bytes
        self._least_bytes = max(LEAST_BYTES, max_bytes // MOST_IMAGES)
        self._clock = clock
        # With the times of their last use, and in this order.
        self._images: OrderedDict[tuple[Subject, _Name], tuple[ImageT, float]] = OrderedDict()
        # Each subject's, in the same order.
        self._names: dict[Subject, OrderedDict[_Name, None]] = {}
        self._by_tenant: Counter[str] = Counter()
        self._by_subject: dict[str, Counter[Subject]] = {}

    @property
    def nbytes(self) -> int:
        """The bytes that all images count as."""
        return self._by_tenant.total()

    def has(self, view: View, key: bytes) -> bool:
        """Return whether `get` would find an image; this is no use of it."""
        found = self._images.get((view.subject, (view.salt, key)))
        return found is not None and found[1] > self._clock() - KEPT_S

    def get(self, view: View, key: bytes) -> ImageT | None:
        """Return an image that a request of the view has left, or used, in the last `KEPT_S` seconds."""
        if not self.has(view, key):
            return None
        subject, name = view.subject, (view.salt, key)
        image, _ = self._images[subject, name]
        self._note_use(subject, name, image)
        return image

    def put(self, view: View, key: bytes, image: ImageT) -> None:
        """Keep an image, unless it is larger than all that may be kept.

        Another one of the same key, which is equal, stays in its place.
        """
        if self._size(image) > self._max_bytes:
            return
        subject, name = view.subject, (view.salt, key)
        if (subject, name) in self._images:
            image, _ = self._images[subject, name]
        else:
            self._count(subject, self._size(image))
        self._note_use(subject, name, image)
        self._make_room()

    def forget(self, subject: Subject) -> None:
        """Drop all images of a subject."""
        for name in list(self._names.get(subject, ())):
            self._drop(subject, name)

    def clear(self) -> None:
        """Drop all images."""
        for subject in list(self._names):
            self.forget(subject)

    async def run(self) -> NoReturn:
        """Drop images in time until cancelled."""
        await _repeat(self.expire)

    def expire(self) -> None:
        """Drop the images that have not been used for `KEPT_S` seconds."""
        limit = self._clock() - KEPT_S
        while self._images:
            oldest, (_, used_at) = next(iter(self._images.items()))
            if used_at > limit:
                return
            self._drop(*oldest)

    def _make_room(self) -> None:
        limit = self._clock() - PROTECTED_S
        while self.nbytes > self._max_bytes:
            (subject, name), (_, used_at) = next(iter(self._images.items()))
            if used_at > limit:
                ((tenant, _),) = self._by_tenant.most_common(1)
                ((subject, _),) = self._by_subject[tenant].most_common(1)
                name = next(iter(self._names[subject]))
            self._drop(subject, name)

    def _note_use(self, subject: Subject, name: _Name, image: ImageT) -> None:
        self._images[subject, name] = image, self._clock()
        self._images.move_to_end((subject, name))
        names = self._names.setdefault(subject, OrderedDict())
        names[name] = None
        names.move_to_end(name)

    def _drop(self, subject: Subject, name: _Name) -> None:
        image, _ = self._images.pop((subject, name))
        self._count(subject, -self._size(image))
        names = self._names[subject]
        del names[name]
        if not names:
            del self._names[subject]

    def _count(self, subject: Subject, nbytes: int) -> None:
        """Count bytes of a subject and its tenant; those that hold none are not named any longer."""
        subjects = self._by_subject.setdefault(subject.tenant, Counter())
        subjects[subject] += nbytes
        self._by_tenant[subject.tenant] += nbytes
        if not subjects[subject]:
            del subjects[subject]
        if not subjects:
            del self._by_subject[subject.tenant], self._by_tenant[subject.tenant]

    def _size(self, image: HasBytes) -> int:
        return max(image.nbytes, self._least_bytes)


class KeptElsewhere:
    """Images that one other service has said it keeps, by view and key."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with none; `clock` returns seconds."""
        self._clock = clock
        # In the order of their last use there.
        self._used_at: OrderedDict[tuple[View, bytes], float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used_at)

    def note(self, view: View, keys: Iterable[bytes]) -> None:
        """Record that the service keeps these images for a view."""
        now = self._clock()
        for key in keys:
            self._used_at[view, key] = now
            self._used_at.move_to_end((view, key))
        while len(self._used_at) > MOST_KNOWN:
            self._used_at.popitem(last=False)

    def has(self, view: View, key: bytes) -> bool:
        """Return whether the service may still keep an image for a view."""
        used_at = self._used_at.get((view, key))
        return used_at is not None and used_at > self._clock() - KEPT_S

    def forget(self, view: View, keys: Iterable[bytes]) -> None:
        """Record that the service may not keep these images."""
        for key in keys:
            self._used_at.pop((view, key), None)

    def clear(self) -> None:
        """Record that the service may keep none, as it may be another process now."""
        self._used_at.clear()

    async def run(self) -> NoReturn:
        """Drop names in time until cancelled."""
        await _repeat(self.expire)

    def expire(self) -> None:
        """Drop the names of images that have not been used for `KEPT_S` seconds."""
        limit = self._clock() - KEPT_S
        while self._used_at and next(iter(self._used_at.values())) <= limit:
            self._used_at.popitem(last=False)


def bytes_to_keep(configured: int | None, free_bytes: int) -> int:
    """Return the bytes of images that a service keeps; None: a share of the memory that is free."""
    if configured is not None:
        return configured
    return min(max(int(free_bytes * USUAL_SHARE), USUAL_LEAST_BYTES), USUAL_MOST_BYTES)


def key_of(file: ImageFile) -> bytes:
    """Return the SHA-256 digest of a file and of how it is to be prepared."""
    parts = file.frames or (file.data,)
    # Lengths, as other parts could be the same bytes put together.
    asked = [file.detail, file.frames_per_second, file.is_video_file, bool(file.frames), *map(len, parts)]
    digest = sha256(json.dumps(asked).encode())
    for part in parts:
        digest.update(part)
    return digest.digest()


def pixels_key(image: RowImage) -> bytes:
    """Return a name of an image's pixels: its digest, and their grid and number of embeddings."""
    return image.digest + repr((image.grid, image.length)).encode()


async def _repeat(expire: Callable[[], None]) -> NoReturn:
    while True:
        await asyncio.sleep(EXPIRY_S)
        expire()

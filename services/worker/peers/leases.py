"""Pages of this rank's device that workers of other groups may read, by the leases of its scheduler."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from common.errors import InvalidRequestError, PermissionDeniedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from services.worker.engine.execution.interface import DevicePageBytes
    from services.worker.engine.parallel.shards import Span

LEASE_BYTES = 16
# Bytes of a message with pages: far below gRPC's limit, and enough to hide the cost of a message.
MESSAGE_BYTES = 4 << 20


@dataclass(slots=True)
class _Lease:
    """`reading` is the number of readers that copy pages now; `is_idle` is set while it is 0."""

    pages: set[int] = field(default_factory=set)
    reading: int = 0
    is_idle: asyncio.Event = field(default_factory=asyncio.Event)
    has_ended: bool = False


class PageLeases:
    """Owns the leases of one rank. All methods belong to the event loop.

    The scheduler holds a reference on each page from before `grant` until `revoke` has returned, so the pages' content
    does not change in between. Leases end with the stream of plans as well.
    """

    def __init__(self, pages: Callable[[], DevicePageBytes | None]) -> None:
        """Start without leases; `pages` returns the device pages of the loaded model."""
        self._find_pages = pages
        self._leases: dict[bytes, _Lease] = {}

    def __len__(self) -> int:
        """Return the number of open leases."""
        return len(self._leases)

    def grant(self, lease: bytes, pages: Iterable[int]) -> None:
        """Add pages to a lease, which begins with that.

        Raises:
            InvalidRequestError: the lease's name is invalid, or this rank has no such pages.
        """
        if len(lease) != LEASE_BYTES:
            raise InvalidRequestError(f"a lease's name has {LEASE_BYTES} bytes", param="lease")
        if self._find_pages() is None:
            raise InvalidRequestError("this model's pages cannot be read by other groups")
        self._leases.setdefault(lease, _Lease()).pages.update(pages)

    async def revoke(self, lease: bytes) -> None:
        """End a lease; once this has returned, none of its pages is read any more."""
        ended = self._leases.pop(lease, None)
        if ended is None:
            return
        ended.has_ended = True
        if ended.reading:
            ended.is_idle.clear()
            await ended.is_idle.wait()

    def revoke_all(self) -> None:
        """End all leases, as the stream of plans has ended; readers notice before they send what they have read."""
        for lease in self._leases.values():
            lease.has_ended = True
        self._leases.clear()

    async def read(self, lease: bytes, pages: Sequence[int], heads: Span | None = None) -> AsyncIterator[bytes]:
        """Yield the content of pages, as many in each part as fit into a message; of all heads, or of `heads`.

        Raises:
            PermissionDeniedError: the lease has ended, or does not have the pages.
            InvalidRequestError: this rank does not hold these heads.
        """
        held, source = self._leases.get(lease), self._find_pages()
        if held is None or source is None or not held.pages.issuperset(pages):
            raise PermissionDeniedError("there is no lease of these pages; it may have ended")
        heads = source.form.held if heads is None else heads
        if not source.form.holds(heads):
            raise InvalidRequestError(f"this rank does not hold the KV heads [{heads.start}, {heads.stop})")
        page_bytes = source.form.bytes_of(heads)
        at_once = max(1, MESSAGE_BYTES // page_bytes)
        for first in range(0, len(pages), at_once):
            some = pages[first : first + at_once]
            content = await self._copy(held, partial(source.read_pages, some, heads))
            if held.has_ended or len(content) != len(some) * page_bytes:
                raise PermissionDeniedError("the lease has ended")
            yield content

    async def _copy(self, lease: _Lease, read: Callable[[], bytes]) -> bytes:
        if lease.has_ended:
            return b""
        lease.reading += 1
        try:
            # Shielded: a caller that goes away must not let `revoke` return while the thread still reads.
            reading = asyncio.ensure_future(asyncio.to_thread(read))
            reading.add_done_callback(lambda _: self._end(lease))
        except BaseException:
            self._end(lease)
            raise
        return await asyncio.shield(reading)

    def _end(self, lease: _Lease) -> None:
        lease.reading -= 1
        if not lease.reading:
            lease.is_idle.set()

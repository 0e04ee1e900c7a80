"""Pages of this rank's device that workers of other groups may read, by the leases of its scheduler.

All of this holds for snapshots of recurrent states as it does for pages; these are always copied by this process.

Reading ends before a lease does, in two ways. Where this process copies the pages (`read`), it knows when a copy is
over. Where a reader copies them itself, from memory that it has mapped (`MappedRead`), this process permits it a few
milliseconds of copies at a time, and the reader reports each: `revoke` waits for the reports of what was permitted.
Over a slow network, copies take seconds. Then the reader says repeatedly that they go on.

Of a reader that is killed, or whose connection breaks, no report comes. Then `revoke` waits `LINGER_S`, far longer than
permitted copies take; but a stopped process may go on at any time, so no wait is long enough to rely on. What makes
late copies harmless is that a reader may use what it has copied only once a response has confirmed it, after the copy:
the response comes only if the lease has held ever since the copy was permitted, and the pages with it. A copy after the
end of the lease reads bytes that its reader throws away, and writes nothing here. Before the memory itself is freed,
its readers are asked to unmap it; see `Borrowers`.

A scheduler that has not heard of a grant in time ends the lease, and the grant may arrive after that. It is refused, as
the pages may hold something else by then; so leases that have ended are remembered.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import InvalidRequestError, PermissionDeniedError
from services.worker.engine.host_tier.shared_pages import DIRECT_SLICE_BYTES, RECALL_S, SLICE_BYTES, SLICES_AT_ONCE
from services.worker.peers.one_ahead import one_ahead

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

    from services.worker.engine.execution.interface import DevicePageBytes
    from services.worker.engine.host_tier.shared_pages import SharedPages
    from services.worker.engine.parallel.shards import Span

LEASE_BYTES = 16
# Names of ended leases that are remembered: many more than end in the seconds for which a grant may be delayed.
ENDED_LEASES = 4096
# Bytes of a message with pages: far below gRPC's limit, and enough to hide the cost of a message.
MESSAGE_BYTES = 4 << 20
# Longest time for a report of a reader that copies pages itself, or for word that its copies go on.
SILENCE_S = 2.0
# Longest time for copies that go on without a report: a reader gives up each of them earlier (`nixl_agents.READ_S`),
# but they may wait for one another there.
COPYING_S = 30.0
# Wait for its copies if it reports no more.
LINGER_S = 2.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def this_host() -> str:
    """Return an identifier that is the same for all processes of one user on one running system."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()
    return f"{boot}/{os.getuid()}"


@dataclass(slots=True)
class _Lease:
    """`reading` is the number of readers that copy now; `is_idle` is set while it is 0."""

    pages: set[int] = field(default_factory=set)
    snapshots: set[int] = field(default_factory=set)
    reading: int = 0
    is_idle: asyncio.Event = field(default_factory=asyncio.Event)
    has_ended: bool = False

    def __post_init__(self) -> None:
        self.is_idle.set()

    def begin_reading(self) -> None:
        self.reading += 1
        self.is_idle.clear()

    def end_reading(self) -> None:
        self.reading -= 1
        if not self.reading:
            self.is_idle.set()


@dataclass(frozen=True, slots=True)
class Permission:
    """A reader of mapped pages may read the first `permitted` ones and use the first `confirmed` ones."""

    permitted: int
    confirmed: int


@dataclass(frozen=True, slots=True)
class ReaderWaits:
    """Waits for readers that copy pages themselves, in seconds; see `MappedRead`."""

    silence_s: float = SILENCE_S
    linger_s: float = LINGER_S
    copying_s: float = COPYING_S


class MappedRead:
    """A reader's copies of pages under a lease. All methods belong to the event loop.

    The reader may copy what is permitted until it reports that, or ends the read. If it does neither, nor says that
    its copies go on, for `waits.silence_s` seconds, if it reports nothing for `waits.copying_s` seconds, or if its
    connection breaks, its copies count as under way for `waits.linger_s` seconds.
    """

    def __init__(self, lease: _Lease, pages: int, window: int, waits: ReaderWaits) -> None:
        """Permit the first `window` of `pages` pages."""
        self._lease = lease
        self._pages = pages
        self._window = window
        self._waits = waits
        self._reported_at = asyncio.get_running_loop().time()
        self._read = self._confirmed = 0
        self._permitted = min(window, pages)
        self._silence: asyncio.TimerHandle | None = None
        self.is_over = not pages
        if not self.is_over:
            lease.begin_reading()
            self._await_report()

    @property
    def permission(self) -> Permission:
        """Pages that may be read and used now."""
        return Permission(self._permitted, self._confirmed)

    def report(self, read: int) -> Permission:
        """Note that the first `read` pages have been copied, of those permitted before; permit further ones.

        Raises:
            PermissionDeniedError: the lease has ended, and all that it permitted has been copied.
            InvalidRequestError: the report is not possible, so that the reader's copies are not known.
        """
        if self.is_over or not self._read < read <= self._permitted:
            self.break_off()
            raise InvalidRequestError("the reader does not report what it has read")
        self._read, self._reported_at = read, asyncio.get_running_loop().time()
        if not self._lease.has_ended:
            self._permitted, self._confirmed = min(read + self._window, self._pages), read
        if self._read < self._permitted:
            self._await_report()
            return self.permission
        self.end()
        if self._confirmed < self._pages:
            raise PermissionDeniedError("the lease has ended")
        return self.permission

    def go_on(self) -> None:
        """Wait for a report again as long as at first, if not for too long since the last one: copies are under way."""
        if not self.is_over:
            self._await_report()

    def end(self) -> None:
        """Let the lease end: the reader has stated that none of its copies is under way."""
        if not self.is_over:
            self._finish()
            self._lease.end_reading()

    def break_off(self) -> None:
        """Let the lease end later: the reader states nothing any more."""
        if not self.is_over:
            self._finish()
            asyncio.get_running_loop().call_later(self._waits.linger_s, self._lease.end_reading)

    def _finish(self) -> None:
        self.is_over = True
        if self._silence is not None:
            self._silence.cancel()

    def _await_report(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
        loop, waits = asyncio.get_running_loop(), self._waits
        end = min(loop.time() + waits.silence_s, self._reported_at + waits.copying_s)
        self._silence = loop.call_at(end, self.break_off)


class MappedReads:
    """The reads of one reader, by their numbers, which end with its call."""

    def __init__(self, leases: PageLeases) -> None:
        """Read under `leases`."""
        self._leases = leases
        self._open: dict[int, MappedRead] = {}

    def begin(
        self, number: int, lease: bytes, memory: bytes, pages: Sequence[int], *, to_device: bool = False
    ) -> Permission:
        """Begin a read; see `PageLeases.begin_read`."""
        # Those of which the reader reports no more are over by themselves.
        self._open = {each: read for each, read in self._open.items() if not read.is_over}
        if number in self._open:
            raise InvalidRequestError("this read has begun already")
        read = self._open[number] = self._leases.begin_read(lease, memory, pages, to_device=to_device)
        return read.permission

    def report(self, number: int, read: int) -> Permission:
        """Note a report; see `MappedRead.report`."""
        if number not in self._open:
            raise InvalidRequestError("there is no such read, or it took too long")
        return self._open[number].report(read)

    @property
    def silence_ms(self) -> int:
        """Milliseconds in which a report of a read is expected, or word that it goes on."""
        return round(self._leases.waits.silence_s * 1000)

    def go_on(self, number: int) -> None:
        """Note that copies of a read are under way."""
        if (read := self._open.get(number)) is not None:
            read.go_on()

    def end(self, number: int) -> None:
        """End a read that its reader has given up."""
        if (read := self._open.pop(number, None)) is not None:
            read.end()

    def close(self) -> None:
        """Break off the reads that are open, as the call has ended."""
        for read in self._open.values():
            read.break_off()


class PageLeases:
    """Owns the leases of one rank. All methods belong to the event loop.

    The scheduler holds a reference on each page, and each snapshot, from before `grant` until `revoke` has returned, so
    that their content does not change in between. Leases end with the stream of plans as well.
    """

    def __init__(self, pages: Callable[[], DevicePageBytes | None], waits: ReaderWaits | None = None) -> None:
        """Start without leases; `pages` returns the device pages of the loaded model, `waits` are for readers."""
        self._find_pages = pages
        self.waits = waits or ReaderWaits()
        self._leases: dict[bytes, _Lease] = {}
        # In the order in which they ended.
        self._ended: dict[bytes, None] = {}

    def __len__(self) -> int:
        """Return the number of open leases."""
        return len(self._leases)

    def grant(self, lease: bytes, pages: Iterable[int], snapshots: Iterable[int] = ()) -> None:
        """Add pages and snapshots to a lease, which begins with that.

        Raises:
            InvalidRequestError: the lease's name is invalid, or this rank has no such pages or snapshots.
            PermissionDeniedError: the lease has ended.
        """
        if lease in self._ended:
            raise PermissionDeniedError("the lease has ended")
        if len(lease) != LEASE_BYTES:
            raise InvalidRequestError(f"a lease's name has {LEASE_BYTES} bytes", param="lease")
        source, lent = self._find_pages(), set(snapshots)
        if source is None:
            raise InvalidRequestError("this model's pages cannot be read by other groups")
        if lent and source.snapshots is None:
            raise InvalidRequestError("this model has no snapshots", param="device_snapshots")
        held = self._leases.setdefault(lease, _Lease())
        held.pages.update(pages)
        held.snapshots.update(lent)

    async def revoke(self, lease: bytes) -> None:
        """End a lease, even before its grant arrives; once this has returned, none of its pages is read any more."""
        self._remember_ended(lease)
        ended = self._leases.get(lease)
        if ended is None:
            return
        ended.has_ended = True
        await ended.is_idle.wait()
        # Kept until here, so that a second call waits, too.
        if self._leases.get(lease) is ended:
            del self._leases[lease]

    def revoke_all(self) -> None:
        """End all leases, as the stream of plans has ended; readers notice before they use what they have read."""
        for name, lease in self._leases.items():
            self._remember_ended(name)
            lease.has_ended = True
        self._leases.clear()

    async def read(self, lease: bytes, pages: Sequence[int], heads: Span | None = None) -> AsyncGenerator[bytes, None]:
        """Yield the content of pages, as many in each part as fit into a message; of all heads, or of `heads`.

        Raises:
            PermissionDeniedError: the lease has ended, or does not have the pages.
            InvalidRequestError: this rank does not hold these heads.
        """
        held, source = self._find(lease, pages)
        heads = source.form.held if heads is None else heads
        if not source.form.holds(heads):
            raise InvalidRequestError(f"this rank does not hold the KV heads [{heads.start}, {heads.stop})")
        async with contextlib.aclosing(one_ahead(self._contents(held, source, pages, heads))) as contents:
            async for content in contents:
                # Also if it ended while, or after, they were copied.
                if held.has_ended:
                    raise PermissionDeniedError("the lease has ended")
                yield content

    async def read_snapshot(
        self, lease: bytes, snapshot: int, heads: Span | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the content of a snapshot, in parts that fit into messages; of all key heads, or of `heads`.

        Raises:
            PermissionDeniedError: the lease has ended, or does not have the snapshot.
            InvalidRequestError: this rank does not hold these heads.
        """
        held, pages = self._find(lease, ())
        source = pages.snapshots
        if source is None or snapshot not in held.snapshots:
            raise PermissionDeniedError("there is no lease of this snapshot; it may have ended")
        heads = source.form.held if heads is None else heads
        if not source.form.holds(heads):
            raise InvalidRequestError(f"this rank does not hold the key heads [{heads.start}, {heads.stop})")
        content = await self._copy(held, partial(source.read, snapshot, heads))
        for first in range(0, len(content), MESSAGE_BYTES):
            # Also if it ended while, or after, it was copied.
            if held.has_ended:
                raise PermissionDeniedError("the lease has ended")
            yield content[first : first + MESSAGE_BYTES]

    async def lend(
        self, lease: bytes, host: str, *, reads_over_nixl: bool = False
    ) -> AsyncGenerator[SharedPages | None, None]:
        """Yield the memory of the pages for a reader on `host`, and None as soon as the reader must unmap it.

        Readers on other hosts get it if they read over NIXL, and this rank lends it so.

        The memory is lent until this generator is closed.

        Raises:
            PermissionDeniedError: there is no such lease.
            InvalidRequestError: the memory cannot be shared with that reader.
        """
        _, source = self._find(lease, ())
        is_here = host == this_host()
        if not is_here and not reads_over_nixl:
            raise InvalidRequestError("the reader is on another host, or another user")
        recalled, loop = asyncio.Event(), asyncio.get_running_loop()

        def recall() -> None:
            loop.call_soon_threadsafe(recalled.set)

        # Registering memory with network cards takes long.
        lend = partial(source.lend, recall, is_here=is_here, reads_over_nixl=reads_over_nixl)
        lending = asyncio.ensure_future(asyncio.to_thread(lend))
        try:
            memory = await asyncio.shield(lending)
            if memory is None:
                way = "is not shared over NIXL" if reads_over_nixl else "cannot be shared"
                raise InvalidRequestError(f"the memory of this device {way}")
            yield memory
            await recalled.wait()
            yield None
            await asyncio.sleep(RECALL_S)
        finally:
            if lending.done():
                source.take_back(recall)
            else:
                lending.add_done_callback(lambda _: source.take_back(recall))

    def begin_read(self, lease: bytes, memory: bytes, pages: Sequence[int], *, to_device: bool = False) -> MappedRead:
        """Permit a reader to copy pages from the memory that it has mapped, part by part: larger ones to its device.

        Raises:
            PermissionDeniedError: the lease has ended, or does not have the pages.
            InvalidRequestError: the pages are in other memory.
        """
        held, source = self._find(lease, pages)
        if source.shared_name != memory:
            raise InvalidRequestError("this is not the memory of the pages")
        slice_bytes = DIRECT_SLICE_BYTES if to_device else SLICE_BYTES
        window = SLICES_AT_ONCE * max(1, slice_bytes // source.form.page_bytes)
        return MappedRead(held, len(pages), window, self.waits)

    def _remember_ended(self, lease: bytes) -> None:
        self._ended[lease] = None
        if len(self._ended) > ENDED_LEASES:
            del self._ended[next(iter(self._ended))]

    def _find(self, lease: bytes, pages: Sequence[int]) -> tuple[_Lease, DevicePageBytes]:
        held, source = self._leases.get(lease), self._find_pages()
        if held is None or held.has_ended or source is None or not held.pages.issuperset(pages):
            raise PermissionDeniedError("there is no lease of these pages; it may have ended")
        return held, source

    async def _contents(
        self, held: _Lease, source: DevicePageBytes, pages: Sequence[int], heads: Span
    ) -> AsyncGenerator[bytes, None]:
        page_bytes = source.form.bytes_of(heads)
        at_once = max(1, MESSAGE_BYTES // page_bytes)
        for first in range(0, len(pages), at_once):
            some = pages[first : first + at_once]
            content = await self._copy(held, partial(source.read_pages, some, heads))
            if len(content) != len(some) * page_bytes:
                raise PermissionDeniedError("the lease has ended")
            yield content

    async def _copy(self, lease: _Lease, read: Callable[[], bytes]) -> bytes:
        if lease.has_ended:
            return b""
        lease.begin_reading()
        try:
            # Shielded: a caller that goes away must not let `revoke` return while the thread still reads.
            reading = asyncio.ensure_future(asyncio.to_thread(read))
            reading.add_done_callback(partial(_note_end, lease))
        except BaseException:
            lease.end_reading()
            raise
        return await asyncio.shield(reading)


def _note_end(lease: _Lease, reading: asyncio.Future[bytes]) -> None:
    lease.end_reading()
    if not reading.cancelled():
        reading.exception()  # read here, as its caller may have gone away

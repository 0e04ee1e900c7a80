"""Random leases: calls that are late, repeated or unanswered, and readers and schedulers that die.

What a reader may use is always what was granted, and pages and snapshots are free only once nothing reads them.
"""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from common.errors import InvalidRequestError, PermissionDeniedError
from services.worker.engine.host_tier.page_form import PageForm
from services.worker.engine.host_tier.shared_pages import SLICE_BYTES
from services.worker.engine.parallel.shards import Span
from services.worker.peers.leases import ENDED_LEASES, MappedReads, PageLeases, ReaderWaits
from tests.services.worker.peers.lent_pages import UnwrittenPages

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from services.worker.peers.leases import Permission

PAGES = 64
# These follow the pages in what holds their contents, and in what is free.
SNAPSHOTS = 16
STEPS = 600
MEMORY = b"m" * 16


@dataclass(frozen=True, slots=True)
class Read:
    """A read of pages that goes on until `gate` is set; it began in the `life` of a scheduler."""

    life: int
    pages: frozenset[int]
    gate: threading.Event


class Snapshots:
    """Snapshots of a `Device`."""

    form = PageForm(((1, 64),), Span(0, 1), 1)

    def __init__(self, device: Device) -> None:
        self._device = device

    def read(self, snapshot: int, heads: Span) -> bytes:
        number = self._device.number_of(PAGES + snapshot)
        return number.to_bytes(4, "little") * (self.form.page_bytes // 4)

    def write(self, snapshot: int, content: memoryview) -> None:
        raise AssertionError("nothing is written")


class Device(UnwrittenPages):
    """Pages that hold the number of the lease that they were last written for; reads last until they are let go.

    They belong to a scheduler, number `life`, and those of the next one are the same memory.
    """

    # Two pages fit into a message, and into what is copied at a time.
    form = PageForm(((1, SLICE_BYTES // 2),), Span(0, 1), 1)
    shared_name: bytes | None = MEMORY

    def __init__(self, content: list[int], reads: list[Read], life: int) -> None:
        self.content = content
        self.reads = reads
        self.life = life
        self.snapshots = Snapshots(self)

    def number_of(self, place: int) -> int:
        """Return the content of a page or a snapshot, after a while."""
        self._wait([place])
        return self.content[place]

    def _wait(self, places: Sequence[int]) -> None:
        read = Read(self.life, frozenset(places), threading.Event())
        self.reads.append(read)
        assert read.gate.wait(20)

    def read_pages(self, pages: Sequence[int], heads: Span) -> bytes:
        self._wait(pages)
        return b"".join(self.content[page].to_bytes(4, "little") * (self.form.page_bytes // 4) for page in pages)

    def lend(self, recall: Callable[[], None], *, is_here: bool = True, reads_over_nixl: bool = False) -> None:
        raise AssertionError("memory is mapped already")

    def take_back(self, recall: Callable[[], None]) -> None:
        raise AssertionError("memory is mapped already")


@dataclass(slots=True)
class Loan:
    """A lease as its scheduler knows it: `pages` are held for it, and the first `granted` ones are known to readers."""

    number: int
    name: bytes
    pages: list[int] = field(default_factory=list)
    granted: int = 0
    # A snapshot that it holds, and whether readers know it.
    snapshot: int | None = None
    has_granted_snapshot: bool = False

    @property
    def places(self) -> set[int]:
        """Its content, pages and snapshot."""
        return set(self.pages) | (set() if self.snapshot is None else {PAGES + self.snapshot})


@dataclass(slots=True, eq=False)
class Copying:
    """A read of mapped memory: the reader copies what it is permitted, and reports it; `copied` are the contents."""

    loan: Loan
    life: int
    pages: list[int]
    call: MappedReads
    number: int
    permitted: int = 0
    copied: list[int] = field(default_factory=list)


class Lives:
    """One worker's leases, the scheduler that grants them, and readers of other groups."""

    def __init__(self, seed: int) -> None:
        self.confirmed = self.refused_grants = self.ended = self.confirmed_snapshots = 0
        self._random = random.Random(seed)
        self._device = Device([0] * (PAGES + SNAPSHOTS), [], 0)
        self._leases = PageLeases(lambda: self._device, ReaderWaits(60, 0.01, 60))
        self._free = set(range(PAGES))
        self._free_snapshots = set(range(SNAPSHOTS))
        self._loans: dict[int, Loan] = {}
        self._number = 0
        # Calls that have been sent and have not arrived.
        self._sent: list[Callable[[], Coroutine[None, None, None]]] = []
        self._calls: set[asyncio.Task[None]] = set()
        self._readers: set[asyncio.Task[None]] = set()
        self._failed: list[BaseException] = []
        self._copying: list[Copying] = []
        self._calls_for_reads = [MappedReads(self._leases) for _ in range(2)]

    async def live(self) -> None:
        actions = [self._lend, self._lend, self._extend, self._end, self._read, self._read, self._follow]
        actions += [self._extend_by_snapshot] * 2 + [self._read_snapshot] * 3
        actions += [self._arrive] * 4 + [self._go_on] * 4 + [self._copy] * 4
        actions += [self._say, self._give_up, self._kill_reader, self._kill_scheduler]
        try:
            for _ in range(STEPS):
                await self._random.choice(actions)()
                await asyncio.sleep(0)
                assert not self._failed, self._failed
            await self._settle()
        finally:
            for read in self._device.reads:
                read.gate.set()

    async def _settle(self) -> None:
        """End all leases; let all calls arrive and all reads end."""
        for loan in list(self._loans.values()):
            self._revoke(loan)
        while self._sent or self._calls or self._readers or self._device.reads or self._copying:
            await self._arrive()
            await self._go_on()
            await self._copy()
            await asyncio.sleep(0.0005)
        assert not self._failed, self._failed
        assert not self._leases
        assert self._free == set(range(PAGES))
        assert self._free_snapshots == set(range(SNAPSHOTS))

    def _start(self, tasks: set[asyncio.Task[None]], call: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(call)
        tasks.add(task)

        def note_done(_: asyncio.Task[None]) -> None:
            tasks.discard(task)
            if not task.cancelled() and (failed := task.exception()) is not None:
                self._failed.append(failed)

        task.add_done_callback(note_done)

    async def _lend(self) -> None:
        self._number += 1
        loan = Loan(self._number, self._number.to_bytes(16, "little"))
        self._loans[loan.number] = loan
        self._grant(loan)

    async def _extend(self) -> None:
        if self._loans:
            self._grant(self._random.choice(list(self._loans.values())))

    def _grant(self, loan: Loan) -> None:
        """Send a grant of free pages, once or several times."""
        new = self._random.sample(sorted(self._free), min(len(self._free), self._random.randint(1, 8)))
        self._free -= set(new)
        for page in new:
            self._device.content[page] = loan.number
        loan.pages += new
        end = len(loan.pages)

        async def grant() -> None:
            try:
                self._leases.grant(loan.name, new)
            except PermissionDeniedError:
                assert loan.number not in self._loans
                self.refused_grants += 1
                return
            # Answers may be lost, and those of earlier grants missing.
            if self._random.random() < 0.9 and loan.granted == end - len(new):
                loan.granted = end

        self._send(grant)

    async def _extend_by_snapshot(self) -> None:
        """Send a grant of a free snapshot, alone, once or several times."""
        loans = [loan for loan in self._loans.values() if loan.snapshot is None]
        if not loans or not self._free_snapshots:
            return
        loan, slot = self._random.choice(loans), self._random.choice(sorted(self._free_snapshots))
        self._free_snapshots.remove(slot)
        self._device.content[PAGES + slot] = loan.number
        loan.snapshot = slot

        async def grant() -> None:
            try:
                self._leases.grant(loan.name, (), [slot])
            except PermissionDeniedError:
                assert loan.number not in self._loans
                self.refused_grants += 1
                return
            loan.has_granted_snapshot = self._random.random() < 0.9

        self._send(grant)

    async def _end(self) -> None:
        if self._loans:
            self._revoke(self._random.choice(list(self._loans.values())))

    def _revoke(self, loan: Loan) -> None:
        """Send the end of a lease, once or several times; the first answer frees its pages."""
        del self._loans[loan.number]

        async def revoke() -> None:
            await self._leases.revoke(loan.name)
            assert not self._being_read() & loan.places, "pages or snapshots are free that are being read"
            self._free |= set(loan.pages)
            if loan.snapshot is not None:
                self._free_snapshots.add(loan.snapshot)
            for place in loan.places:
                self._device.content[place] = 0
            self.ended += bool(loan.pages)
            loan.pages, loan.snapshot = [], None

        self._send(revoke)

    def _being_read(self) -> set[int]:
        """Pages that are read under leases of the present scheduler."""
        life = self._device.life
        reading = set[int]().union(*(read.pages for read in self._device.reads if read.life == life))
        for copying in self._copying:
            if copying.life == life:
                reading |= set(copying.pages[len(copying.copied) : copying.permitted])
        return reading

    def _send(self, call: Callable[[], Coroutine[None, None, None]]) -> None:
        self._sent += [call] * self._random.choice([1, 1, 2, 3])

    async def _arrive(self) -> None:
        """Let any of the calls arrive, in any order."""
        if self._sent:
            self._start(self._calls, self._sent.pop(self._random.randrange(len(self._sent)))())

    def _some_offered(self) -> tuple[Loan, list[int]] | None:
        """Pages that a reader knows, some of them perhaps twice, also of leases that end at this moment."""
        offered = [loan for loan in self._loans.values() if loan.granted]
        if not offered:
            return None
        loan = self._random.choice(offered)
        return loan, self._random.choices(loan.pages[: loan.granted], k=self._random.randint(1, 12))

    async def _read(self) -> None:
        if (offered := self._some_offered()) is not None:
            self._start(self._readers, self._receive(*offered))

    async def _receive(self, loan: Loan, pages: list[int]) -> None:
        try:
            async for part in self._leases.read(loan.name, pages):
                page_bytes = Device.form.page_bytes
                for first in range(0, len(part), page_bytes):
                    self._confirm(loan, int.from_bytes(part[first : first + 4], "little"))
        except PermissionDeniedError:
            pass

    async def _read_snapshot(self) -> None:
        lent = [loan for loan in self._loans.values() if loan.has_granted_snapshot]
        if lent:
            loan = self._random.choice(lent)
            assert loan.snapshot is not None
            self._start(self._readers, self._receive_snapshot(loan, loan.snapshot))

    async def _receive_snapshot(self, loan: Loan, snapshot: int) -> None:
        try:
            parts = [part async for part in self._leases.read_snapshot(loan.name, snapshot)]
        except PermissionDeniedError:
            return
        assert sum(map(len, parts)) in (0, Snapshots.form.page_bytes)
        for part in parts:
            self._confirm(loan, int.from_bytes(part[:4], "little"))
        self.confirmed_snapshots += bool(parts)

    def _confirm(self, loan: Loan, content: int) -> None:
        assert content == loan.number, "content of another lease"
        self.confirmed += 1

    async def _go_on(self) -> None:
        """Let a read of the device end."""
        if self._device.reads:
            self._device.reads.pop(self._random.randrange(len(self._device.reads))).gate.set()
            await asyncio.sleep(0.0005)

    async def _follow(self) -> None:
        """Have one of two readers begin a read, beside those that it has open."""
        if (offered := self._some_offered()) is None:
            return
        loan, pages = offered
        self._number += 1
        call = self._random.choice(self._calls_for_reads)
        copying = Copying(loan, self._device.life, pages, call, self._number)
        try:
            permission = call.begin(copying.number, loan.name, MEMORY, pages)
        except PermissionDeniedError:
            return
        self._copying.append(copying)
        self._use(copying, permission)

    async def _copy(self) -> None:
        """Have a reader copy some of what it may, and report that."""
        if self._copying:
            copying = self._random.choice(self._copying)
            begin = len(copying.copied)
            end = self._random.randint(begin + 1, copying.permitted)
            copying.copied += [self._device.content[page] for page in copying.pages[begin:end]]
            try:
                permission = copying.call.report(copying.number, end)
            except (PermissionDeniedError, InvalidRequestError):
                self._copying.remove(copying)
                return
            self._use(copying, permission)

    def _use(self, copying: Copying, permission: Permission) -> None:
        """Use what is confirmed by the answer to a report."""
        copying.permitted = permission.permitted
        for content in copying.copied[: permission.confirmed]:
            self._confirm(copying.loan, content)
        if copying.permitted == len(copying.copied):
            assert permission.confirmed == len(copying.pages)
            self._copying.remove(copying)

    async def _say(self) -> None:
        """Have a reader say that its copies go on, perhaps of a read that is over."""
        if self._copying:
            self._random.choice(self._copying).call.go_on(self._random.randint(1, self._number))

    async def _give_up(self) -> None:
        """Have a reader give up a read, at least once."""
        if self._copying:
            copying = self._copying.pop(self._random.randrange(len(self._copying)))
            for _ in range(self._random.choice([1, 2])):
                copying.call.end(copying.number)

    async def _kill_reader(self) -> None:
        """Its call breaks, with all its reads; another one takes its place."""
        if self._random.random() < 0.3:
            index = self._random.randrange(len(self._calls_for_reads))
            call, self._calls_for_reads[index] = self._calls_for_reads[index], MappedReads(self._leases)
            self._copying = [copying for copying in self._copying if copying.call is not call]
            call.close()

    async def _kill_scheduler(self) -> None:
        """Its calls are cut off, and the pages are those of another one."""
        if self._random.random() < 0.2:
            self._sent.clear()
            for task in self._calls:
                task.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)
            self._leases.revoke_all()
            self._loans.clear()
            self._free, self._free_snapshots = set(range(PAGES)), set(range(SNAPSHOTS))
            self._device.content[:] = [0] * (PAGES + SNAPSHOTS)
            self._device = Device(self._device.content, self._device.reads, self._device.life + 1)


@pytest.mark.parametrize(
    "seeds", [range(10), *(pytest.param(range(n, n + 25), marks=pytest.mark.extended) for n in range(10, 110, 25))]
)
async def test_pages_are_read_under_their_lease_only_and_free_after_it(seeds: range) -> None:
    confirmed = refused = ended = snapshots = 0
    for seed in seeds:
        lives = Lives(seed)
        async with asyncio.timeout(60):
            await lives.live()
        confirmed, refused, ended = confirmed + lives.confirmed, refused + lives.refused_grants, ended + lives.ended
        snapshots += lives.confirmed_snapshots
    assert confirmed > 100
    assert snapshots > 10
    assert refused > 10
    assert ended > 100


async def test_a_grant_after_the_end_of_its_lease_is_refused() -> None:
    device = Device([0] * PAGES, [], 0)
    leases = PageLeases(lambda: device)
    names = [number.to_bytes(16, "little") for number in range(ENDED_LEASES + 1)]
    for name in names[1:]:
        # As if the end had overtaken the grant.
        await leases.revoke(name)
    for name in (names[1], names[-1]):
        with pytest.raises(PermissionDeniedError):
            leases.grant(name, [1])
    leases.grant(names[0], [1])
    leases.revoke_all()
    with pytest.raises(PermissionDeniedError):
        leases.grant(names[0], [1])
    assert not leases

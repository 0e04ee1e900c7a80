"""Two workers that lend and map pages of each other: real gRPC and leases on both sides, but fake memory."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np

from common.rpc.channel import open_channel
from common.rpc.server import RpcServer
from common.transfers import PeerPages, Transfer, TransferAck, TransferDirection, TransferId
from protos.gen.pando.v1 import worker_pb2, worker_pb2_grpc
from services.worker.engine.host_tier.page_form import PageForm
from services.worker.engine.host_tier.shared_pages import (
    SLICE_BYTES,
    SLICES_AT_ONCE,
    Borrowers,
    BrokenReadError,
    MappedPages,
    SharedPages,
    SharingError,
)
from services.worker.engine.parallel.shards import Span
from services.worker.peers.leases import PageLeases, ReaderWaits
from services.worker.peers.reading import PeerReader
from services.worker.peers.targets import DeviceTarget, HostTarget, PeerTarget
from services.worker.service import WorkerService
from services.worker.stream_pages import StreamDevicePages, StreamPages
from tests.fakes.storage import FakeHostPages
from tests.services.worker.peers.lent_pages import UnwrittenPages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    import grpc

    from common.steps import PageIds
    from services.worker.grammars.desk import GrammarDesk
    from services.worker.peers.targets import TargetPages
    from services.worker.rank import Rank

LEASE = b"l" * 16
PAGES = 24
LINGER_S = 0.5  # of an impatient lender
PATIENT = ReaderWaits(60, 60, 60)
IMPATIENT = ReaderWaits(LINGER_S, LINGER_S, LINGER_S)
WINDOW = 2 * SLICES_AT_ONCE  # pages that may be read at a time, two in each slice


class FakeSharing:
    """Handles and addresses of one process. `refuses`: nothing can be mapped."""

    def __init__(self) -> None:
        self.open_handles: list[bytes] = []
        self.refuses: set[bytes] = set()

    def export(self, address: int) -> tuple[bytes, int]:
        return (address // 100).to_bytes(1, "little"), address % 100

    def open(self, handle: bytes) -> int:
        if handle in self.refuses:
            raise SharingError("it cannot be mapped")
        self.open_handles.append(handle)
        return handle[0] * 100

    def close(self, address: int) -> None:
        self.open_handles.remove(bytes([address // 100]))


class Device(UnwrittenPages):
    """Pages of a lender, whose content is their number; `version` is in its upper half, as if it were overwritten."""

    def __init__(self, *, can_share: bool = True, over_nixl: bool = False) -> None:
        self.form = PageForm(((1, SLICE_BYTES // 2),), Span(0, 1), 1)
        self.version = 0
        self.can_share = can_share
        # The only way in which it is lent.
        self.over_nixl = over_nixl
        self.shared_name: bytes | None = None
        self.borrowers = Borrowers(recall_s=20)

    def read_page(self, page: int) -> bytes:
        return (self.version << 16 | page).to_bytes(4, "little")

    def read_pages(self, pages: Sequence[int], heads: Span) -> bytes:
        return b"".join(self.read_page(page) * (self.form.page_bytes // 4) for page in pages)

    def lend(
        self, recall: Callable[[], None], *, is_here: bool = True, reads_over_nixl: bool = False
    ) -> SharedPages | None:
        can_share = self.can_share and (reads_over_nixl if self.over_nixl else is_here)
        if not can_share or not self.borrowers.add(recall):
            return None
        self.shared_name = self.shared_name or secrets.token_bytes(16)
        return SharedPages(self.shared_name, PAGES, 4, (b"a", b"b"), ((0, 0), (1, 8)), self.over_nixl)

    def take_back(self, recall: Callable[[], None]) -> None:
        self.borrowers.remove(recall)


class FakeCopies:
    """Copies from the device of a test. While `gate` is cleared copies wait; `begun` are pages of all copies."""

    slice_pages = 2
    direct_slice_pages = 16

    def __init__(self, sharing: FakeSharing, host: FakeHostPages, device: Callable[[], Device]) -> None:
        self._sharing = sharing
        self._host = host
        self._device = device
        self.gate = threading.Event()
        self.gate.set()
        self.begun: list[int] = []
        # Pages of the largest copy.
        self.largest = 0
        self.is_broken = False
        self.running = 0
        self.is_ready = True
        self.reads_over_nixl = False
        # Waits for passes, and how long they take.
        self.waits = 0
        self.passes_s = 0.0

    def can_write(self, host_pages: PageIds) -> bool:
        return self.is_ready

    def map(self, memory: SharedPages) -> MappedPages:
        return MappedPages(memory, self._sharing)

    def copy(self, source: MappedPages, pages: PageIds, host_pages: PageIds) -> None:
        if self.is_broken:
            raise BrokenReadError("no answer")
        self.begun += pages.tolist()
        self.largest = max(self.largest, len(pages))
        self.running += 1
        assert self.gate.wait(30)
        assert self._sharing.open_handles, "the memory is mapped as long as copies run"
        for page, host_page in zip(pages.tolist(), host_pages.tolist(), strict=True):
            self._host.pages[host_page] = self._device().read_page(page) * (self._host.page_bytes // 4)
        self.running -= 1

    def note_wait(self) -> None:
        time.sleep(self.passes_s)
        self.waits += 1

    def copy_to_device(self, source: MappedPages, pages: PageIds, device_pages: PageIds) -> None:
        assert self.waits > 0, "passes may still read what is there"
        self.copy(source, pages, device_pages)


class CountingService(WorkerService):
    """A worker that counts calls, as far as pages are concerned."""

    def __init__(self, leases: PageLeases) -> None:
        super().__init__(
            cast("Rank", SimpleNamespace(leases=leases)), cast("GrammarDesk", None), cast("PeerReader", None)
        )
        self.calls: list[str] = []

    def MapPages(
        self, request: worker_pb2.MapPagesRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[worker_pb2.MapPagesResponse]:
        self.calls.append("map")
        return super().MapPages(request, context)

    def ReadMappedPages(
        self,
        request_iterator: AsyncIterator[worker_pb2.ReadMappedPagesRequest],
        context: grpc.aio.ServicerContext[object, object],
    ) -> AsyncIterator[worker_pb2.ReadMappedPagesResponse]:
        self.calls.append("permit")
        return super().ReadMappedPages(request_iterator, context)

    def ReadPages(
        self, request: worker_pb2.ReadPagesRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[worker_pb2.ReadPagesResponse]:
        self.calls.append("read")
        return super().ReadPages(request, context)


class Bench:
    """A lender and a reader, whose pages are so large for leases that a few may be read at a time."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder}/worker.sock"
        self.device = Device()
        self.sharing = FakeSharing()
        self.host = FakeHostPages(4, [bytes(4)] * PAGES)
        self.copies = FakeCopies(self.sharing, self.host, lambda: self.device)
        self.pages = StreamPages(self.host)
        self.reader = PeerReader(open_channel, silence_s=20)
        self.serve()

    def serve(self) -> None:
        self.leases = PageLeases(lambda: self.device, PATIENT)
        self.leases.grant(LEASE, range(PAGES))
        self.service = CountingService(self.leases)
        self.server = RpcServer("pando.v1.Worker", self.address)
        self.server.add(worker_pb2_grpc.add_WorkerServicer_to_server, self.service)

    def shrink_pages(self) -> None:
        """Let pages be as large as they are, so that they can be sent as bytes."""
        self.device.form = PageForm(((1, 4),), Span(0, 1), 1)

    async def fetch(self, pages: Sequence[int], device: StreamDevicePages | None = None) -> TransferAck:
        """Read pages into the first ones of the host, or of a device, whose pages the fake copies keep there, too."""
        peer = PeerPages((self.address,), LEASE, np.array(pages, np.int32))
        arriving = np.arange(len(pages), dtype=np.int32)
        transfer = Transfer(TransferId(7), TransferDirection.PEER_TO_HOST, host_pages=arriving, peer=peer)
        tier: TargetPages = HostTarget(self.pages)
        if device is not None:
            transfer = Transfer(TransferId(7), TransferDirection.PEER_TO_DEVICE, arriving, peer=peer)
            tier = DeviceTarget(device, self.copies.note_wait)
        acks: asyncio.Queue[TransferAck] = asyncio.Queue()
        target = PeerTarget(tier, 0, 1, self.device.form, self.copies)
        self.reader.begin(transfer, target, acks.put_nowait)
        async with asyncio.timeout(30):
            return await acks.get()

    async def fetch_slowly(self, pages: Sequence[int], beside: int = 0) -> asyncio.Task[TransferAck]:
        """Begin to read; return when copies of all permitted pages wait, as `beside` copies did before."""
        if beside:
            self.copies.gate = threading.Event()
        self.copies.gate.clear()
        fetching = asyncio.create_task(self.fetch(pages))
        await until(lambda: self.copies.running == beside + SLICES_AT_ONCE)
        return fetching

    def content(self, pages: Sequence[int]) -> list[bytes]:
        return [self.device.read_page(page) for page in pages]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110  (nothing notifies)
            await asyncio.sleep(0.002)

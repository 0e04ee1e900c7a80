"""Workers read pages of other groups' workers: real gRPC on both sides, leases, and what ends them."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest

from common.errors import ConfigurationError, InvalidRequestError, PermissionDeniedError
from common.rpc.channel import open_channel
from common.rpc.server import RpcServer
from common.transfers import PeerPages, Transfer, TransferAck, TransferDirection, TransferId
from protos.gen.pando.v1 import worker_pb2, worker_pb2_grpc
from services.worker.engine.host_tier.page_form import PageForm
from services.worker.engine.parallel.shards import Span, split_kv_heads
from services.worker.peers.leases import MESSAGE_BYTES, PageLeases
from services.worker.peers.reading import PeerReader
from services.worker.peers.targets import DeviceTarget, HostTarget, PeerTarget
from services.worker.stream_pages import StreamDevicePages, StreamPages
from tests.fakes.storage import FakeHostPages
from tests.services.worker.peers.lent_pages import UnwrittenPages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from services.worker.engine.execution.interface import AfterPasses
    from services.worker.engine.host_tier.shared_pages import SharedPages

LEASE, OTHER = b"l" * 16, b"o" * 16


class UnsharedMemory(UnwrittenPages):
    """The memory of these pages cannot be mapped."""

    shared_name: bytes | None = None

    def lend(
        self, recall: Callable[[], None], *, is_here: bool = True, reads_over_nixl: bool = False
    ) -> SharedPages | None:
        return None

    def take_back(self, recall: Callable[[], None]) -> None:
        raise AssertionError("nothing was lent")


class Device(UnsharedMemory):
    """Pages whose content is their number; `gate` holds readers back while it is cleared."""

    def __init__(self, page_bytes: int = 4) -> None:
        self.form = PageForm(((1, page_bytes),), Span(0, 1), 1)
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = 0
        self.read = 0

    def read_pages(self, pages: Sequence[int], heads: Span) -> bytes:
        self.waiting += 1
        self.gate.wait()
        self.read += len(pages)
        return b"".join(page.to_bytes(4, "little") * (self.form.page_bytes // 4) for page in pages)


async def read(leases: PageLeases, lease: bytes, pages: list[int]) -> bytes:
    return b"".join([part async for part in leases.read(lease, pages)])


def content(*pages: int) -> bytes:
    return b"".join(page.to_bytes(4, "little") for page in pages)


async def test_only_pages_of_the_lease_are_read() -> None:
    leases = PageLeases(Device)
    leases.grant(LEASE, [1, 2])
    leases.grant(LEASE, [3])
    leases.grant(OTHER, [4])
    assert await read(leases, LEASE, [3, 1]) == content(3, 1)
    for lease, pages in ((LEASE, [4]), (LEASE, [1, 4]), (OTHER, [1]), (b"n" * 16, [1])):
        with pytest.raises(PermissionDeniedError):
            await read(leases, lease, pages)
    await leases.revoke(LEASE)
    await leases.revoke(LEASE)
    with pytest.raises(PermissionDeniedError):
        await read(leases, LEASE, [1])
    leases.revoke_all()
    assert len(leases) == 0


async def test_a_lease_needs_a_name_and_pages() -> None:
    with pytest.raises(InvalidRequestError):
        PageLeases(Device).grant(b"short", [1])
    with pytest.raises(InvalidRequestError):
        PageLeases(lambda: None).grant(LEASE, [1])


async def test_pages_come_in_messages_of_bounded_size() -> None:
    leases = PageLeases(lambda: Device(MESSAGE_BYTES // 2))
    leases.grant(LEASE, range(5))
    sizes = [len(part) async for part in leases.read(LEASE, range(5))]
    assert sizes == [MESSAGE_BYTES, MESSAGE_BYTES, MESSAGE_BYTES // 2]


async def test_revoking_waits_for_readers_also_for_those_that_have_gone_away() -> None:
    device = Device()
    leases = PageLeases(lambda: device)
    leases.grant(LEASE, [1])
    device.gate.clear()
    readers = [asyncio.create_task(read(leases, LEASE, [1])) for _ in range(2)]
    while device.waiting < 2:  # noqa: ASYNC110  (threads cannot notify)
        await asyncio.sleep(0.001)
    readers[0].cancel()
    revoking = asyncio.create_task(leases.revoke(LEASE))
    await asyncio.sleep(0.05)
    assert not revoking.done()
    device.gate.set()
    await revoking
    # What was read meanwhile is not sent: it might have been written since.
    with pytest.raises(PermissionDeniedError):
        await readers[1]


async def test_content_that_was_read_ahead_is_not_sent_after_the_lease_has_ended() -> None:
    device = Device(MESSAGE_BYTES)
    leases = PageLeases(lambda: device)
    leases.grant(LEASE, range(4))
    contents = leases.read(LEASE, range(4))
    assert len(await anext(contents)) == MESSAGE_BYTES
    # The second page is read meanwhile.
    while device.read < 2:  # noqa: ASYNC110  (threads cannot notify)
        await asyncio.sleep(0.001)
    # So that it waits to be sent, and not only to be looked at.
    await asyncio.sleep(0.01)
    await leases.revoke(LEASE)
    with pytest.raises(PermissionDeniedError):
        await anext(contents)
    assert device.read == 2


class PageServer(worker_pb2_grpc.WorkerServicer):
    """The part of a worker that serves pages; `cuts` ends each call after so many messages."""

    def __init__(self, leases: PageLeases) -> None:
        self.leases = leases
        self.cuts: int | None = None
        self.hangs = False

    async def ReadPages(
        self, request: worker_pb2.ReadPagesRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[worker_pb2.ReadPagesResponse]:
        sent = 0
        heads = Span(request.first_head, request.first_head + request.heads)
        async for part in self.leases.read(request.lease, list(request.device_pages), heads):
            if sent == self.cuts:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            if self.hangs and sent:
                await asyncio.Event().wait()
            yield worker_pb2.ReadPagesResponse(content=part)
            sent += 1


class Bench:
    def __init__(self, folder: Path, device: Device) -> None:
        self.address = f"unix:{folder}/worker.sock"
        self.leases = PageLeases(lambda: device)
        self.service = PageServer(self.leases)  # type: ignore[abstract]  # only pages are asked for
        self.server = RpcServer("pando.v1.Worker", self.address)
        self.server.add(worker_pb2_grpc.add_WorkerServicer_to_server, self.service)
        self.form = device.form
        self.host = FakeHostPages(self.form.page_bytes, [bytes(self.form.page_bytes) for _ in range(8)])
        self.pages = StreamPages(self.host)
        self.reader = PeerReader(open_channel, silence_s=20)

    async def fetch(
        self, pages: list[int], into: list[int], lease: bytes = LEASE, target: DeviceTarget | None = None
    ) -> TransferAck:
        """Read pages into those of the host, or of the device if there is such a target."""
        peer = PeerPages(("unix:nobody", self.address), lease, np.array(pages, np.int32))
        arriving = np.array(into, np.int32)
        transfer = Transfer(TransferId(7), TransferDirection.PEER_TO_HOST, host_pages=arriving, peer=peer)
        if target is not None:
            transfer = Transfer(TransferId(7), TransferDirection.PEER_TO_DEVICE, arriving, peer=peer)
        acks: asyncio.Queue[TransferAck] = asyncio.Queue()
        self.reader.begin(transfer, PeerTarget(target or HostTarget(self.pages), 1, 2, self.form), acks.put_nowait)
        async with asyncio.timeout(30):
            return await acks.get()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path, Device(MESSAGE_BYTES // 2))
    await bench.server.start()
    yield bench
    await bench.reader.close()
    await bench.server.stop(0)


async def test_pages_are_read_from_the_worker_of_the_same_rank(bench: Bench) -> None:
    bench.leases.grant(LEASE, [5, 6, 7])
    ack = await bench.fetch([7, 5, 6], [2, 0, 1])
    assert (ack.transfer_id, ack.done_pages) == (7, 3)
    assert [page[:4] for page in bench.host.pages[:3]] == [content(5), content(6), content(7)]


async def test_the_time_of_transfers_beside_each_other_counts_once(bench: Bench) -> None:
    bench.leases.grant(LEASE, range(8))
    started = time.monotonic()
    acks = await asyncio.gather(*(bench.fetch([page], [page]) for page in range(8)))
    assert all(ack.done_pages == 1 and ack.duration_us > 0 for ack in acks)
    assert sum(ack.duration_us for ack in acks) <= (time.monotonic() - started) * 1e6 + len(acks)


async def test_a_lease_that_is_unknown_is_a_miss(bench: Bench) -> None:
    bench.leases.grant(OTHER, [5])
    assert (await bench.fetch([5], [0])).done_pages == 0


async def test_a_call_that_breaks_keeps_the_pages_before(bench: Bench) -> None:
    bench.leases.grant(LEASE, range(8))
    bench.service.cuts = 1
    assert (await bench.fetch([0, 1, 2, 3], [0, 1, 2, 3])).done_pages == 2
    assert bench.host.pages[2] == bytes(MESSAGE_BYTES // 2)


async def test_a_peer_that_falls_silent_or_is_away_is_given_up(bench: Bench) -> None:
    bench.leases.grant(LEASE, range(8))
    bench.service.hangs = True
    bench.reader._silence_s = 2
    assert (await bench.fetch([0, 1, 2, 3], [0, 1, 2, 3])).done_pages == 2
    await bench.server.stop(0)
    assert (await bench.fetch([0], [0])).done_pages == 0


async def test_a_peer_that_cannot_be_called_at_all_is_a_miss(bench: Bench) -> None:
    def refuse(_address: str) -> grpc.aio.Channel:
        raise ConfigurationError("TCP needs TLS")

    connect, bench.reader._connect = bench.reader._connect, refuse
    assert (await bench.fetch([5], [0])).done_pages == 0
    bench.reader._connect = connect
    bench.leases.grant(LEASE, [5])
    assert (await bench.fetch([5], [0])).done_pages == 1


async def test_nothing_is_written_after_the_stream_of_plans_has_ended(bench: Bench) -> None:
    bench.leases.grant(LEASE, [5])
    bench.pages.close()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await bench.fetch([5], [0])
    assert bench.host.pages[0] == bytes(MESSAGE_BYTES // 2)


class WrittenDevice(UnsharedMemory):
    """Pages of a reading rank's device; those that are written are kept in `pages`, and `waits` counts the waits."""

    def __init__(self, form: PageForm) -> None:
        self.form = form
        self.pages: dict[int, bytes] = {}
        self.waits = 0

    def after_passes(self) -> AfterPasses:
        def wait() -> None:
            self.waits += 1

        return wait

    def read_pages(self, pages: Sequence[int], heads: Span) -> bytes:
        raise AssertionError("nothing is read")

    def write_pages(self, pages: Sequence[int], content: memoryview) -> None:
        assert self.waits > 0, "passes may still read what is there"
        size = self.form.page_bytes
        self.pages |= {page: bytes(content[at * size : (at + 1) * size]) for at, page in enumerate(pages)}


async def test_pages_arrive_on_the_device_after_the_passes_that_may_read_what_was_there(bench: Bench) -> None:
    bench.leases.grant(LEASE, range(8))
    device = WrittenDevice(bench.form)
    target = DeviceTarget(StreamDevicePages(device), device.after_passes())
    assert (await bench.fetch([7, 5, 6], [12, 10, 11], target=target)).done_pages == 3
    assert {page: held[:4] for page, held in device.pages.items()} == {12: content(7), 10: content(5), 11: content(6)}
    assert device.waits == 1
    bench.service.cuts = 1
    assert (await bench.fetch([0, 1, 2, 3], [0, 1, 2, 3], target=target)).done_pages == 2
    assert 2 not in device.pages


async def test_nothing_is_written_to_the_device_after_the_stream_of_plans_has_ended(bench: Bench) -> None:
    bench.leases.grant(LEASE, [5])
    device = WrittenDevice(bench.form)
    pages = StreamDevicePages(device)
    pages.close()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await bench.fetch([5], [0], target=DeviceTarget(pages, device.after_passes()))
    assert device.pages == {}


class HeadDevice(UnsharedMemory):
    """Pages of four heads of 8 bytes, of which a rank holds some; each byte depends on page and head."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.form = PageForm(((1, 8),), split_kv_heads(4, rank, ranks), 4)

    def read_pages(self, pages: Sequence[int], heads: Span) -> bytes:
        return b"".join(bytes([page * 16 + head] * 8) for page in pages for head in range(heads.start, heads.stop))


class Ranks:
    """The ranks of a group that lends pages, over real gRPC."""

    def __init__(self, folder: Path, count: int) -> None:
        self.addresses = tuple(f"unix:{folder}/worker-{rank}.sock" for rank in range(count))
        self.services = []
        self.servers = []
        for rank, address in enumerate(self.addresses):
            leases = PageLeases(partial(HeadDevice, rank, count))
            leases.grant(LEASE, range(8))
            self.services.append(PageServer(leases))  # type: ignore[abstract]  # only pages are asked for
            self.servers.append(RpcServer("pando.v1.Worker", address))
            self.servers[-1].add(worker_pb2_grpc.add_WorkerServicer_to_server, self.services[-1])

    async def read(self, rank: int, ranks: int, pages: list[int]) -> tuple[TransferAck, list[bytes]]:
        """Have a rank of another group read pages; return its acknowledgement and its host pages."""
        form = HeadDevice(rank, ranks).form
        host = FakeHostPages(form.page_bytes, [bytes(form.page_bytes) for _ in pages])
        peer = PeerPages(self.addresses, LEASE, np.array(pages, np.int32))
        target = PeerTarget(HostTarget(StreamPages(host)), rank, ranks, form)
        transfer = Transfer(
            TransferId(1), TransferDirection.PEER_TO_HOST, host_pages=np.arange(len(pages), dtype=np.int32), peer=peer
        )
        reader, acks = PeerReader(open_channel, silence_s=20), asyncio.Queue[TransferAck]()
        reader.begin(transfer, target, acks.put_nowait)
        async with asyncio.timeout(30):
            ack = await acks.get()
        await reader.close()
        return ack, host.pages


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1), (3, 2), (4, 1), (2, 4), (8, 2)])
async def test_ranks_of_groups_of_other_sizes_read_their_heads_of_each_page(
    tmp_path: Path, theirs: int, ours: int
) -> None:
    ranks, pages = Ranks(tmp_path, theirs), [5, 0, 7]
    for server in ranks.servers:
        await server.start()
    for rank in range(ours):
        ack, host = await ranks.read(rank, ours, pages)
        own = HeadDevice(rank, ours)
        assert ack.done_pages == len(pages)
        assert host == [own.read_pages([page], own.form.held) for page in pages]
    for server in ranks.servers:
        await server.stop(0)


async def test_a_page_of_which_one_rank_sends_nothing_is_a_miss(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2)
    for server in ranks.servers:
        await server.start()
    ranks.services[1].cuts = 0
    ack, host = await ranks.read(0, 1, [1, 2])
    assert ack.done_pages == 0
    assert host == [bytes(32), bytes(32)]
    for server in ranks.servers:
        await server.stop(0)


async def test_heads_that_a_rank_does_not_hold_are_refused() -> None:
    leases = PageLeases(partial(HeadDevice, 0, 2))
    leases.grant(LEASE, [1])
    for heads in (Span(1, 3), Span(2, 4), Span(1, 1)):
        with pytest.raises(InvalidRequestError):
            await anext(leases.read(LEASE, [1], heads))

"""Snapshots of recurrent states from workers of other groups, over real gRPC: under leases, whole or not at all."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from common.errors import InvalidRequestError, PermissionDeniedError
from common.rpc.channel import open_channel
from common.rpc.server import RpcServer
from common.transfers import PeerPages, Transfer, TransferAck, TransferDirection, TransferId
from protos.gen.pando.v1 import worker_pb2, worker_pb2_grpc
from services.worker.engine.host_tier.page_form import PageForm
from services.worker.engine.parallel.shards import Span, split_evenly
from services.worker.peers.leases import MESSAGE_BYTES, PageLeases
from services.worker.peers.reading import PeerReader
from services.worker.peers.targets import DeviceTarget, PeerTarget
from services.worker.service import WorkerService
from services.worker.stream_pages import StreamDevicePages
from tests.services.worker.peers.test_pages import LEASE, OTHER, UnsharedMemory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    import grpc

    from services.worker.engine.execution.interface import AfterPasses
    from services.worker.grammars.desk import GrammarDesk
    from services.worker.rank import Rank

KEY_HEADS = 6
# A snapshot of all heads takes two messages.
HEAD_BYTES = MESSAGE_BYTES // 4


class States:
    """Snapshots whose bytes depend on slot and head; those that are written are kept in `written`."""

    def __init__(self, heads: Span) -> None:
        self.form = PageForm(((1, HEAD_BYTES),), heads, KEY_HEADS)
        self.written: dict[int, bytes] = {}

    def read(self, snapshot: int, heads: Span) -> bytes:
        return b"".join(bytes([snapshot * 16 + head]) * HEAD_BYTES for head in range(heads.start, heads.stop))

    def write(self, snapshot: int, content: memoryview) -> None:
        self.written[snapshot] = bytes(content)


class Device(UnsharedMemory):
    """Pages of four bytes on a rank, and its snapshots."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.snapshots = self.states = States(split_evenly(KEY_HEADS, ranks)[rank])
        self.form = PageForm(((1, 4),), Span(0, 1), 1, snapshot=self.states.form)
        self.pages: dict[int, bytes] = {}

    def read_pages(self, pages: Sequence[int], heads: Span) -> bytes:
        return b"".join(b"%04d" % page for page in pages)

    def after_passes(self) -> AfterPasses | None:
        return None

    def write_pages(self, pages: Sequence[int], content: memoryview) -> None:
        self.pages |= {page: bytes(content[at * 4 : at * 4 + 4]) for at, page in enumerate(pages)}


class Lender(WorkerService):
    """Serves a rank's leases; `cuts` ends each call for a snapshot after so many messages."""

    cuts: int | None = None

    def __init__(self, leases: PageLeases) -> None:
        super().__init__(
            cast("Rank", SimpleNamespace(leases=leases)), cast("GrammarDesk", None), cast("PeerReader", None)
        )
        self.leases = leases

    async def ReadSnapshot(
        self, request: worker_pb2.ReadSnapshotRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[worker_pb2.ReadSnapshotResponse]:
        sent = 0
        async for message in super().ReadSnapshot(request, context):
            if sent == self.cuts:
                return
            yield message
            sent += 1


class Ranks:
    """The ranks of a group that lends the pages [0, 8) and the snapshots 3 and 5 under `LEASE`."""

    def __init__(self, folder: Path, count: int) -> None:
        self.addresses = tuple(f"unix:{folder}/worker-{rank}.sock" for rank in range(count))
        self.lenders, self.servers = [], []
        for rank, address in enumerate(self.addresses):
            leases = PageLeases(partial(Device, rank, count))
            leases.grant(LEASE, range(8), [3])
            leases.grant(LEASE, (), [5])
            leases.grant(OTHER, (), [4])
            self.lenders.append(Lender(leases))
            self.servers.append(RpcServer("pando.v1.Worker", address))
            self.servers[-1].add(worker_pb2_grpc.add_WorkerServicer_to_server, self.lenders[-1])

    async def start(self) -> None:
        for server in self.servers:
            await server.start()

    async def stop(self) -> None:
        for server in self.servers:
            await server.stop(0)

    async def read(
        self, device: Device, pages: list[int], snapshots: list[int], rank: int = 0, ranks: int = 1
    ) -> TransferAck:
        """Have a rank of another group read into pages 0, 1, … and snapshots 0, 1, … of its device."""
        peer = PeerPages(self.addresses, LEASE, np.array(pages, np.int32), np.array(snapshots, np.int32))
        transfer = Transfer(
            TransferId(1), TransferDirection.PEER_TO_DEVICE, np.arange(len(pages), dtype=np.int32), peer=peer,
            device_snapshots=np.arange(len(snapshots), dtype=np.int32),
        )  # fmt: skip
        target = PeerTarget(DeviceTarget(StreamDevicePages(device), None), rank, ranks, device.form)
        reader, acks = PeerReader(open_channel, silence_s=20), asyncio.Queue[TransferAck]()
        reader.begin(transfer, target, acks.put_nowait)
        async with asyncio.timeout(30):
            ack = await acks.get()
        await reader.close()
        return ack


@pytest.mark.parametrize(("theirs", "ours"), [(1, 1), (2, 2), (1, 2), (2, 1), (2, 3), (3, 2), (6, 1)])
async def test_each_rank_reads_its_heads_of_a_snapshot_after_the_pages(tmp_path: Path, theirs: int, ours: int) -> None:
    ranks = Ranks(tmp_path, theirs)
    await ranks.start()
    for rank in range(ours):
        device = Device(rank, ours)
        ack = await ranks.read(device, [7, 2], [5], rank, ours)
        assert (ack.done_pages, ack.done_snapshots) == (2, 1)
        assert device.pages == {0: b"0007", 1: b"0002"}
        assert device.states.written == {0: device.states.read(5, device.states.form.held)}
    await ranks.stop()


@pytest.fixture
async def ranks(tmp_path: Path) -> AsyncIterator[Ranks]:
    ranks = Ranks(tmp_path, 1)
    await ranks.start()
    yield ranks
    await ranks.stop()


async def test_snapshots_are_read_without_pages(ranks: Ranks) -> None:
    device = Device(0, 1)
    ack = await ranks.read(device, [], [3, 5])
    assert (ack.done_pages, ack.done_snapshots) == (0, 2)
    assert sorted(device.states.written) == [0, 1]


async def test_a_snapshot_of_another_lease_is_a_miss(ranks: Ranks) -> None:
    device = Device(0, 1)
    ack = await ranks.read(device, [1], [5, 4])
    assert (ack.done_pages, ack.done_snapshots) == (1, 1)
    assert sorted(device.states.written) == [0]


async def test_no_snapshot_is_read_if_a_page_is_missing(ranks: Ranks) -> None:
    device = Device(0, 1)
    ack = await ranks.read(device, [9], [5])
    assert (ack.done_pages, ack.done_snapshots) == (0, 0)
    assert not device.states.written


@pytest.mark.parametrize("cuts", [0, 1])
async def test_a_part_of_a_snapshot_is_not_written(ranks: Ranks, cuts: int) -> None:
    ranks.lenders[0].cuts = cuts
    device = Device(0, 1)
    ack = await ranks.read(device, [1], [5])
    assert (ack.done_pages, ack.done_snapshots) == (1, 0)
    assert not device.states.written


async def test_a_lease_that_ends_while_a_snapshot_is_sent_ends_the_read() -> None:
    device = Device(0, 1)
    leases = PageLeases(lambda: device)
    leases.grant(LEASE, (), [3])
    contents = leases.read_snapshot(LEASE, 3)
    assert len(await anext(contents)) == MESSAGE_BYTES
    await leases.revoke(LEASE)
    with pytest.raises(PermissionDeniedError):
        await anext(contents)
    with pytest.raises(PermissionDeniedError):
        await anext(leases.read_snapshot(LEASE, 3))


async def test_what_a_rank_does_not_have_is_refused() -> None:
    leases = PageLeases(partial(Device, 0, 2))
    leases.grant(LEASE, (), [3])
    with pytest.raises(InvalidRequestError, match="key heads"):
        await anext(leases.read_snapshot(LEASE, 3, Span(2, 4)))

    class WithoutStates(Device):
        snapshots = None  # a model without recurrent layers

        def __init__(self) -> None:
            self.form = PageForm(((1, 4),), Span(0, 1), 1)

    plain = PageLeases(WithoutStates)
    with pytest.raises(InvalidRequestError, match="no snapshots"):
        plain.grant(LEASE, [1], [3])
    assert len(plain) == 0

"""A worker in a process of its own that lends pages, of a GPU or over NIXL, for tests and measurements."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import numpy as np
import torch

from common.logs import configure_logging
from common.rpc.channel import open_channel
from common.rpc.server import RpcServer
from common.settings.shared import LogSettings
from common.transfers import PeerPages, Transfer, TransferAck, TransferDirection, TransferId
from protos.gen.pando.v1 import worker_pb2, worker_pb2_grpc
from services.worker.engine.backends import use_device
from services.worker.engine.host_tier.device_pages import DevicePages, find_sharing, page_form_of
from services.worker.engine.host_tier.nixl_agents import NixlAgents
from services.worker.engine.host_tier.nixl_copies import NixlCopies
from services.worker.engine.host_tier.peer_copies import PeerCopies, make_peer_copies
from services.worker.engine.host_tier.pool import allocate_host_pool
from services.worker.engine.host_tier.stream_transfers import StreamTransfers
from services.worker.engine.kernels.interface import AttentionShape, KvLayout
from services.worker.engine.model.kv_pool import KvPool, allocate_pool
from services.worker.engine.parallel.shards import Span
from services.worker.peers.leases import PageLeases
from services.worker.peers.reading import PeerReader
from services.worker.peers.targets import DeviceTarget, HostTarget, PeerTarget
from services.worker.service import WorkerService
from services.worker.stream_pages import StreamDevicePages, StreamPages

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.context import SpawnProcess
    from pathlib import Path

    import grpc

    from services.worker.grammars.desk import GrammarDesk
    from services.worker.peers.targets import TargetPages
    from services.worker.rank import Rank

LEASE = b"l" * 16
START_S = 120


@dataclass(frozen=True)
class PoolShape:
    """A KV pool in bfloat16; the default has the pages of Llama-3.1-8B, 2 MiB each."""

    pages: int
    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16

    def allocate(self, device: torch.device, nixl: NixlAgents | None = None) -> tuple[KvPool, DevicePages]:
        shape = AttentionShape(
            query_heads=4 * self.kv_heads, kv_heads=self.kv_heads, head_dim=self.head_dim, page_size=self.page_size
        )
        layout = KvLayout.TOKEN_MAJOR
        pool = allocate_pool(shape, self.layers, self.pages, layout, dtype=torch.bfloat16, device=device)
        form = page_form_of(pool, layout, shape, Span(0, self.kv_heads), self.kv_heads)
        assert form is not None
        return pool, DevicePages(pool, form, find_sharing(device), nixl)


def fill(pool: KvPool) -> None:
    """Give every word of a pool a value of its own layer, half and place."""
    for index, tensor in enumerate(tensor for layer in pool.layers for tensor in layer.stored):
        words = tensor.view(torch.int16).flatten()
        words.copy_((torch.arange(len(words), device=words.device) * 2654435761 + index * 40503) % 65521 - 32768)


class LenderService(WorkerService):
    """Serves the pages of a pool, all of which are under `LEASE`. A revoked lease's pages are overwritten at once."""

    def __init__(self, shape: PoolShape, device: torch.device, nixl: NixlAgents | None = None) -> None:
        self.device = device
        self.pool: KvPool | None
        self.pool, self.pages = shape.allocate(device, nixl)
        fill(self.pool)
        synchronize(device)
        self.leases = PageLeases(lambda: self.pages)
        self.leases.grant(LEASE, range(shape.pages))
        super().__init__(
            cast("Rank", SimpleNamespace(leases=self.leases)), cast("GrammarDesk", None), cast("PeerReader", None)
        )

    async def RevokePages(
        self, request: worker_pb2.RevokePagesRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.RevokePagesResponse:
        response = await super().RevokePages(request, context)
        if self.pool is not None:
            for layer in self.pool.layers:
                for tensor in layer.stored:
                    tensor.fill_(7.0)
        synchronize(self.device)
        return response

    async def Sleep(
        self, request: worker_pb2.WorkerSleepRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.WorkerSleepResponse:
        """Free the pool, as a rank does that sleeps; return by how much the device's free memory grew."""
        self.leases.revoke_all()
        if self.device.type == "cpu":
            await asyncio.to_thread(self.pages.close)
            self.pool = None
            return worker_pb2.WorkerSleepResponse()
        before, _ = torch.cuda.mem_get_info(self.device)
        await asyncio.to_thread(self.pages.close)
        self.pool = None
        torch.cuda.empty_cache()
        return worker_pb2.WorkerSleepResponse(freed_bytes=torch.cuda.mem_get_info(self.device)[0] - before)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


async def _serve(address: str, shape: PoolShape, device: torch.device, *, over_nixl: bool) -> None:
    # As services log by default: not each call.
    configure_logging("lender", LogSettings())
    use_device(device, threads=1)
    server = RpcServer("pando.v1.Worker", address)
    service = LenderService(shape, device, NixlAgents() if over_nixl else None)
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, service)
    await server.start()
    await asyncio.Event().wait()


def _main(address: str, shape: PoolShape, device: torch.device, over_nixl: bool) -> None:
    asyncio.run(_serve(address, shape, device, over_nixl=over_nixl))


def start_lender(
    address: str,
    shape: PoolShape,
    device: int | torch.device,
    environment: Mapping[str, str] | None = None,
    *,
    over_nixl: bool = False,
) -> SpawnProcess:
    """Start a worker at `address`, on a GPU or a device, with more variables in its `environment`."""
    on = torch.device("cuda", device) if isinstance(device, int) else device
    process = multiprocessing.get_context("spawn").Process(
        target=_main, args=(address, shape, on, over_nixl), daemon=True
    )
    with mock.patch.dict(os.environ, environment or {}):
        process.start()
    return process


class Reader:
    """A rank of another group in this process, with a host tier; on a GPU, or on a CPU with `nixl`."""

    def __init__(self, address: str, shape: PoolShape, device: torch.device, nixl: NixlAgents | None = None) -> None:
        use_device(device, threads=1)
        self.address = address
        self.pool, self.own_pages = shape.allocate(device)
        fill(self.pool)
        self.host = allocate_host_pool(self.pool, shape.pages)
        self.transfers = StreamTransfers(self.pool, self.host, device) if device.type == "cuda" else None
        sharing = find_sharing(device)
        self.copies: PeerCopies | NixlCopies | None = None
        if self.transfers is not None and sharing is not None:
            self.copies = make_peer_copies(self.transfers, sharing)
        if nixl is not None:
            self.copies = NixlCopies(self.pool, self.host, nixl, self.copies)
        self.pages = StreamPages(self.host)
        self.channel = open_channel(address)
        self.stub: Any = worker_pb2_grpc.WorkerStub(self.channel)  # Any: its methods are of the channel's kind
        self.reader = PeerReader(open_channel, silence_s=20)
        self._number = 0

    async def start(self) -> None:
        """Wait until the host tier is page-locked, and the lender serves."""
        if self.transfers is not None:
            while self.transfers.pinned.ready_pages < self.host.pages:
                assert self.transfers.pinned.error is None, self.transfers.pinned.error
                await asyncio.sleep(0.01)
        async with asyncio.timeout(START_S):
            await self.channel.channel_ready()

    async def read(self, pages: list[int], *, maps: bool = True, to_device: bool = False) -> TransferAck:
        """Read pages of the lender to host pages 0, 1, …, or those of the device; as bytes unless it `maps`."""
        self._number += 1
        peer = PeerPages((self.address,), LEASE, np.array(pages, np.int32))
        number, arriving = TransferId(self._number), np.arange(len(pages), dtype=np.int32)
        transfer = Transfer(number, TransferDirection.PEER_TO_HOST, host_pages=arriving, peer=peer)
        tier: TargetPages = HostTarget(self.pages)
        if to_device:
            transfer = Transfer(number, TransferDirection.PEER_TO_DEVICE, arriving, peer=peer)
            tier = DeviceTarget(StreamDevicePages(self.own_pages), self.own_pages.after_passes())
        acks: asyncio.Queue[TransferAck] = asyncio.Queue()
        target = PeerTarget(tier, 0, 1, self.own_pages.form, self.copies if maps else None)
        self.reader.begin(transfer, target, acks.put_nowait)
        async with asyncio.timeout(60):
            return await acks.get()

    def are_right(self, pages: list[int], count: int) -> bool:
        """Whether the first `count` host pages are bit by bit those of `pages`, which this process has, too."""
        heads = self.own_pages.form.held
        return all(
            self.own_pages.read_pages([page], heads) == self.host.read_page(index)
            for index, page in enumerate(pages[:count])
        )

    @property
    def has_mapped(self) -> bool:
        """Whether the lender's memory is mapped."""
        peer = self.reader._mappings._peers.get(self.address)
        return peer is not None and peer.mapping.done() and peer.mapping.result() is not None

    async def close(self) -> None:
        await self.reader.close()
        await self.channel.close()
        if isinstance(self.copies, NixlCopies):
            self.copies.close()
        if self.transfers is not None:
            self.transfers.close()


def address_in(folder: Path) -> str:
    return f"unix:{folder}/lender.sock"

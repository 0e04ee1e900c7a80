"""Copying pages from memory of a worker that is mapped, or read over NIXL, as it permits; see `leases.py`."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from protos.gen.pando.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    import grpc

    from common.transfers import Transfer
    from services.worker.engine.execution.interface import PeerPageCopies
    from services.worker.peers.mapping import Mapping
    from services.worker.peers.targets import TargetPages


@dataclass(slots=True)
class ReadProgress:
    """The first `done` pages of a transfer were read, from `began_at` on, by the monotonic clock in seconds."""

    began_at: float
    done: int = 0


async def read_mapped(  # noqa: PLR0913  (two sides, and what lies between)
    channel: grpc.aio.Channel,
    mapping: Mapping,
    transfer: Transfer,
    target: TargetPages,
    copies: PeerPageCopies,
    silence_s: float,
    progress: ReadProgress,
) -> None:
    """Copy a transfer's pages, several slices at a time. Those count as done that the worker has confirmed.

    When this returns or raises, no copy is under way.

    Raises:
        AioRpcError: the lease has ended, the worker has other memory by now, or the connection broke.
        TimeoutError: the worker has not answered for `silence_s` seconds.
        SharingError: the memory is not mapped any more.
        BrokenReadError: it could not be read over NIXL.
        StreamEndedError: the target's pages hold something else by now.
    """
    assert transfer.peer is not None, "checked by the engine"
    pages, arriving = transfer.peer.device_pages, transfer.arriving

    def copy(begin: int, end: int) -> None:
        target.copy(copies, mapping.pages, pages[begin:end], arriving[begin:end])

    call = worker_pb2_grpc.WorkerStub(channel).ReadMappedPages()
    # Over a network, larger slices would make the end of a lease wait.
    is_direct = target.is_device and not mapping.pages.memory.over_nixl
    slice_pages = copies.direct_slice_pages if is_direct else copies.slice_pages
    # The end of each slice that is being copied.
    running: deque[tuple[int, asyncio.Future[None]]] = deque()
    begun = 0
    report = worker_pb2.ReadMappedPagesRequest(
        lease=transfer.peer.lease,
        memory=mapping.pages.memory.name,
        device_pages=pages.tolist(),
        to_device=is_direct,
    )
    try:
        while True:
            async with asyncio.timeout(silence_s):
                await call.write(report)
                response = await call.read()
            if not isinstance(response, worker_pb2.ReadMappedPagesResponse):
                return
            progress.done = min(response.confirmed_pages, report.read_pages)
            while begun < min(response.permitted_pages, len(pages)):
                begin, begun = begun, min(begun + slice_pages, response.permitted_pages, len(pages))
                running.append((begun, mapping.run(partial(copy, begin, begun))))
            if not running:
                return
            read, copying = running.popleft()
            await asyncio.wait([copying])
            copying.result()
            # Slices that have been copied meanwhile are reported with it.
            while running and running[0][1].done():
                read, copying = running.popleft()
                copying.result()
            report = worker_pb2.ReadMappedPagesRequest(read_pages=read)
    finally:
        if running:
            await asyncio.wait([copying for _, copying in running])
        call.cancel()

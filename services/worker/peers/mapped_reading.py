"""Copying pages from memory of a worker that is mapped, or read over NIXL, as it permits; see `leases.py`.

Two messages of a transfer are waited for: the permission before the first copy, and the confirmation after the last
one. The other slices are reported while further ones are copied, and transfers beside each other wait for nothing of
one another. While a slice takes long, as over a slow network, the worker hears that its copy goes on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from protos.gen.pando.v1 import worker_pb2
from services.worker.engine.host_tier.shared_pages import BrokenReadError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import grpc

    from common.transfers import Transfer
    from services.worker.engine.execution.interface import PeerPageCopies
    from services.worker.peers.mapping import Mapping
    from services.worker.peers.read_call import ReadCall
    from services.worker.peers.targets import TargetPages


# How often a worker hears in its longest wait that a read goes on: one message may be late.
BEATS = 4


@dataclass(slots=True)
class ReadProgress:
    """The first `done` pages of a transfer were read, from `began_at` on, by the monotonic clock in seconds.

    `is_permitted`: the lender has permitted to read some from its mapped memory.
    """

    began_at: float
    done: int = 0
    is_permitted: bool = False


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
        PermissionDeniedError: the lease has ended.
        InvalidRequestError: the worker has other memory by now, or, once it had permitted the read, this took too long.
        AioRpcError: the connection broke.
        TimeoutError: the worker has not answered for `silence_s` seconds.
        SharingError: the memory is not mapped any more.
        BrokenReadError: it could not be read over NIXL.
        StreamEndedError: the target's pages hold something else by now.
    """
    assert transfer.peer is not None, "checked by the engine"
    pages, arriving = transfer.peer.device_pages, transfer.arriving

    def copy(begin: int, end: int) -> None:
        target.copy(copies, mapping.pages, pages[begin:end], arriving[begin:end])

    # Over a network, larger slices would make the end of a lease wait.
    is_direct = target.is_device and not mapping.pages.memory.over_nixl
    slice_pages = copies.direct_slice_pages if is_direct else copies.slice_pages
    # The end of each slice that is being copied.
    running: deque[tuple[int, asyncio.Future[None]]] = deque()
    started: list[asyncio.Future[None]] = []
    begun, is_finished = 0, False
    call = mapping.reads(channel)
    number = call.new_read()
    request = worker_pb2.ReadMappedPagesRequest(
        lease=transfer.peer.lease,
        memory=mapping.pages.memory.name,
        device_pages=pages.tolist(),
        to_device=is_direct,
        read=number,
    )
    try:
        while True:
            async with asyncio.timeout(silence_s):
                response = await call.ask(request)
            progress.is_permitted, progress.done = True, min(response.confirmed_pages, request.read_pages)
            while begun < min(response.permitted_pages, len(pages)):
                begin, begun = begun, min(begun + slice_pages, response.permitted_pages, len(pages))
                started.append(mapping.run(partial(copy, begin, begun)))
                running.append((begun, started[-1]))
            if not running:
                is_finished = True
                return
            read, copying = running.popleft()
            await _ended([copying], call, number)
            copying.result()
            # Slices that have been copied meanwhile are reported with it.
            while running and running[0][1].done():
                read, copying = running.popleft()
                copying.result()
            request = worker_pb2.ReadMappedPagesRequest(read_pages=read, read=number)
    except TimeoutError:
        # The connection may lose messages without breaking.
        call.close()
        raise
    finally:
        if running:
            await _ended([copying for _, copying in running], call, number)
        # What could not be read may still be read: the worker has to wait until the call has ended.
        if not is_finished and not any(isinstance(copying.exception(), BrokenReadError) for copying in started):
            call.give_up(number)


async def _ended(copies: Iterable[asyncio.Future[None]], call: ReadCall, read: int) -> None:
    """Wait for copies, and let the worker know repeatedly that the read goes on."""
    under_way = set(copies)
    while under_way:
        # Workers of earlier versions do not understand it.
        timeout_s = call.silence_s / BEATS if call.silence_s else None
        _, under_way = await asyncio.wait(under_way, timeout=timeout_s)
        if under_way:
            call.go_on(read)

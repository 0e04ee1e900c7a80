"""Reading pages from workers of other groups into this rank's host pages."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc

from common.logs import get_logger
from common.rpc.channel import renew
from common.rpc.status import CLOSED_DURING_CALL, is_own_cancellation
from common.transfers import TransferAck
from protos.gen.pando.v1 import worker_pb2, worker_pb2_grpc
from services.worker import metrics
from services.worker.stream_pages import StreamEndedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from common.transfers import PeerPages, Transfer
    from services.worker.stream_pages import StreamPages

# Time without the next part of the pages after which a peer counts as away: far more than a part takes on a slow link.
SILENCE_S = 2.0


class PeerReader:
    """Owns the channels to workers of other groups. Methods belong to the event loop.

    Every transfer is acknowledged, in bounded time.
    """

    def __init__(self, connect: Callable[[str], grpc.aio.Channel], silence_s: float = SILENCE_S) -> None:
        """Open channels with `connect`, by address."""
        self._connect = connect
        self._silence_s = silence_s
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = get_logger("peers")

    def begin(self, transfer: Transfer, pages: StreamPages, rank: int, deliver: Callable[[TransferAck], None]) -> None:
        """Start on a transfer; `deliver` gets its acknowledgement, unless the stream of plans has ended."""
        task = asyncio.create_task(self._run(transfer, pages, rank, deliver))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop all transfers and close the channels."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close()

    async def _run(
        self, transfer: Transfer, pages: StreamPages, rank: int, deliver: Callable[[TransferAck], None]
    ) -> None:
        assert transfer.peer is not None, "checked by the engine"
        started, done = time.monotonic(), 0
        try:
            async for content in self._read(transfer.peer, rank):
                view = memoryview(content)
                if len(view) % pages.page_bytes or done + len(view) // pages.page_bytes > len(transfer.host_pages):
                    self._log.error("peer.pages_misfit", peer=transfer.peer.workers[rank])
                    break
                for first in range(0, len(view), pages.page_bytes):
                    page = int(transfer.host_pages[done])
                    pages.write_page(page, view[first : first + pages.page_bytes])
                    done += 1
        except StreamEndedError:
            return
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else "no answer"
            self._log.warning("peer.failed", peer=transfer.peer.workers[rank], reason=reason, pages_read=done)
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
            self._log.warning("peer.failed", peer=transfer.peer.workers[rank], reason=CLOSED_DURING_CALL)
        except Exception:  # noqa: BLE001  (the scheduler waits for the acknowledgement)
            self._log.exception("peer.failed", peers=transfer.peer.workers, rank=rank, pages_read=done)
        seconds = time.monotonic() - started
        metrics.PEER_PAGES_TOTAL.labels("done").inc(done)
        metrics.PEER_PAGES_TOTAL.labels("failed").inc(len(transfer.host_pages) - done)
        deliver(TransferAck(transfer.transfer_id, done, round(seconds * 1e6)))

    async def _read(self, peer: PeerPages, rank: int) -> AsyncIterator[bytes]:
        request = worker_pb2.ReadPagesRequest(lease=peer.lease, device_pages=peer.device_pages.tolist())
        channel = self._channel(peer.workers[rank])
        call = worker_pb2_grpc.WorkerStub(channel).ReadPages(request)
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    message = await call.read()
                if not isinstance(message, worker_pb2.ReadPagesResponse):
                    return
                yield message.content
        except TimeoutError:
            # The connection may lose messages without breaking.
            renew(channel)
            raise
        finally:
            call.cancel()

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = self._connect(address)
        return self._channels[address]

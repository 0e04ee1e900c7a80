"""Memory of other workers that this rank has mapped, or reads over NIXL, to copy pages without sending them."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from common.errors import InvalidRequestError
from common.logs import get_logger
from common.rpc.status import is_own_cancellation
from protos.gen.pando.v1 import worker_pb2, worker_pb2_grpc
from services.worker.engine.host_tier.shared_pages import SharingError
from services.worker.peers.leases import this_host
from services.worker.peers.read_call import ReadCall
from services.worker.wire import shared_pages_from_wire

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from services.worker.engine.execution.interface import PeerPageCopies
    from services.worker.engine.host_tier.shared_pages import MappedPages

# Until a worker whose memory could not be mapped is asked again.
RETRY_S = 60.0
# Longest wait for copies under way before memory stays mapped for ever: they take milliseconds.
COPY_S = 10.0
# Threads for copies: more than copy at a time on a GPU, and their own, as those that wait would keep others waiting.
COPY_THREADS = 8
_REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)


@dataclass(slots=True)
class Mapping:
    """Mapped memory and the copies from it that are under way, in threads of `threads`."""

    pages: MappedPages
    threads: Executor
    copies: int = 0
    is_closed: bool = False
    is_idle: asyncio.Event = field(default_factory=asyncio.Event)
    _reads: ReadCall | None = None

    def reads(self, channel: grpc.aio.Channel) -> ReadCall:
        """Return the call for reads of this memory, over the channel of its worker."""
        if self._reads is None or self._reads.is_over:
            self._reads = ReadCall(channel)
        return self._reads

    def run(self, copy: Callable[[], None]) -> asyncio.Future[None]:
        """Run a copy in a thread; the memory stays mapped until it has ended. Cancelling the future does not stop it.

        Raises:
            SharingError: the memory is not mapped any more.
        """
        if self.is_closed:
            raise SharingError("the memory is not mapped any more")
        self.copies += 1
        self.is_idle.clear()
        copying = asyncio.get_running_loop().run_in_executor(self.threads, copy)
        copying.add_done_callback(self._end)
        return copying

    async def close(self) -> None:
        """Unmap the memory once no copy is under way."""
        self.is_closed = True
        try:
            if self.copies:
                async with asyncio.timeout(COPY_S):
                    await self.is_idle.wait()
            await asyncio.to_thread(self.pages.close)
        finally:
            if self._reads is not None:
                self._reads.close()

    def _end(self, copying: asyncio.Future[None]) -> None:
        if not copying.cancelled():
            copying.exception()  # read here, as its caller may have been cancelled
        self.copies -= 1
        if not self.copies:
            self.is_idle.set()


@dataclass(slots=True)
class _Peer:
    """A worker that was asked for its memory; `mapping` becomes None if it cannot be mapped."""

    mapping: asyncio.Future[Mapping | None]
    # Not before then it is asked again, once it has refused.
    refused_until: float = 0.0
    holding: asyncio.Task[None] | None = None


class PeerMappings:
    """Maps the memory of workers, by address, as long as they lend it; or opens it for reads over NIXL.

    Methods belong to the event loop.

    One call to each worker stays open while its memory is mapped. It ends when the worker does; before the worker frees
    the memory, as it sleeps or loads another model, it asks for an end.
    """

    def __init__(self, silence_s: float, retry_s: float = RETRY_S) -> None:
        """Wait `silence_s` seconds for an answer, and ask again `retry_s` seconds after a refusal."""
        self._silence_s = silence_s
        self._retry_s = retry_s
        self._peers: dict[str, _Peer] = {}
        # Workers whose refusal was logged.
        self._warned: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(COPY_THREADS, "peer-copies")
        self._log = get_logger("peers")

    async def find(
        self, worker: str, channel: grpc.aio.Channel, lease: bytes, copies: PeerPageCopies
    ) -> Mapping | None:
        """Return the memory of a worker, of whom there is a lease; None if it cannot be mapped."""
        peer = self._peers.get(worker)
        if peer is None or (peer.refused_until and peer.refused_until < time.monotonic()):
            peer = self._peers[worker] = _Peer(asyncio.get_running_loop().create_future())
            peer.holding = asyncio.create_task(self._run(worker, peer, channel, lease, copies))
            self._tasks.add(peer.holding)
            peer.holding.add_done_callback(self._tasks.discard)
        return await asyncio.shield(peer.mapping)

    def drop(self, worker: str, mapping: Mapping) -> None:
        """Unmap the memory of a worker, which has other memory by now."""
        peer = self._peers.get(worker)
        if peer is not None and peer.holding is not None and peer.mapping.done() and peer.mapping.result() is mapping:
            self._forget(worker, peer)
            peer.holding.cancel()

    def refuse(self, worker: str, mapping: Mapping, reason: str) -> None:
        """Unmap the memory of a worker, as it could not be read, and do not ask for it again soon."""
        peer = self._peers.get(worker)
        if peer is None or not peer.mapping.done() or peer.mapping.result() is not mapping:
            return
        self.drop(worker, mapping)
        refused = self._peers[worker] = _Peer(asyncio.get_running_loop().create_future())
        self._end(worker, refused, reason, refuses=True)

    async def close(self) -> None:
        """Unmap all memory."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown(wait=False)

    async def _run(
        self, worker: str, peer: _Peer, channel: grpc.aio.Channel, lease: bytes, copies: PeerPageCopies
    ) -> None:
        """Map the memory of a worker until the worker or `drop` ends that; a refusal is remembered for a while."""
        reason, refuses = "", False
        try:
            await self._hold(worker, peer, channel, lease, copies)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            if isinstance(error, grpc.aio.AioRpcError):
                reason, refuses = error.details() or error.code().name, error.code() in _REFUSALS
        except (SharingError, InvalidRequestError) as error:
            reason, refuses = str(error), True
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
        except Exception as error:  # noqa: BLE001  (transfers wait for the outcome)
            self._log.exception("peer.mapping_failed", peer=worker)
            reason, refuses = type(error).__name__, True
        finally:
            self._end(worker, peer, reason, refuses=refuses)

    def _end(self, worker: str, peer: _Peer, reason: str, *, refuses: bool) -> None:
        """Note that the memory of a worker is not mapped, and whether it is of no use to ask it again soon."""
        was_mapped = peer.mapping.done()
        if not was_mapped:
            peer.mapping.set_result(None)
        if not refuses or was_mapped:
            self._forget(worker, peer)
            return
        peer.refused_until = time.monotonic() + self._retry_s
        if worker not in self._warned:
            self._warned.add(worker)
            self._log.warning("peer.not_mapped", peer=worker, reason=reason)

    def _forget(self, worker: str, peer: _Peer) -> None:
        if self._peers.get(worker) is peer:
            del self._peers[worker]

    async def _hold(
        self, worker: str, peer: _Peer, channel: grpc.aio.Channel, lease: bytes, copies: PeerPageCopies
    ) -> None:
        request = worker_pb2.MapPagesRequest(lease=lease, host=this_host(), reads_over_nixl=copies.reads_over_nixl)
        call = worker_pb2_grpc.WorkerStub(channel).MapPages(request)
        try:
            async with asyncio.timeout(self._silence_s):
                response = await call.read()
            if not isinstance(response, worker_pb2.MapPagesResponse):
                raise SharingError("it lends no memory")
            memory = shared_pages_from_wire(response.memory)
            mapping = Mapping(await asyncio.to_thread(copies.map, memory), self._threads)
            peer.mapping.set_result(mapping)
            self._log.info("peer.mapped", peer=worker, pages=memory.pages, over_nixl=memory.over_nixl)
            try:
                # Until the worker asks for an end, or has ended.
                await call.read()
            finally:
                self._forget(worker, peer)
                await mapping.close()
                self._log.info("peer.unmapped", peer=worker)
        finally:
            call.cancel()

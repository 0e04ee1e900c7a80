"""Reading from other workers: pages and states of other groups into this rank's, and embeddings of images.

Where the worker of the same rank is on this host and both have GPUs, pages are copied from its memory, which this
process maps (`read_mapped`). Where both use NIXL, pages are read the same way on any host. Embeddings are copied from
the memory of an encoder that is on this host (`copy_sealed`). Otherwise both are sent over gRPC, as bytes.
Snapshots of recurrent states follow the pages, and are always sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

import grpc

from common.errors import InvalidRequestError, PandoError, UnavailableError
from common.logs import get_logger
from common.rpc.channel import renew
from common.rpc.status import CLOSED_DURING_CALL, is_own_cancellation
from common.transfers import TransferAck
from protos.gen.pando.v1 import worker_pb2, worker_pb2_grpc
from services.worker import metrics
from services.worker.engine.host_tier.page_form import sources_of
from services.worker.engine.host_tier.shared_pages import BrokenReadError, SharingError
from services.worker.peers.mapped_reading import ReadProgress, read_mapped
from services.worker.peers.mapping import RETRY_S, PeerMappings
from services.worker.peers.one_ahead import one_ahead
from services.worker.peers.sealed_memory import SealedPlace, copy_sealed, sharing_space
from services.worker.stream_pages import StreamEndedError
from services.worker.wire import embeddings_from_wire

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from common.transfers import PeerPages, Transfer
    from services.worker.engine.parallel.shards import Span
    from services.worker.peers.targets import PeerTarget

Q = TypeVar("Q")
R = TypeVar("R")
# Time without the next part of the pages after which a peer counts as away: far more than a part takes on a slow link.
SILENCE_S = 2.0


class _MisfitError(Exception):
    """A peer sends other than the requested pages."""


@dataclass(slots=True)
class _Incoming:
    """Some heads of the pages from one of the peer's ranks, `page_bytes` for each page."""

    call: AsyncGenerator[bytes, None]
    heads: Span
    page_bytes: int
    held: bytes = b""

    @property
    def pages(self) -> int:
        return len(self.held) // self.page_bytes

    async def fill(self) -> None:
        """Wait for a page unless there is one, or the call has ended."""
        if self.held:
            return
        self.held = await anext(self.call, b"")
        if len(self.held) % self.page_bytes:
            raise _MisfitError

    def take(self, pages: int) -> memoryview:
        """Return the next pages; the rest is kept."""
        taken = memoryview(self.held)[: pages * self.page_bytes]
        self.held = self.held[pages * self.page_bytes :]
        return taken


class PeerReader:
    """Owns the channels to other workers. Methods belong to the event loop.

    Every transfer is acknowledged, in bounded time.
    """

    def __init__(self, connect: Callable[[str], grpc.aio.Channel], silence_s: float = SILENCE_S) -> None:
        """Open channels with `connect`, by address."""
        self._connect = connect
        self._silence_s = silence_s
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._mappings = PeerMappings(silence_s)
        # Not before then a worker that encodes is asked for its memory again, once that could not be opened.
        self._sent_until: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # End of the latest transfer. Transfers share links, so the time before is that of others.
        self._free_at = 0.0
        self._log = get_logger("peers")

    def begin(self, transfer: Transfer, target: PeerTarget, deliver: Callable[[TransferAck], None]) -> None:
        """Start on a transfer; `deliver` gets its acknowledgement, unless the stream of plans has ended."""
        task = asyncio.create_task(self._run(transfer, target, deliver))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def read_embeddings(self, encoder: str, ticket: bytes, size: int) -> memoryview:
        """Return the `size` bytes of an image's embeddings from a worker that encodes, in bounded time.

        They are copied from the memory of that process, if this one may open it, and sent otherwise.

        Raises:
            UnavailableError: it does not answer, or has others.
        """
        try:
            if time.monotonic() < self._sent_until.get(encoder, 0.0):
                return await self._receive_embeddings(encoder, ticket, size)
            try:
                return await self._receive_embeddings(encoder, ticket, size, sharing_space())
            except SharingError as error:
                refusal = str(error)
            content = await self._receive_embeddings(encoder, ticket, size)
            self._note_sent(encoder, refusal)
            return content
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else "no answer"
            raise UnavailableError(f"embeddings could not be read: {reason}") from error
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
            raise UnavailableError(f"embeddings could not be read: {CLOSED_DURING_CALL}") from None

    async def close(self) -> None:
        """Stop all transfers and close the channels."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._mappings.close()
        for channel in self._channels.values():
            await channel.close()

    async def _receive_embeddings(self, encoder: str, ticket: bytes, size: int, space: str = "") -> memoryview:
        """Return embeddings, which a worker in `space` does not have to send."""
        channel, content = self._channel(encoder), bytearray()
        request = worker_pb2.ReadEmbeddingsRequest(ticket=ticket, space=space)
        call = worker_pb2_grpc.WorkerStub(channel).ReadEmbeddings(request)
        async with contextlib.aclosing(self._parts(call, channel)) as messages:
            async for message in messages:
                part = embeddings_from_wire(message)
                if isinstance(part, SealedPlace):
                    copied = await asyncio.to_thread(copy_sealed, part, size)
                    metrics.FETCHED_IMAGES_TOTAL.labels("copied").inc()
                    return copied
                content += part
                if len(content) > size:
                    break
        if len(content) != size:
            raise UnavailableError(f"embeddings of {len(content)} bytes where {size} were expected")
        metrics.FETCHED_IMAGES_TOTAL.labels("sent").inc()
        return memoryview(content)

    def _note_sent(self, encoder: str, reason: str) -> None:
        """Have embeddings sent for a while by a worker whose memory cannot be opened."""
        if encoder not in self._sent_until:
            self._log.warning("embeddings.not_copied", encoder=encoder, reason=reason)
        self._sent_until[encoder] = time.monotonic() + RETRY_S

    async def _run(self, transfer: Transfer, target: PeerTarget, deliver: Callable[[TransferAck], None]) -> None:
        assert transfer.peer is not None, "checked by the engine"
        progress, snapshots = ReadProgress(time.monotonic()), 0
        workers = transfer.peer.workers
        try:
            # Before the peer waits for this rank: passes may take longer than it does.
            await target.pages.until_free()
            progress.began_at = time.monotonic()
            if transfer.pages and not await self._copy_mapped(transfer, target, progress):
                await self._read_bytes(transfer, target, progress)
            if progress.done == transfer.pages:
                for slot, into in zip(transfer.peer.device_snapshots, transfer.device_snapshots, strict=True):
                    await self._read_snapshot(transfer.peer, int(slot), int(into), target)
                    snapshots += 1
        except StreamEndedError:
            return
        except _MisfitError:
            self._log.error("peer.pages_misfit", peers=workers, rank=target.rank)
        except (grpc.aio.AioRpcError, TimeoutError, SharingError, PandoError) as error:
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error) or "no answer"
            self._log.warning("peer.failed", peers=workers, rank=target.rank, reason=reason, pages_read=progress.done)
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
            self._log.warning("peer.failed", peers=workers, rank=target.rank, reason=CLOSED_DURING_CALL)
        except Exception:  # noqa: BLE001  (the scheduler waits for the acknowledgement)
            self._log.exception("peer.failed", peers=workers, rank=target.rank, pages_read=progress.done)
        now, done = time.monotonic(), progress.done
        seconds, self._free_at = now - max(progress.began_at, self._free_at), now
        metrics.PEER_PAGES_TOTAL.labels("done").inc(done)
        metrics.PEER_PAGES_TOTAL.labels("failed").inc(transfer.pages - done)
        deliver(TransferAck(transfer.transfer_id, done, round(seconds * 1e6), snapshots))

    async def _copy_mapped(self, transfer: Transfer, target: PeerTarget, progress: ReadProgress) -> bool:
        """Copy pages from the memory of the worker of the same rank; return false if that is not mapped."""
        peer, copies = transfer.peer, target.copies
        assert peer is not None, "checked by the engine"
        if copies is None or target.ranks != len(peer.workers) or not target.pages.can_copy(copies, transfer.arriving):
            return False
        worker = peer.workers[target.rank]
        channel = self._channel(worker)
        mapping = await self._mappings.find(worker, channel, peer.lease, copies)
        if mapping is None:
            return False
        # Mapping takes long, and is done once.
        progress.began_at = time.monotonic()
        try:
            await read_mapped(channel, mapping, transfer, target.pages, copies, self._silence_s, progress)
        except InvalidRequestError:
            if progress.done:
                raise
            if not progress.is_permitted:
                # It has loaded again since.
                self._mappings.drop(worker, mapping)
            return False
        except BrokenReadError as error:
            # Later transfers are sent as bytes.
            self._mappings.refuse(worker, mapping, str(error))
            raise
        except TimeoutError:
            # As in `_read`.
            renew(channel)
            raise
        finally:
            metrics.PEER_MAPPED_PAGES_TOTAL.inc(progress.done)
        return True

    async def _read_bytes(self, transfer: Transfer, target: PeerTarget, progress: ReadProgress) -> None:
        assert transfer.peer is not None, "checked by the engine"
        async with contextlib.aclosing(one_ahead(self._assemble(transfer.peer, target))) as parts:
            async for content in parts:
                end = progress.done + len(content) // target.pages.page_bytes
                if end > transfer.pages:
                    raise _MisfitError
                # Copies to a device are waited for.
                await asyncio.to_thread(target.pages.write, transfer.arriving[progress.done : end], content)
                progress.done = end

    async def _assemble(self, peer: PeerPages, target: PeerTarget) -> AsyncGenerator[memoryview, None]:
        """Yield whole pages of this rank, of which each of the peer's ranks may have some heads only."""
        form = target.form
        sources = sources_of(form, target.rank, target.ranks, len(peer.workers))
        async with contextlib.AsyncExitStack() as stack:
            incoming = []
            for worker, heads in sources:
                call = self._read(peer, peer.workers[worker], heads)
                stack.push_async_callback(call.aclose)
                incoming.append(_Incoming(call, heads, form.bytes_of(heads)))
            while True:
                for each in incoming:
                    await each.fill()
                count = min(each.pages for each in incoming)
                if not count:
                    return
                yield form.join([(each.heads, each.take(count)) for each in incoming])

    async def _read(self, peer: PeerPages, worker: str, heads: Span) -> AsyncGenerator[bytes, None]:
        request = worker_pb2.ReadPagesRequest(
            lease=peer.lease, device_pages=peer.device_pages.tolist(), first_head=heads.start, heads=len(heads)
        )
        channel = self._channel(worker)
        call = worker_pb2_grpc.WorkerStub(channel).ReadPages(request)
        async with contextlib.aclosing(self._parts(call, channel)) as parts:
            async for part in parts:
                yield part.content

    async def _read_snapshot(self, peer: PeerPages, slot: int, into: int, target: PeerTarget) -> None:
        """Read a snapshot of this rank, of which each of the peer's ranks may have some heads only."""
        form = target.form.snapshot
        assert form is not None, "the engine has checked that there are snapshots"
        parts = []
        for worker, heads in sources_of(form, target.rank, target.ranks, len(peer.workers)):
            content = bytearray()
            request = worker_pb2.ReadSnapshotRequest(
                lease=peer.lease, device_snapshot=slot, first_head=heads.start, heads=len(heads)
            )
            channel = self._channel(peer.workers[worker])
            call = worker_pb2_grpc.WorkerStub(channel).ReadSnapshot(request)
            async with contextlib.aclosing(self._parts(call, channel)) as messages:
                async for message in messages:
                    content += message.content
                    if len(content) > form.bytes_of(heads):
                        break
            if len(content) != form.bytes_of(heads):
                raise _MisfitError
            parts.append((heads, memoryview(content)))
        # Copies to a device are waited for.
        await asyncio.to_thread(target.pages.write_snapshot, into, form.join(parts))

    async def _parts(self, call: grpc.aio.UnaryStreamCall[Q, R], channel: grpc.aio.Channel) -> AsyncGenerator[R, None]:
        """Yield the messages of a call until its end."""
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    return
                yield cast("R", message)  # what is not the end is a message
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

"""Images that a worker encodes for ranks of other processes, and what these read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from common.errors import InvalidRequestError, PermissionDeniedError, UnavailableError
from common.rpc.channel import open_channel
from common.rpc.server import RpcServer
from common.types import RowImage
from protos.gen.pando.v1 import worker_pb2, worker_pb2_grpc
from services.worker.peers.encodings import MOST_AT_ONCE, EncodingQueue
from services.worker.peers.leases import MESSAGE_BYTES
from services.worker.peers.reading import PeerReader
from services.worker.wire import embeddings_to_wire
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    import grpc

TICKETS = [bytes([number]) * 16 for number in range(20)]


def image(number: int) -> RowImage:
    return RowImage(b"", 0, number, (1, 1))


class Encoder:
    """Encodes an image as its number; waits while `gate` is cleared, and fails for number 13."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.batches: list[list[int]] = []

    async def __call__(self, images: Sequence[RowImage]) -> list[bytes]:
        self.batches.append([each.length for each in images])
        await self.gate.wait()
        if any(each.length == 13 for each in images):
            raise UnavailableError("memory does not suffice")
        return [bytes([each.length]) for each in images]


async def hold(encodings: EncodingQueue, number: int, ends: asyncio.Event) -> bytes:
    async with encodings.hold(TICKETS[number], image(number)):
        content = b"".join(each for each in encodings.read(TICKETS[number]) if isinstance(each, bytes))
        await ends.wait()
        return content


async def test_images_that_wait_are_encoded_together_in_order_and_kept_until_their_calls_end() -> None:
    encoder, ends = Encoder(), asyncio.Event()
    encodings = EncodingQueue(encoder)
    encoder.gate.clear()
    calls = [asyncio.create_task(hold(encodings, number, ends)) for number in range(MOST_AT_ONCE + 3)]
    await until(lambda: len(encoder.batches) == 1)
    gone, late = calls.pop(3), asyncio.create_task(hold(encodings, 12, ends))
    await asyncio.sleep(0)
    gone.cancel()
    encoder.gate.set()
    await until(lambda: len(encodings) == MOST_AT_ONCE + 3)
    assert [number for batch in encoder.batches for number in batch] == [*range(MOST_AT_ONCE + 3), 12]
    assert all(len(batch) <= MOST_AT_ONCE for batch in encoder.batches)
    ends.set()
    assert await asyncio.gather(*calls, late) == [bytes([n]) for n in (0, 1, 2, *range(4, MOST_AT_ONCE + 3), 12)]
    assert not len(encodings)


async def test_tickets_are_names_that_nobody_guesses_and_are_used_once() -> None:
    encodings, ends = EncodingQueue(Encoder()), asyncio.Event()
    call = asyncio.create_task(hold(encodings, 1, ends))
    await until(lambda: len(encodings) == 1)
    with pytest.raises(PermissionDeniedError):
        encodings.read(TICKETS[2])
    for ticket in (TICKETS[1], b"short"):
        with pytest.raises(InvalidRequestError):
            async with encodings.hold(ticket, image(2)):
                pass
    ends.set()
    await call
    with pytest.raises(PermissionDeniedError):
        encodings.read(TICKETS[1])


async def test_a_batch_that_fails_ends_its_calls_and_no_others() -> None:
    encodings, ends = EncodingQueue(Encoder()), asyncio.Event()
    with pytest.raises(UnavailableError):
        await hold(encodings, 13, ends)
    ends.set()
    assert await hold(encodings, 5, ends) == b"\x05"


class Server(worker_pb2_grpc.WorkerServicer):
    """The part of an older worker that serves embeddings of one ticket; `hangs` after the first part."""

    hangs = False

    def __init__(self, content: bytes) -> None:
        async def encode(_: Sequence[RowImage]) -> list[bytes]:
            return [content]

        self.encodings = EncodingQueue(encode)

    async def ReadEmbeddings(
        self, request: worker_pb2.ReadEmbeddingsRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[worker_pb2.ReadEmbeddingsResponse]:
        for content in self.encodings.read(request.ticket):
            yield embeddings_to_wire(content)
            if self.hangs:
                await asyncio.Event().wait()


async def test_embeddings_are_read_whole_or_not_at_all(tmp_path: Path) -> None:
    content = bytes(range(256)) * (MESSAGE_BYTES // 256 + 1)
    service, address = Server(content), f"unix:{tmp_path}/worker.sock"  # type: ignore[abstract]  # the rest is not called
    server = RpcServer("pando.v1.Worker", address)
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, service)
    await server.start()
    reader = PeerReader(open_channel, silence_s=20)
    impatient = PeerReader(open_channel, silence_s=0.2)
    try:
        async with service.encodings.hold(TICKETS[1], image(1)):
            assert await reader.read_embeddings(address, TICKETS[1], len(content)) == content
            for size in (len(content) - 1, len(content) + 1, 1):
                with pytest.raises(UnavailableError, match="were expected"):
                    await reader.read_embeddings(address, TICKETS[1], size)
            with pytest.raises(UnavailableError, match="no embeddings with this ticket"):
                await reader.read_embeddings(address, TICKETS[2], len(content))
            service.hangs = True
            with pytest.raises(UnavailableError, match="no answer"):
                await impatient.read_embeddings(address, TICKETS[1], len(content))
        await server.stop(0)
        with pytest.raises(UnavailableError):
            await reader.read_embeddings(address, TICKETS[1], len(content))
    finally:
        await reader.close()
        await impatient.close()
        await server.stop(0)

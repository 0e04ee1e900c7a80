"""A process with embeddings that others read, as a worker that encodes has them."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from typing import TYPE_CHECKING

from common.rpc.server import RpcServer
from common.types import RowImage
from protos.gen.pando.v1 import worker_pb2, worker_pb2_grpc
from services.worker.peers.encodings import EncodingQueue
from services.worker.wire import embeddings_to_wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    import grpc

START_S = 120


class EncodingService(worker_pb2_grpc.WorkerServicer):
    """The part of a worker from which others read embeddings; `asked` are the requests."""

    def __init__(self, encodings: EncodingQueue) -> None:
        self.encodings = encodings
        self.asked: list[worker_pb2.ReadEmbeddingsRequest] = []

    async def ReadEmbeddings(
        self, request: worker_pb2.ReadEmbeddingsRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[worker_pb2.ReadEmbeddingsResponse]:
        self.asked.append(request)
        for part in self.encodings.read(request.ticket, request.space):
            yield embeddings_to_wire(part)


@contextlib.asynccontextmanager
async def holding(address: str, contents: Sequence[bytes]) -> AsyncIterator[EncodingService]:
    """Serve `contents` under tickets of their numbers."""

    async def encode(images: Sequence[RowImage]) -> list[bytes]:
        return [contents[image.length] for image in images]

    service = EncodingService(EncodingQueue(encode))  # type: ignore[abstract]  # the rest is not called
    server = RpcServer("pando.v1.Worker", address)
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, service)
    await server.start()
    try:
        async with contextlib.AsyncExitStack() as stack:
            for number in range(len(contents)):
                image = RowImage(b"", 0, number, (1, 1))
                await stack.enter_async_context(service.encodings.hold(ticket(number), image))
            yield service
    finally:
        await server.stop(0)


def ticket(number: int) -> bytes:
    return number.to_bytes(16, "big")


@contextlib.contextmanager
def encoding_process(address: str, contents: Sequence[bytes]) -> Iterator[SpawnProcess]:
    """Run a process that serves `contents`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, address, contents), daemon=True)
    process.start()
    try:
        assert ours.poll(START_S)
        ours.recv()
        yield process
    finally:
        process.kill()
        process.join(START_S)


def _serve(pipe: Connection, address: str, contents: Sequence[bytes]) -> None:
    async def serve() -> None:
        async with holding(address, contents):
            pipe.send(None)
            await asyncio.Event().wait()

    asyncio.run(serve())

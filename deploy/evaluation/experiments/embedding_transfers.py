"""Ways for an image's embeddings from the worker that encodes it to another worker on the same host.

Another process holds embeddings of the sizes asked, as bfloat16. This one requests them with the calls that workers
use, and has them on its device afterwards, in ways that take turns:

- gRPC, over TCP without TLS and over a Unix socket: the embeddings are in the answer, as bytes. Workers do this.
- shared memory: the answer has the name of a segment, which is mapped and copied from; `found` leaves out the call.
- device to device, on GPUs: the answer has a handle of the other process's memory, which is opened and copied from.

    python -m deploy.evaluation.experiments.embedding_transfers
    python -m deploy.evaluation.experiments.embedding_transfers --device cuda

With `cuda`, embeddings come to and from the host's memory in the first two ways: the copy to the host is part of
encoding and not measured, that to the device is.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import pickle
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch
import torch.multiprocessing as torch_multiprocessing

from common.rpc.channel import open_channel
from common.rpc.security import Security
from common.rpc.server import RpcServer
from common.types import RowImage
from deploy.evaluation.bench.partial_results import PartialResults
from protos.gen.pando.v1 import worker_pb2, worker_pb2_grpc
from services.worker.engine.uploads import upload
from services.worker.peers.encodings import EncodingQueue
from services.worker.peers.reading import PeerReader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from multiprocessing.connection import Connection

    import grpc

START_S = 120.0
TRUSTED = Security(plaintext=True)


@dataclass(frozen=True, slots=True)
class TransferWay:
    """A way for embeddings of one size; `ticket` is that of the call, which returns `answer_bytes`."""

    name: str
    ticket: bytes
    address: str
    answer_bytes: int


def main() -> None:
    """Measure, print and write results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[256, 1024, 4096], help="embeddings of an image")
    parser.add_argument("--width", type=int, default=3584, help="numbers of an embedding (%(default)s)")
    parser.add_argument("--repeats", type=int, default=30, help="of each way and size (%(default)s)")
    parser.add_argument("--device", default="cpu", help="of both processes: cpu or cuda (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    _log_failures_only()
    with tempfile.TemporaryDirectory(prefix="pando-transfers-") as folder:
        asyncio.run(measure(arguments, Path(folder)))


async def measure(arguments: argparse.Namespace, folder: Path) -> None:
    """Request embeddings of each size in each way, in turns."""
    context = torch_multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    holder = context.Process(
        target=hold, args=(theirs, arguments.counts, arguments.width, arguments.device, folder), daemon=True
    )
    holder.start()
    device = torch.device(arguments.device)
    label = torch.cuda.get_device_name() if device.type == "cuda" else None
    results = PartialResults("embedding-transfers", f"{arguments.width} values", arguments.json, label=label)
    reader = PeerReader(lambda address: open_channel(address, TRUSTED))
    try:
        if not await asyncio.to_thread(ours.poll, START_S):
            raise TimeoutError("the process with the embeddings did not start")
        ways: dict[int, list[TransferWay]] = ours.recv()
        for count, of_count in ways.items():
            taken: dict[str, list[float]] = {}
            for repeat in range(arguments.repeats + 1):
                for way in of_count:
                    for part, seconds in (await transfer(reader, way, (count, arguments.width), device)).items():
                        if repeat:  # the first one opens connections
                            taken.setdefault(part, []).append(seconds * 1e3)
            for part, milliseconds in taken.items():
                results.add(f"{part}, {count} embeddings", "ms", milliseconds)
    finally:
        await reader.close()
        with contextlib.suppress(OSError):
            ours.send(None)
        await asyncio.to_thread(holder.join, START_S)


async def transfer(
    reader: PeerReader, way: TransferWay, shape: tuple[int, int], device: torch.device
) -> dict[str, float]:
    """Return the seconds until embeddings of this shape are on the device, and those of parts of that."""
    started = time.perf_counter()
    content = await reader.read_embeddings(way.address, way.ticket, way.answer_bytes)
    answered = time.perf_counter()
    if way.name.startswith("gRPC"):
        # As `RowImages.keep` does.
        embeddings = upload(torch.frombuffer(content, dtype=torch.bfloat16).view(shape), device)
    elif way.name == "shared memory":
        segment = SharedMemory(content.decode())
        mapped = torch.frombuffer(segment.buf, dtype=torch.bfloat16, count=shape[0] * shape[1]).view(shape)
        embeddings = upload(mapped, device) if device.type == "cuda" else mapped.clone()
        del mapped
        segment.close()
    else:
        # Opens the memory of the other process; only programs of the same user and version can be trusted with this.
        embeddings = pickle.loads(content).clone()
    if device.type == "cuda":
        torch.cuda.synchronize()
    ended = time.perf_counter()
    assert bool(embeddings[0, 0] == 1)
    assert bool(embeddings[-1, -1] == shape[0] % 127), "these are the embeddings of this size"
    found = {way.name: ended - started}
    if not way.name.startswith("gRPC"):
        found[f"{way.name}, found"] = ended - answered
    return found


class HoldingService(worker_pb2_grpc.WorkerServicer):
    """The part of a worker from which others read embeddings."""

    def __init__(self, encodings: EncodingQueue) -> None:
        self._encodings = encodings

    async def ReadEmbeddings(  # noqa: N802
        self, request: worker_pb2.ReadEmbeddingsRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[worker_pb2.ReadEmbeddingsResponse]:
        """Send what a ticket has, as `WorkerService` does."""
        for content in self._encodings.read(request.ticket):
            yield worker_pb2.ReadEmbeddingsResponse(content=content)


def hold(pipe: Connection, counts: Sequence[int], width: int, device: str, folder: Path) -> None:
    """Hold embeddings of each size, send the ways to them, and end when told."""
    _log_failures_only()
    asyncio.run(_hold(pipe, counts, width, torch.device(device), folder))


async def _hold(pipe: Connection, counts: Sequence[int], width: int, device: torch.device, folder: Path) -> None:
    answers: list[bytes] = []

    async def encode(images: Sequence[RowImage]) -> list[bytes]:
        return [answers[image.length] for image in images]

    encodings = EncodingQueue(encode)
    ways: dict[int, list[TransferWay]] = {}
    on_device: list[torch.Tensor] = []
    async with contextlib.AsyncExitStack() as stack:
        tcp = f"127.0.0.1:{(await _served(stack, '127.0.0.1:0', encodings)).port}"
        unix = (await _served(stack, f"unix:{folder}/socket", encodings)).address
        for count in counts:
            embeddings = torch.zeros(count, width, dtype=torch.bfloat16)
            embeddings[0, 0], embeddings[-1, -1] = 1, count % 127
            content = embeddings.view(torch.uint8).numpy().tobytes()
            segment = stack.enter_context(_segment(content))
            offers = [("gRPC over TCP", tcp, content), ("gRPC over a Unix socket", unix, content)]
            offers.append(("shared memory", tcp, segment.name.encode()))
            if device.type == "cuda":
                on_device.append(embeddings.to(device))
                offers.append(("device to device", tcp, bytes(ForkingPickler.dumps(on_device[-1]))))
            ways[count] = []
            for name, address, answer in offers:
                answers.append(answer)
                ticket = len(answers).to_bytes(16, "big")
                await stack.enter_async_context(encodings.hold(ticket, RowImage(b"", 0, len(answers) - 1, (1, 1))))
                ways[count].append(TransferWay(name, ticket, address, len(answer)))
        pipe.send(ways)
        await asyncio.to_thread(pipe.recv)


def _log_failures_only() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("warning"))


async def _served(stack: contextlib.AsyncExitStack, address: str, encodings: EncodingQueue) -> RpcServer:
    server = RpcServer("pando.v1.Worker", address, TRUSTED)
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, HoldingService(encodings))  # type: ignore[abstract]  # the rest is not called
    await server.start()
    stack.push_async_callback(server.stop, 0)
    return server


@contextlib.contextmanager
def _segment(content: bytes) -> Iterator[SharedMemory]:
    segment = SharedMemory(create=True, size=len(content))
    assert segment.buf is not None, "it is open"
    segment.buf[: len(content)] = content
    try:
        yield segment
    finally:
        segment.close()
        segment.unlink()


if __name__ == "__main__":
    main()

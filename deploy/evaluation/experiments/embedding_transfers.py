"""Ways for an image's embeddings from the worker that encodes it to another worker on the same host.

Another process holds embeddings of the sizes asked, as bfloat16. This one requests them with the calls that workers
use, and has them on its device afterwards, in ways that take turns:

- shared memory: the answer, over a Unix socket, names the memory, which is copied from. Workers of one host do this.
- gRPC, over TCP without TLS and over a Unix socket: the embeddings are in the answer, as bytes. Other workers do this.
- device to device, on GPUs: the answer has a handle of the other process's memory, which is opened and copied from;
  `found` leaves out the call.

`kept` is the time before: that of the other process for copying what it has encoded to where it can be read.

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
from services.worker.peers.sealed_memory import SealedMemory
from services.worker.wire import embeddings_to_wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from multiprocessing.connection import Connection

    import grpc

START_S = 120.0
TRUSTED = Security(plaintext=True)


@dataclass(frozen=True, slots=True)
class TransferWay:
    """A way for embeddings of one size; `ticket` is that of the call, which results in `answer_bytes`."""

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
        target=hold,
        args=(theirs, arguments.counts, arguments.width, arguments.repeats, arguments.device, folder),
        daemon=True,
    )
    holder.start()
    device = torch.device(arguments.device)
    label = torch.cuda.get_device_name() if device.type == "cuda" else None
    results = PartialResults("embedding-transfers", f"{arguments.width} values", arguments.json, label=label)
    reader = PeerReader(lambda address: open_channel(address, TRUSTED))
    try:
        if not await asyncio.to_thread(ours.poll, START_S):
            raise TimeoutError("the process with the embeddings did not start")
        ways: dict[int, list[TransferWay]]
        kept: dict[int, dict[str, list[float]]]
        ways, kept = ours.recv()
        for count, of_count in ways.items():
            taken = kept[count]
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
    is_direct = way.name == "device to device"
    if is_direct:
        # Opens the memory of the other process; only programs of the same user and version can be trusted with this.
        embeddings = pickle.loads(content).clone()
    else:
        # As `RowImages.keep` does.
        embeddings = upload(torch.frombuffer(content, dtype=torch.bfloat16).view(shape), device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    ended = time.perf_counter()
    assert bool(embeddings[0, 0] == 1)
    assert bool(embeddings[-1, -1] == shape[0] % 127), "these are the embeddings of this size"
    found = {way.name: ended - started}
    if is_direct:
        found[f"{way.name}, found"] = ended - answered
    return found


class HoldingService(worker_pb2_grpc.WorkerServicer):
    """The part of a worker from which others read embeddings; with `sends`, as one of another host."""

    def __init__(self, encodings: EncodingQueue, *, sends: bool) -> None:
        self._encodings = encodings
        self._sends = sends

    async def ReadEmbeddings(  # noqa: N802
        self, request: worker_pb2.ReadEmbeddingsRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[worker_pb2.ReadEmbeddingsResponse]:
        """Send what a ticket has, as `WorkerService` does."""
        for part in self._encodings.read(request.ticket, "" if self._sends else request.space):
            yield embeddings_to_wire(part)


def hold(pipe: Connection, counts: Sequence[int], width: int, repeats: int, device: str, folder: Path) -> None:
    """Hold embeddings of each size, send the ways to them and the times of keeping them, and end when told."""
    _log_failures_only()
    asyncio.run(_hold(pipe, counts, width, repeats, torch.device(device), folder))


async def _hold(
    pipe: Connection, counts: Sequence[int], width: int, repeats: int, device: torch.device, folder: Path
) -> None:
    answers: list[bytes] = []

    async def encode(images: Sequence[RowImage]) -> list[bytes]:
        return [answers[image.length] for image in images]

    encodings = EncodingQueue(encode)
    ways: dict[int, list[TransferWay]] = {}
    kept: dict[int, dict[str, list[float]]] = {}
    on_device: list[torch.Tensor] = []
    async with contextlib.AsyncExitStack() as stack:
        tcp = f"127.0.0.1:{(await _served(stack, '127.0.0.1:0', encodings, sends=True)).port}"
        unix = (await _served(stack, f"unix:{folder}/socket", encodings, sends=True)).address
        shared = (await _served(stack, f"unix:{folder}/shared", encodings, sends=False)).address
        for count in counts:
            embeddings = torch.zeros(count, width, dtype=torch.bfloat16)
            embeddings[0, 0], embeddings[-1, -1] = 1, count % 127
            content = embeddings.view(torch.uint8).numpy().tobytes()
            kept[count] = _times_of_keeping(memoryview(content), repeats)
            offers = [("gRPC over TCP", tcp, content), ("gRPC over a Unix socket", unix, content)]
            offers.append(("shared memory", shared, content))
            if device.type == "cuda":
                on_device.append(embeddings.to(device))
                offers.append(("device to device", tcp, bytes(ForkingPickler.dumps(on_device[-1]))))
            ways[count] = []
            for name, address, answer in offers:
                answers.append(answer)
                ticket = len(answers).to_bytes(16, "big")
                await stack.enter_async_context(encodings.hold(ticket, RowImage(b"", 0, len(answers) - 1, (1, 1))))
                ways[count].append(TransferWay(name, ticket, address, len(answer)))
        pipe.send((ways, kept))
        await asyncio.to_thread(pipe.recv)


def _log_failures_only() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("warning"))


def _times_of_keeping(content: memoryview, repeats: int) -> dict[str, list[float]]:
    """Return milliseconds for copying embeddings to where they can be read, without and with shared memory."""
    taken: dict[str, list[float]] = {"gRPC, kept": [], "shared memory, kept": []}
    for _ in range(repeats):
        started = time.perf_counter()
        sent = bytes(content)
        between = time.perf_counter()
        memory = SealedMemory(content)
        ended = time.perf_counter()
        memory.close()
        del sent
        taken["gRPC, kept"].append((between - started) * 1e3)
        taken["shared memory, kept"].append((ended - between) * 1e3)
    return taken


async def _served(
    stack: contextlib.AsyncExitStack, address: str, encodings: EncodingQueue, *, sends: bool
) -> RpcServer:
    server = RpcServer("pando.v1.Worker", address, TRUSTED)
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, HoldingService(encodings, sends=sends))  # type: ignore[abstract]  # the rest is not called
    await server.start()
    stack.push_async_callback(server.stop, 0)
    return server


if __name__ == "__main__":
    main()

"""The connection to one worker rank, with values instead of protobuf messages as its interface."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import grpc

from common.errors import PandoError, UnavailableError
from common.logs import get_logger
from common.rpc.handshake import check_server
from common.rpc.options import CONNECT_TIMEOUT_MS
from common.rpc.status import answered
from common.rpc.stream import unreadable
from common.steps import SleepLevel
from common.wire.adapters import adapter_from_wire, adapter_to_wire
from common.wire.requests import grammar_to_wire
from protos.gen.pando.v1 import worker_pb2, worker_pb2_grpc
from services.scheduler.wire.steps import (
    capacity_from_wire,
    plan_to_wire,
    result_from_wire,
    spec_to_wire,
    write_image,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator

    from common.adapters import AdapterInfo
    from common.grammars import Grammar
    from common.steps import EngineCapacity, EngineSpec, SleepPart, StepPlan, StepResult
    from common.types import EncoderOutputId, RowImage

STATE_TIMEOUT_S = 5.0
# Of an attempt to find the rank; the next one uses another connection.
CONNECT_TIMEOUT_S = CONNECT_TIMEOUT_MS / 1000
CONFIGURE_TIMEOUT_S = 3600.0
# Reads the headers of all files with weights, which may be on a slow network.
CHECK_WEIGHTS_TIMEOUT_S = 600.0
# Covers the worker's own limit for a grammar, and grammars queued before this one.
PREPARE_TIMEOUT_S = 120.0
# Weights of hundreds of gigabytes move to host memory in less; reading them again takes as long as loading.
SLEEP_TIMEOUT_S = 600.0
# Covers the download of an adapter.
READ_TIMEOUT_S = 900.0


# Covers the images that wait at the encoder before this one.
ENCODE_TIMEOUT_S = 60.0
# Far longer than a rank waits for an encoder that is silent: it must have given up before the output is dropped.
FETCH_TIMEOUT_S = 60.0


class RankLostError(Exception):
    """A rank failed, disconnected or hangs; the whole group has to be configured again."""


class EngineFailedError(RankLostError):
    """A rank's engine failed or hangs; `out_of_memory`: device memory did not suffice for a step."""

    def __init__(self, message: str, *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


@dataclass(frozen=True, slots=True)
class Pulse:
    """The answer to a heartbeat: the seconds since the engine last made progress or idled, and its plans.

    `open_plans` are those that it has received and not finished; None: its version does not count them.
    """

    engine_age_s: float
    open_plans: int | None


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Weights by the reference that names their files, and by the name that responses show."""

    model: str
    load_format: str
    version: str


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """A rank's process, which another process does not have the name of, and the weights it was last configured with.

    `base_model` is empty unless the weights replaced those of the settings.
    """

    process: str
    base_model: str
    weights: LoadedWeights
    # None: it does not sleep.
    sleep_level: SleepLevel | None = None


class RankConnection:
    """Calls one rank over its channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = worker_pb2_grpc.WorkerStub(channel)
        self._encode_calls: set[grpc.aio.UnaryStreamCall[worker_pb2.EncodeRequest, worker_pb2.EncodeResponse]] = set()
        self._log = get_logger("rank")

    async def wait_until_up(self) -> RankIdentity:
        """Wait until the rank answers; return what it is and has.

        Raises:
            RankLostError: the answer cannot be read.
            grpc.aio.AioRpcError: there is none in time.
        """
        request = worker_pb2.GetWorkerStateRequest()
        state = await self._stub.GetState(request, timeout=CONNECT_TIMEOUT_S, wait_for_ready=True)
        with _reading():
            weights = LoadedWeights(state.model, state.load_format, state.weight_version)
            level = SleepLevel(state.sleep_level) if state.sleep_level else None
            return RankIdentity(state.process, state.base_model, weights, level)

    async def check_weights(self, weights: LoadedWeights) -> None:
        """Check that other weights fit.

        Raises:
            PandoError: they do not, or the rank is unreachable.
        """
        request = worker_pb2.CheckWeightsRequest(model=weights.model, load_format=weights.load_format)
        await answered(self._stub.CheckWeights(request, timeout=CHECK_WEIGHTS_TIMEOUT_S))

    async def prepare_weights(self, weights: LoadedWeights | None) -> bool:
        """Have other weights read beside the loaded ones, or forgotten; return whether they were read.

        Raises:
            PandoError: they cannot be read, or the rank is unreachable.
        """
        request = worker_pb2.PrepareWeightsRequest()
        if weights is not None:
            request.model, request.load_format = weights.model, weights.load_format
        return bool((await answered(self._stub.PrepareWeights(request, timeout=CONFIGURE_TIMEOUT_S))).is_prepared)

    async def sleep(self, level: SleepLevel, *, keeps_host_pages: bool) -> int:
        """Have the rank give back KV memory and weights; return the bytes that became free.

        Raises:
            PandoError: it failed, or is unreachable.
        """
        request = worker_pb2.WorkerSleepRequest(level=level, keeps_host_pages=keeps_host_pages)
        return int((await answered(self._stub.Sleep(request, timeout=SLEEP_TIMEOUT_S))).freed_bytes)

    async def wake_up(self, parts: Iterable[SleepPart]) -> bool:
        """Have the rank restore parts of what it has given back; return whether it is awake.

        Raises:
            PandoError: it failed, or is unreachable.
        """
        request = worker_pb2.WorkerWakeUpRequest(parts=parts)
        return bool((await answered(self._stub.WakeUp(request, timeout=CONFIGURE_TIMEOUT_S))).is_awake)

    async def pulse(self, timeout_s: float) -> Pulse | None:
        """Return the rank's answer to a heartbeat; None if there is none in time."""
        try:
            state = await answered(self._stub.GetState(worker_pb2.GetWorkerStateRequest(), timeout=timeout_s))
        except PandoError:
            return None
        open_plans = state.open_plans if state.HasField("open_plans") else None
        return Pulse(state.heartbeat_age_ms / 1000, open_plans)

    async def configure(self, spec: EngineSpec, *, resumes: bool) -> EngineCapacity:
        """Configure the rank and return its capacity; progress is logged. It `resumes` if requests are open.

        Raises:
            RankLostError: the call ended without a capacity.
        """
        stage = ""
        request = spec_to_wire(spec)
        request.resumes = resumes
        call = self._stub.Configure(request, timeout=CONFIGURE_TIMEOUT_S)
        check_server(dict(await call.initial_metadata()))
        async for message in call:
            with _reading():
                if message.HasField("capacity"):
                    return capacity_from_wire(message.capacity)
                if message.stage != stage:
                    stage, percent = message.stage, int(message.progress * 100)
                    self._log.info("worker.configuring", rank=spec.rank, stage=stage, percent=percent)
        raise RankLostError(f"rank {spec.rank} ended Configure without a capacity")

    async def grant_pages(self, lease: bytes, pages: Iterable[int], snapshots: Iterable[int] = ()) -> None:
        """Let workers of other groups read pages and snapshots under a lease.

        Raises:
            PandoError: the rank is unreachable.
        """
        request = worker_pb2.GrantPagesRequest(lease=lease, device_pages=pages, device_snapshots=snapshots)
        await answered(self._stub.GrantPages(request, timeout=STATE_TIMEOUT_S))

    async def revoke_pages(self, lease: bytes) -> None:
        """End a lease; once this has returned, none of its pages is read any more.

        Raises:
            PandoError: the rank is unreachable.
        """
        request = worker_pb2.RevokePagesRequest(lease=lease)
        await answered(self._stub.RevokePages(request, timeout=STATE_TIMEOUT_S))

    @contextlib.asynccontextmanager
    async def encoding(self, ticket: bytes, image: RowImage, identity: str) -> AsyncIterator[None]:
        """Have an image encoded by a worker that only encodes; within the context, its embeddings can be read.

        Its encoder must have this identity.

        Raises:
            PandoError: it cannot be encoded, or the worker is unreachable.
            TimeoutError: it takes too long.
        """
        # The digest is nothing that the worker needs to know.
        request = worker_pb2.EncodeRequest(ticket=ticket, encoder_identity=identity)
        write_image(replace(image, digest=b"", offset=0, output=None), request.image)
        call = self._stub.Encode(request)
        self._encode_calls.add(call)
        try:
            async with asyncio.timeout(ENCODE_TIMEOUT_S):
                answer = await answered(call.read())
            if answer is grpc.aio.EOF:
                raise UnavailableError("the encoder has ended the call")
            yield
        finally:
            self._encode_calls.discard(call)
            call.cancel()

    def end_encodings(self) -> None:
        """End all `encoding`; closing the channel does not end calls that wait for a message."""
        for call in self._encode_calls:
            call.cancel()

    async def fetch_embeddings(self, output: EncoderOutputId, encoder: str, ticket: bytes, embeddings: int) -> None:
        """Have the rank read embeddings from a worker that only encodes, and keep them as an output.

        Raises:
            PandoError: it did not, or is unreachable.
        """
        request = worker_pb2.FetchEmbeddingsRequest(
            output=output, encoder=encoder, ticket=ticket, embeddings=embeddings
        )
        await answered(self._stub.FetchEmbeddings(request, timeout=FETCH_TIMEOUT_S))

    async def prepare(self, grammar: Grammar) -> None:
        """Compile a grammar before rows need it.

        Raises:
            PandoError: the grammar is refused, or the rank is unreachable.
        """
        request = worker_pb2.PrepareGrammarRequest(grammar=grammar_to_wire(grammar))
        await answered(self._stub.PrepareGrammar(request, timeout=PREPARE_TIMEOUT_S))

    async def read_adapter(self, adapter: AdapterInfo) -> AdapterInfo:
        """Have an adapter read into host memory; return it with its digest, rank and bytes.

        Raises:
            PandoError: it is refused, or the rank is unreachable.
        """
        request = worker_pb2.ReadAdapterRequest(adapter=adapter_to_wire(adapter))
        answer = await answered(self._stub.ReadAdapter(request, timeout=READ_TIMEOUT_S))
        return adapter_from_wire(answer.adapter)

    async def drop_adapter(self, digest: str) -> None:
        """Have the memory of an adapter freed.

        Raises:
            PandoError: the rank is unreachable.
        """
        request = worker_pb2.DropAdapterRequest(digest=digest)
        await answered(self._stub.DropAdapter(request, timeout=STATE_TIMEOUT_S))

    async def set_adapters(self, adapters: Iterable[AdapterInfo]) -> None:
        """Replace the list of adapters that `adapters` returns.

        Raises:
            PandoError: the rank is unreachable.
        """
        request = worker_pb2.SetAdaptersRequest(adapters=map(adapter_to_wire, adapters))
        await answered(self._stub.SetAdapters(request, timeout=STATE_TIMEOUT_S))

    async def adapters(self) -> tuple[list[AdapterInfo], list[str]]:
        """Return the adapters that a scheduler has named last, and the digests of those in memory.

        Raises:
            PandoError: the rank is unreachable.
        """
        answer = await answered(self._stub.GetAdapters(worker_pb2.GetAdaptersRequest(), timeout=STATE_TIMEOUT_S))
        return [adapter_from_wire(each) for each in answer.adapters], [*answer.digests]

    def execute(self) -> PlanStream:
        """Open the stream of plans and results, which the caller must cancel."""
        return PlanStream(self._stub)


class PlanStream:
    """The stream of plans to a rank and of their results."""

    def __init__(self, stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
        # Plans whose last result has not arrived.
        self.in_flight = 0
        # When the last result arrived, or later, when the first plan in flight was sent.
        self.last_sign = time.monotonic()
        self._plans: asyncio.Queue[worker_pb2.StepPlan | None] = asyncio.Queue()
        self._call = stub.Execute(_drain(self._plans))

    async def wait_until_open(self) -> None:
        await self._call.wait_for_connection()

    async def results(self) -> AsyncIterator[StepResult]:
        """Yield results until the rank closes the stream.

        Raises:
            RankLostError: a result cannot be read.
            grpc.aio.AioRpcError: the stream broke.
        """
        async for message in self._call:
            with _reading():
                result = result_from_wire(message)
            self.last_sign = time.monotonic()
            self.in_flight -= result.last
            yield result

    def cancel(self) -> None:
        """End the stream."""
        self._call.cancel()
        # gRPC does not end its reader of plans if the call has already failed.
        self._plans.put_nowait(None)

    @staticmethod
    def send_to_all(plan: StepPlan, streams: Iterable[PlanStream]) -> None:
        """Queue a plan for all of `streams`; it is encoded once."""
        message = plan_to_wire(plan)
        for stream in streams:
            if not stream.in_flight:
                stream.last_sign = time.monotonic()
            stream.in_flight += 1
            stream._plans.put_nowait(message)


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Raise RankLostError for a message that cannot be read; gRPC passes on None for one that it cannot decode."""
    try:
        yield
    except Exception as error:
        raise RankLostError(unreadable(error)) from error


async def _drain(queue: asyncio.Queue[worker_pb2.StepPlan | None]) -> AsyncIterator[worker_pb2.StepPlan]:
    while (plan := await queue.get()) is not None:
        yield plan

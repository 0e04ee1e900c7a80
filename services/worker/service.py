"""The gRPC face of a rank: each method decodes, calls the executor, encodes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import uuid
from typing import TYPE_CHECKING

import grpc

from common.errors import (
    ConfigurationError,
    InvalidRequestError,
    PandoError,
    PermissionDeniedError,
    UnavailableError,
)
from common.types import EncoderOutputId
from common.wire.adapters import adapter_from_wire, adapter_to_wire
from common.wire.requests import grammar_from_wire
from common.wire.sleeping import sleep_level_from_wire, sleep_parts_from_wire
from protos.gen.pando.v1 import worker_pb2, worker_pb2_grpc
from services.worker import metrics
from services.worker.engine.execution.fake_model import LOAD_FORMAT as FAKE_FORMAT
from services.worker.engine.parallel.shards import Span
from services.worker.grammars.process import check_installed, is_installed
from services.worker.peers.leases import MappedReads
from services.worker.profiles import ProfileRefusedError
from services.worker.rank import NotReadyError, SupersededError
from services.worker.row_spans import RowSpans
from services.worker.wire import (
    capacity_to_wire,
    embeddings_to_wire,
    image_from_wire,
    plan_from_wire,
    result_to_wire,
    shared_pages_to_wire,
    spec_from_wire,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from common.steps import EngineCapacity, EngineSpec
    from services.worker.grammars.desk import GrammarDesk
    from services.worker.peers.reading import PeerReader
    from services.worker.rank import Rank
    from services.worker.session import ExecuteSession

    Context = grpc.aio.ServicerContext[object, object]


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Serves `pando.v1.Worker`; see the comments in the contract."""

    def __init__(self, rank: Rank, grammars: GrammarDesk, peers: PeerReader) -> None:
        """Serve `rank`, and `grammars` ahead of the rows that need them; `peers` reads from other workers."""
        self._rank = rank
        self._peers = peers
        self._grammars = grammars
        self._process = uuid.uuid4().hex
        # Kept, as a task that only its loop refers to may be collected.
        self._beginning: asyncio.Task[None] | None = None
        self._warming: asyncio.Task[None] | None = None

    async def Configure(  # noqa: N802  (the contract's name)
        self, request: worker_pb2.ConfigureRequest, context: Context
    ) -> AsyncIterator[worker_pb2.ConfigureResponse]:
        """Load a model; progress first, then what there is room for."""
        spec = spec_from_wire(request)
        updates: asyncio.Queue[worker_pb2.ConfigureResponse | None] = asyncio.Queue()

        def report(fraction: float, stage: str) -> None:
            updates.put_nowait(worker_pb2.ConfigureResponse(progress=fraction, stage=stage))

        if _may_follow_grammars(spec):
            self._beginning = asyncio.create_task(self._grammars.begin())
        configuring = asyncio.create_task(self._rank.configure(spec, report))
        configuring.add_done_callback(lambda _: updates.put_nowait(None))
        try:
            while (update := await updates.get()) is not None:
                yield update
        finally:
            configuring.cancel()
        try:
            capacity: EngineCapacity = await configuring
        except NotReadyError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except ConfigurationError as error:
            raise InvalidRequestError(str(error)) from error
        except PandoError:
            raise
        except Exception as error:
            # Other ranks may have been missing or memory short: the next attempt may work. It was logged already.
            raise UnavailableError(f"loading failed: {type(error).__name__}: {error}") from error
        if self._grammars.has_vocabulary and is_installed():
            self._warming = asyncio.create_task(
                self._grammars.warm(compiles=spec.samples, beside_requests=request.resumes)
            )
            if not request.resumes:
                yield worker_pb2.ConfigureResponse(progress=1.0, stage="preparing grammars")
                await asyncio.shield(self._warming)
        else:
            self._warming = asyncio.create_task(self._grammars.rest())
        yield worker_pb2.ConfigureResponse(progress=1.0, stage="ready", capacity=capacity_to_wire(capacity))

    async def Execute(  # noqa: N802
        self, request_iterator: AsyncIterator[worker_pb2.StepPlan], context: Context
    ) -> AsyncIterator[worker_pb2.StepResult]:
        """Run plans in their order and report every forward pass."""
        try:
            session = self._rank.open_session()
        except NotReadyError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        spec = self._rank.snapshot().spec
        spans = RowSpans(spec.rank if spec else 0)
        reading = asyncio.create_task(_read(request_iterator, session, spans))
        try:
            async for result in session.results():
                spans.note_result(result)
                yield result_to_wire(result)
        except SupersededError as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))
        finally:
            reading.cancel()
            spans.close()
            self._rank.close_session(session)

    async def PrepareGrammar(  # noqa: N802
        self, request: worker_pb2.PrepareGrammarRequest, context: Context
    ) -> worker_pb2.PrepareGrammarResponse:
        """Compile a grammar, unless that is done."""
        grammar = grammar_from_wire(request.grammar)
        check_installed(grammar)
        return worker_pb2.PrepareGrammarResponse(compile_us=await self._grammars.prepare(grammar))

    async def ReadAdapter(  # noqa: N802
        self, request: worker_pb2.ReadAdapterRequest, context: Context
    ) -> worker_pb2.ReadAdapterResponse:
        """Read an adapter into host memory."""
        made = await self._rank.adapters.read(adapter_from_wire(request.adapter))
        return worker_pb2.ReadAdapterResponse(adapter=adapter_to_wire(made))

    async def DropAdapter(  # noqa: N802
        self, request: worker_pb2.DropAdapterRequest, context: Context
    ) -> worker_pb2.DropAdapterResponse:
        """Free the memory of an adapter."""
        self._rank.adapters.drop(request.digest)
        return worker_pb2.DropAdapterResponse()

    async def SetAdapters(  # noqa: N802
        self, request: worker_pb2.SetAdaptersRequest, context: Context
    ) -> worker_pb2.SetAdaptersResponse:
        """Replace the list of adapters that have names."""
        self._rank.adapters.named = [adapter_from_wire(each) for each in request.adapters]
        return worker_pb2.SetAdaptersResponse()

    async def GetAdapters(  # noqa: N802
        self, request: worker_pb2.GetAdaptersRequest, context: Context
    ) -> worker_pb2.GetAdaptersResponse:
        """Return the adapters that have names, and the digests of those in memory."""
        return worker_pb2.GetAdaptersResponse(
            adapters=map(adapter_to_wire, self._rank.adapters.named), digests=self._rank.adapters.digests
        )

    async def CheckWeights(  # noqa: N802
        self, request: worker_pb2.CheckWeightsRequest, context: Context
    ) -> worker_pb2.CheckWeightsResponse:
        """Check that other weights can replace the loaded ones."""
        try:
            return worker_pb2.CheckWeightsResponse(
                bytes=await self._rank.check_weights(request.model, request.load_format)
            )
        except NotReadyError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except ConfigurationError as error:
            raise InvalidRequestError(str(error), param="model_path") from error

    async def PrepareWeights(  # noqa: N802
        self, request: worker_pb2.PrepareWeightsRequest, context: Context
    ) -> worker_pb2.PrepareWeightsResponse:
        """Read other weights beside the loaded ones."""
        if not request.model:
            self._rank.drop_prepared_weights()
            return worker_pb2.PrepareWeightsResponse()
        try:
            is_prepared = await self._rank.prepare_weights(request.model, request.load_format)
        except NotReadyError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except ConfigurationError as error:
            raise InvalidRequestError(str(error), param="model_path") from error
        except PandoError:
            raise
        except Exception as error:
            raise UnavailableError(f"reading failed: {type(error).__name__}: {error}") from error
        return worker_pb2.PrepareWeightsResponse(is_prepared=is_prepared)

    async def Sleep(  # noqa: N802
        self, request: worker_pb2.WorkerSleepRequest, context: Context
    ) -> worker_pb2.WorkerSleepResponse:
        """Give back KV memory and weights."""
        try:
            freed = await self._rank.sleep(
                sleep_level_from_wire(request.level), keeps_host_pages=request.keeps_host_pages
            )
        except NotReadyError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        metrics.SLEEP_FREED_BYTES.set(freed)
        return worker_pb2.WorkerSleepResponse(freed_bytes=freed)

    async def WakeUp(  # noqa: N802
        self, request: worker_pb2.WorkerWakeUpRequest, context: Context
    ) -> worker_pb2.WorkerWakeUpResponse:
        """Restore what `Sleep` has given back."""
        try:
            is_awake = await self._rank.wake_up(sleep_parts_from_wire(request.parts))
        except NotReadyError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return worker_pb2.WorkerWakeUpResponse(is_awake=is_awake)

    async def GrantPages(  # noqa: N802
        self, request: worker_pb2.GrantPagesRequest, context: Context
    ) -> worker_pb2.GrantPagesResponse:
        """Let workers of other groups read pages."""
        try:
            await self._rank.grant_pages(request.lease, request.device_pages, request.device_snapshots)
        except NotReadyError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return worker_pb2.GrantPagesResponse()

    async def RevokePages(  # noqa: N802
        self, request: worker_pb2.RevokePagesRequest, context: Context
    ) -> worker_pb2.RevokePagesResponse:
        """End a lease."""
        await self._rank.leases.revoke(request.lease)
        return worker_pb2.RevokePagesResponse()

    async def ReadPages(  # noqa: N802
        self, request: worker_pb2.ReadPagesRequest, context: Context
    ) -> AsyncIterator[worker_pb2.ReadPagesResponse]:
        """Send the content of pages."""
        heads = Span(request.first_head, request.first_head + request.heads) if request.heads else None
        contents = self._rank.leases.read(request.lease, list(request.device_pages), heads)
        async with contextlib.aclosing(contents):
            async for content in contents:
                yield worker_pb2.ReadPagesResponse(content=content)

    async def ReadSnapshot(  # noqa: N802
        self, request: worker_pb2.ReadSnapshotRequest, context: Context
    ) -> AsyncIterator[worker_pb2.ReadSnapshotResponse]:
        """Send the content of a snapshot of recurrent states."""
        heads = Span(request.first_head, request.first_head + request.heads) if request.heads else None
        contents = self._rank.leases.read_snapshot(request.lease, request.device_snapshot, heads)
        async with contextlib.aclosing(contents):
            async for content in contents:
                yield worker_pb2.ReadSnapshotResponse(content=content)

    async def MapPages(  # noqa: N802
        self, request: worker_pb2.MapPagesRequest, context: Context
    ) -> AsyncIterator[worker_pb2.MapPagesResponse]:
        """Lend the memory of the pages."""
        lent = self._rank.leases.lend(request.lease, request.host, reads_over_nixl=request.reads_over_nixl)
        async with contextlib.aclosing(lent) as loan:
            async for memory in loan:
                yield worker_pb2.MapPagesResponse(memory=None if memory is None else shared_pages_to_wire(memory))

    async def ReadMappedPages(  # noqa: N802
        self, request_iterator: AsyncIterator[worker_pb2.ReadMappedPagesRequest], context: Context
    ) -> AsyncIterator[worker_pb2.ReadMappedPagesResponse]:
        """Permit a worker to read pages that it has mapped, and confirm what it has read."""
        with contextlib.closing(MappedReads(self._rank.leases)) as reads:
            async for request in request_iterator:
                if request.ends:
                    reads.end(request.read)
                elif request.goes_on:
                    reads.go_on(request.read)
                else:
                    yield _permit(reads, request)

    async def Encode(  # noqa: N802
        self, request: worker_pb2.EncodeRequest, context: Context
    ) -> AsyncIterator[worker_pb2.EncodeResponse]:
        """Encode an image, and keep its embeddings until the caller ends the call."""
        self._rank.check_encoder(request.encoder_identity)
        async with self._rank.encodings.hold(request.ticket, image_from_wire(request.image)):
            # Another group may have had this worker configured meanwhile.
            self._rank.check_encoder(request.encoder_identity)
            yield worker_pb2.EncodeResponse()
            await asyncio.Event().wait()

    async def ReadEmbeddings(  # noqa: N802
        self, request: worker_pb2.ReadEmbeddingsRequest, context: Context
    ) -> AsyncIterator[worker_pb2.ReadEmbeddingsResponse]:
        """Send the embeddings of an image."""
        for part in self._rank.encodings.read(request.ticket, request.space):
            yield embeddings_to_wire(part)

    async def FetchEmbeddings(  # noqa: N802
        self, request: worker_pb2.FetchEmbeddingsRequest, context: Context
    ) -> worker_pb2.FetchEmbeddingsResponse:
        """Read embeddings from a worker that encodes, and keep them."""
        read = functools.partial(self._peers.read_embeddings, request.encoder, request.ticket)
        try:
            await self._rank.keep_embeddings(EncoderOutputId(request.output), request.embeddings, read)
        except NotReadyError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return worker_pb2.FetchEmbeddingsResponse()

    async def GetState(  # noqa: N802
        self, request: worker_pb2.GetWorkerStateRequest, context: Context
    ) -> worker_pb2.GetWorkerStateResponse:
        """Say what this rank holds now."""
        snapshot = self._rank.snapshot()
        spec, capacity = snapshot.spec, snapshot.capacity
        return worker_pb2.GetWorkerStateResponse(
            state=snapshot.state.value,
            rank=spec.rank if spec else 0,
            world_size=spec.world_size if spec else 0,
            model=spec.model if spec else "",
            capacity=capacity_to_wire(capacity) if capacity else None,
            open_rows=snapshot.open_rows,
            finished_steps=snapshot.finished_passes,
            heartbeat_age_ms=int(snapshot.heartbeat_age_s * 1000),
            process=self._process,
            open_plans=snapshot.open_plans,
            weight_version=spec.weight_version if spec else "",
            base_model=spec.base_model if spec else "",
            load_format=spec.load_format if spec else "",
            sleep_level=snapshot.sleep_level or 0,
        )

    async def StartProfile(  # noqa: N802
        self, request: worker_pb2.StartProfileRequest, context: Context
    ) -> worker_pb2.StartProfileResponse:
        """Begin to record what this rank computes."""
        if request.max_seconds < 0:
            raise InvalidRequestError("max_seconds must not be negative", param="max_seconds")
        spec = self._rank.snapshot().spec
        try:
            profile = await self._rank.profiles.start(f"rank{spec.rank if spec else 0}", request.max_seconds)
        except ProfileRefusedError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return worker_pb2.StartProfileResponse(path=str(profile.path), max_seconds=profile.max_seconds)

    async def StopProfile(  # noqa: N802
        self, request: worker_pb2.StopProfileRequest, context: Context
    ) -> worker_pb2.StopProfileResponse:
        """End the recording and write it."""
        try:
            profile = await self._rank.profiles.stop()
        except ProfileRefusedError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return worker_pb2.StopProfileResponse(path=str(profile.path), passes=profile.passes, bytes=profile.bytes)


def _may_follow_grammars(spec: EngineSpec) -> bool:
    """Whether this rank compiles grammars if its model, which is not loaded yet, turns out to generate text."""
    return spec.samples and not spec.only_encodes and spec.load_format != FAKE_FORMAT and is_installed()


async def _read(plans: AsyncIterator[worker_pb2.StepPlan], session: ExecuteSession, spans: RowSpans) -> None:
    """Feed the session from the stream until the peer has sent its last plan."""
    try:
        async for message in plans:
            plan = plan_from_wire(message)
            spans.note_plan(plan)
            await session.submit(plan)
    except Exception as error:  # noqa: BLE001  (raised again by the task that writes)
        session.end(error)
    else:
        session.finish_input()


def _permit(reads: MappedReads, request: worker_pb2.ReadMappedPagesRequest) -> worker_pb2.ReadMappedPagesResponse:
    """Begin a read or note its report; a refusal is an answer, as other reads of the call go on."""
    number = request.read
    try:
        if request.lease:
            step = reads.begin(number, request.lease, request.memory, request.device_pages, to_device=request.to_device)
        else:
            step = reads.report(number, request.read_pages)
    except PermissionDeniedError as error:
        refusal, reason = worker_pb2.READ_REFUSAL_LEASE, str(error)
    except InvalidRequestError as error:
        refusal, reason = worker_pb2.READ_REFUSAL_REQUEST, str(error)
    else:
        return worker_pb2.ReadMappedPagesResponse(
            permitted_pages=step.permitted,
            confirmed_pages=step.confirmed,
            read=number,
            silence_ms=reads.silence_ms,
        )
    return worker_pb2.ReadMappedPagesResponse(read=number, refusal=refusal, reason=reason, silence_ms=reads.silence_ms)

"""A worker rank on a real gRPC server, with the simulated worker behind it."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import grpc

from protos.gen.pando.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from services.worker.wire import plan_from_wire, result_to_wire
from tests.fakes.simulated_worker import VOCABULARY, SimulatedWorker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from common.steps import StepPlan
    from common.transfers import PeerPages, TransferAck, TransferId
    from tests.fakes.simulated_worker import Content

    Context = grpc.aio.ServicerContext[Any, Any]


def _open_gate() -> asyncio.Event:
    """Return an event that nothing waits for until it is cleared."""
    gate = asyncio.Event()
    gate.set()
    return gate


@dataclass
class FakeEncodings:
    """The worker's side of separate encoders: it reads embeddings from them, or is one of them."""

    # Of the model's encoder; empty: it sees no images.
    identity: str = ""
    # The embeddings of each image that it was asked to encode, which waits while `gate` is cleared.
    encoded: list[int] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=_open_gate)
    refusal: str | None = None
    # Digests of the images that ranks may read.
    tickets: dict[bytes, bytes] = field(default_factory=dict)
    # What it finds, as a rank, at an encoder's address under a ticket; None: nothing.
    read: Callable[[str, bytes], bytes | None] = lambda _encoder, _ticket: None


@dataclass
class AdapterFiles:
    """The adapters that a worker finds, by source; each holds its source's name."""

    # What a source holds instead.
    contents: dict[str, str] = field(default_factory=dict)
    # Sources that are read only once an event is set.
    slow: dict[str, asyncio.Event] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    # While it is cleared, what was read is kept, but not reported.
    answers: asyncio.Event = field(default_factory=_open_gate)


class FakeWorkerService(worker_pb2_grpc.WorkerServicer):
    """Configures at once and runs plans on a SimulatedWorker; tests set the attributes to make it misbehave."""

    hangs = False
    # Of the latest stream of plans.
    simulated: SimulatedWorker | None = None
    adapter_read_s = 0.0
    adapter_refusal: str | None = None
    slow_reads = waiting_drops = 0
    refuses_lists = False
    # Of recurrent states, on device and host; 0: the model has no recurrent layers.
    snapshots = 0
    host_snapshots = 0

    def __init__(self, pages: int = 64, eos_token_id: int = 7) -> None:
        self.pages, self.eos_token_id = pages, eos_token_id
        self.configured: list[worker_pb2.ConfigureRequest] = []
        self.plans: list[StepPlan] = []
        self.refusal: str | None = None
        # Pages of a pool for layers that see so many tokens, if that is asked for.
        self.window: tuple[int, int] | None = None
        self.fail_at_step: int | None = None
        # A plan with more tokens of prompts than this fails for want of memory.
        self.most_tokens: int | None = None
        # The same, told in the words of a rank whose neighbour has left.
        self.fails_with_others = False
        self.failures_to_load = self.failures_to_configure = 0
        # A row that is opened with this token ends the stream: with an error, with the process, or with nothing else.
        self.fatal_token: int | None = None
        self.fatal_effect = "error"
        self.process = "first"
        # Grammars are compiled once this is set.
        self.compiles = _open_gate()
        self.compiling = 0
        self.grammar_refusal: str | None = None
        # Calls of GetState wait while it is cleared; `heartbeat_age_s` is what they report of the engine.
        self.answers = _open_gate()
        self.heartbeat_age_s = 0.0
        # None: as a worker of an earlier version. A lost plan is neither run nor counted, until Configure is called.
        self.open_plans: int | None = None
        self.loses_plans = False
        # Pages that other groups may read, by lease; they are read from the simulated worker. So are snapshots.
        self.leases, self.lent_snapshots = dict[bytes, set[int]](), dict[bytes, set[int]]()
        self.read_peer: Callable[[PeerPages], list[Content]] = lambda _peer: []
        self.read_peer_states: Callable[[PeerPages], list[list[int]]] = lambda _peer: []
        self.adapters: dict[str, common_pb2.AdapterInfo] = {}
        self.adapter_reads = self.most_adapter_reads = self._adapters_in_read = 0
        self.kept_adapters, self.dropped_adapters = set[str](), list[str]()
        self.adapter_files = AdapterFiles()
        # Why weights are refused when they are checked, and when they are loaded, by model.
        self.misfits: dict[str, str] = {}
        self.unloadable: dict[str, str] = {}
        # Calls of PrepareWeights, which wait while `prepares` is cleared, and why they fail, by model.
        self.prepared: list[str] = []
        self.unreadable: dict[str, str] = {}
        self.has_room = True
        self.step_s = 0.0
        # Calls of Sleep and WakeUp with what they ask for, and why they fail. Both wait while their event is cleared.
        self.slept: list[tuple[int, bool]] = []
        self.woken: list[tuple[str, ...]] = []
        self.sleep_level = 0
        self.sleep_refusal: str | None = None
        self.wake_refusal: str | None = None
        # Memory of adapters is freed while `drops` is set.
        self.sleeps, self.wakes, self.prepares, self.drops = (_open_gate() for _ in range(4))
        self.images = FakeEncodings()
        # Passes that a transfer takes; those that are done together are acknowledged last first.
        self.transfer_passes = 1

    async def GetState(
        self, request: worker_pb2.GetWorkerStateRequest, context: Context
    ) -> worker_pb2.GetWorkerStateResponse:
        await self.answers.wait()
        last = self.configured[-1] if self.configured else worker_pb2.ConfigureRequest()
        return worker_pb2.GetWorkerStateResponse(
            state="READY",
            process=self.process,
            heartbeat_age_ms=round(self.heartbeat_age_s * 1000),
            open_plans=self.open_plans,
            model=last.model,
            load_format=last.load_format,
            weight_version=last.weight_version,
            base_model=last.base_model,
            sleep_level=self.sleep_level,
        )

    async def CheckWeights(
        self, request: worker_pb2.CheckWeightsRequest, context: Context
    ) -> worker_pb2.CheckWeightsResponse:
        if request.model in self.misfits:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.misfits[request.model])
        return worker_pb2.CheckWeightsResponse()

    async def PrepareWeights(
        self, request: worker_pb2.PrepareWeightsRequest, context: Context
    ) -> worker_pb2.PrepareWeightsResponse:
        self.prepared.append(request.model)
        await self.prepares.wait()
        if request.model in self.unreadable:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.unreadable[request.model])
        return worker_pb2.PrepareWeightsResponse(is_prepared=bool(request.model) and self.has_room)

    async def Sleep(self, request: worker_pb2.WorkerSleepRequest, context: Context) -> worker_pb2.WorkerSleepResponse:
        self.slept.append((request.level, request.keeps_host_pages))
        await self.sleeps.wait()
        if self.sleep_refusal is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self.sleep_refusal)
        self.sleep_level = request.level
        return worker_pb2.WorkerSleepResponse(freed_bytes=1000)

    async def WakeUp(
        self, request: worker_pb2.WorkerWakeUpRequest, context: Context
    ) -> worker_pb2.WorkerWakeUpResponse:
        self.woken.append(tuple(request.parts))
        await self.wakes.wait()
        if self.wake_refusal is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self.wake_refusal)
        is_awake = "kv_cache" in request.parts
        if is_awake:
            self.sleep_level = 0
        return worker_pb2.WorkerWakeUpResponse(is_awake=is_awake)

    async def PrepareGrammar(
        self, request: worker_pb2.PrepareGrammarRequest, context: Context
    ) -> worker_pb2.PrepareGrammarResponse:
        self.compiling += 1
        try:
            await self.compiles.wait()
        finally:
            self.compiling -= 1
        if self.grammar_refusal is not None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.grammar_refusal)
        return worker_pb2.PrepareGrammarResponse()

    async def ReadAdapter(
        self, request: worker_pb2.ReadAdapterRequest, context: Context
    ) -> worker_pb2.ReadAdapterResponse:
        if self.adapter_refusal is not None or request.adapter.source in self.adapter_files.refused:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.adapter_refusal or "there are no such files")
        made = request.adapter
        content = self.adapter_files.contents.get(made.source, made.source)
        made.digest = made.digest or hashlib.sha256(content.encode()).hexdigest()
        made.rank, made.bytes = 8, 100
        self._adapters_in_read += 1
        self.most_adapter_reads = max(self.most_adapter_reads, self._adapters_in_read)
        await asyncio.sleep(self.adapter_read_s)
        self._adapters_in_read -= 1
        if made.source in self.adapter_files.slow:
            self.slow_reads += 1
            await self.adapter_files.slow[made.source].wait()
        if made.digest not in self.kept_adapters:
            self.adapter_reads += 1
        self.kept_adapters.add(made.digest)
        await self.adapter_files.answers.wait()
        return worker_pb2.ReadAdapterResponse(adapter=made)

    async def DropAdapter(
        self, request: worker_pb2.DropAdapterRequest, context: Context
    ) -> worker_pb2.DropAdapterResponse:
        self.waiting_drops += 1
        await self.drops.wait()
        self.kept_adapters.discard(request.digest)
        self.dropped_adapters.append(request.digest)
        return worker_pb2.DropAdapterResponse()

    async def SetAdapters(
        self, request: worker_pb2.SetAdaptersRequest, context: Context
    ) -> worker_pb2.SetAdaptersResponse:
        if self.refuses_lists:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the network is gone")
        self.adapters = {each.name: each for each in request.adapters}
        return worker_pb2.SetAdaptersResponse()

    async def GrantPages(
        self, request: worker_pb2.GrantPagesRequest, context: Context
    ) -> worker_pb2.GrantPagesResponse:
        self.leases.setdefault(request.lease, set()).update(request.device_pages)
        self.lent_snapshots.setdefault(request.lease, set()).update(request.device_snapshots)
        return worker_pb2.GrantPagesResponse()

    async def RevokePages(
        self, request: worker_pb2.RevokePagesRequest, context: Context
    ) -> worker_pb2.RevokePagesResponse:
        self.leases.pop(request.lease, None)
        self.lent_snapshots.pop(request.lease, None)
        return worker_pb2.RevokePagesResponse()

    def lend(self, peer: PeerPages) -> list[Content]:
        """Return the content of pages under a lease, as `ReadPages` does."""
        pages = peer.device_pages.tolist()
        if self.simulated is None or not self.leases.get(peer.lease, set()).issuperset(pages):
            return []
        return [self.simulated._device_page(page) for page in pages]

    def lend_states(self, peer: PeerPages) -> list[list[int]]:
        """Return the content of snapshots under a lease, as `ReadSnapshot` does."""
        slots = peer.device_snapshots.tolist()
        if self.simulated is None or not self.lent_snapshots.get(peer.lease, set()).issuperset(slots):
            return []
        assert self.simulated.snapshots is not None
        assert not self.simulated._moving_snapshots(True, is_written=True) & set(slots), "lends what is being written"
        return [self.simulated.snapshots[slot].copy() for slot in slots]

    def ReadPages(
        self, request: worker_pb2.ReadPagesRequest, context: Context
    ) -> AsyncIterator[worker_pb2.ReadPagesResponse]:
        raise NotImplementedError("simulated workers call `lend`")

    def ReadSnapshot(
        self, request: worker_pb2.ReadSnapshotRequest, context: Context
    ) -> AsyncIterator[worker_pb2.ReadSnapshotResponse]:
        raise NotImplementedError("simulated workers call `lend_states`")

    def MapPages(
        self, request: worker_pb2.MapPagesRequest, context: Context
    ) -> AsyncIterator[worker_pb2.MapPagesResponse]:
        raise NotImplementedError("simulated workers call `lend`")

    def ReadMappedPages(
        self, request_iterator: AsyncIterator[worker_pb2.ReadMappedPagesRequest], context: Context
    ) -> AsyncIterator[worker_pb2.ReadMappedPagesResponse]:
        raise NotImplementedError("simulated workers call `lend`")

    async def Encode(
        self, request: worker_pb2.EncodeRequest, context: Context
    ) -> AsyncIterator[worker_pb2.EncodeResponse]:
        if request.encoder_identity != self.images.identity:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "another encoder")
        self.images.encoded.append(request.image.length)
        await self.images.gate.wait()
        if self.images.refusal is not None:
            await context.abort(grpc.StatusCode.INTERNAL, self.images.refusal)
        self.images.tickets[request.ticket] = hashlib.sha256(request.image.pixels).digest()
        try:
            yield worker_pb2.EncodeResponse()
            await asyncio.Event().wait()
        finally:
            del self.images.tickets[request.ticket]

    def ReadEmbeddings(
        self, request: worker_pb2.ReadEmbeddingsRequest, context: Context
    ) -> AsyncIterator[worker_pb2.ReadEmbeddingsResponse]:
        raise NotImplementedError("simulated workers call `FakeEncodings.read`")

    async def FetchEmbeddings(
        self, request: worker_pb2.FetchEmbeddingsRequest, context: Context
    ) -> worker_pb2.FetchEmbeddingsResponse:
        digest = self.images.read(request.encoder, request.ticket)
        if digest is None or self.simulated is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "embeddings could not be read")
        self.simulated.images.kept[request.output] = digest
        return worker_pb2.FetchEmbeddingsResponse()

    async def GetAdapters(
        self, request: worker_pb2.GetAdaptersRequest, context: Context
    ) -> worker_pb2.GetAdaptersResponse:
        return worker_pb2.GetAdaptersResponse(adapters=self.adapters.values(), digests=sorted(self.kept_adapters))

    async def StartProfile(
        self, request: worker_pb2.StartProfileRequest, context: Context
    ) -> worker_pb2.StartProfileResponse:
        return worker_pb2.StartProfileResponse()

    async def StopProfile(
        self, request: worker_pb2.StopProfileRequest, context: Context
    ) -> worker_pb2.StopProfileResponse:
        return worker_pb2.StopProfileResponse()

    async def Configure(
        self, request: worker_pb2.ConfigureRequest, context: Context
    ) -> AsyncIterator[worker_pb2.ConfigureResponse]:
        if self.failures_to_configure:
            self.failures_to_configure -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        self.configured.append(request)
        self.loses_plans, self.open_plans = False, None
        self.sleep_level = 0
        if self.refusal is not None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.refusal)
        if request.model in self.unloadable:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.unloadable[request.model])
        yield worker_pb2.ConfigureResponse(progress=0.5, stage="loading")
        if self.failures_to_load:
            self.failures_to_load -= 1
            await context.abort(grpc.StatusCode.INTERNAL, "a shard cannot be read")
        capacity = worker_pb2.WorkerCapacity(
            host_pages=request.host_pages,
            kv_bytes_per_token=1,
            device_pages=self.pages,
            page_size_tokens=request.page_size_tokens,
            max_context_tokens=128,
            vocabulary_size=VOCABULARY,
            eos_token_ids=[self.eos_token_id],
            device="fake",
            fingerprint=request.model,
            sees_images=bool(self.images.identity) and request.vision,
            embedding_bytes=4 if self.images.identity else 0,
            encoder_identity=self.images.identity,
        )
        if self.snapshots:
            # A snapshot takes as much memory as two pages.
            capacity.recurrent_states.CopyFrom(
                worker_pb2.RecurrentStates(
                    snapshots=self.snapshots,
                    row_bytes=2 * request.page_size_tokens,
                    host_snapshots=self.host_snapshots if request.host_pages else 0,
                )
            )
        if self.window is not None and request.window_ratio:
            pages, tokens = self.window
            pool = worker_pb2.WindowPool(pages=pages, window_tokens=tokens, layers=5, kv_bytes_per_token=5)
            capacity.window_pool.CopyFrom(pool)
        yield worker_pb2.ConfigureResponse(progress=1.0, capacity=capacity)

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.StepPlan], context: Context
    ) -> AsyncIterator[worker_pb2.StepResult]:
        configured = self.configured[-1]
        pages, tokens = (self.window if configured.window_ratio else None) or (0, 0)
        worker = SimulatedWorker(
            self.pages, configured.page_size_tokens, configured.host_pages, window=tokens, window_pool=pages,
            read_peer=lambda peer: self.read_peer(peer), read_peer_states=lambda peer: self.read_peer_states(peer),
            snapshots=[[] for _ in range(self.snapshots)] if self.snapshots else None,
            host_snapshot_slots=self.host_snapshots,
        )  # fmt: skip
        self.simulated = worker
        self.leases.clear()
        self.lent_snapshots.clear()
        ages: dict[TransferId, int] = {}
        async for message in request_iterator:
            if self.hangs:
                await asyncio.Event().wait()
            if self.loses_plans:
                continue
            plan = plan_from_wire(message)
            self.plans.append(plan)
            if self.fail_at_step is not None and plan.step_id >= self.fail_at_step:
                self.fail_at_step = None
                yield worker_pb2.StepResult(step_id=plan.step_id, last=True, error="out of luck")
                return
            if any(self.fatal_token in opened.token_ids for opened in plan.opens):
                if self.fatal_effect == "error":
                    yield worker_pb2.StepResult(step_id=plan.step_id, last=True, error="out of luck")
                elif self.fatal_effect == "death":
                    self.process = f"after step {plan.step_id}"
                return
            if self.most_tokens is not None and sum(chunk.length for chunk in plan.prefills) > self.most_tokens:
                reason = "connection closed by peer" if self.fails_with_others else "memory does not suffice"
                yield worker_pb2.StepResult(
                    step_id=plan.step_id, last=True, error=reason, out_of_memory=not self.fails_with_others
                )
                return
            for result in worker.run(plan):
                await asyncio.sleep(self.step_s)
                yield result_to_wire(replace(result, acks=self._acknowledge(worker, ages)))

    def _acknowledge(self, worker: SimulatedWorker, ages: dict[TransferId, int]) -> tuple[TransferAck, ...]:
        """Let a pass go by for the open transfers, and return those that are done."""
        for transfer_id in worker.open:
            ages[transfer_id] = ages.get(transfer_id, 0) + 1
        done = [transfer_id for transfer_id in worker.open if ages[transfer_id] >= self.transfer_passes]
        return tuple(worker.complete(transfer_id) for transfer_id in reversed(done))

"""The gRPC face of the scheduler."""

from __future__ import annotations

import asyncio
import hmac
from typing import TYPE_CHECKING, Any, TypeAlias

from common.errors import PandoError, UnavailableError
from common.types import Admission, RequestId
from common.wire import admission_to_wire, principal_from_wire, principal_to_wire, schedule_request_from_wire
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.scheduler.convert import event_to_wire, node_to_wire, sequence_to_wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc

    from common.settings import SchedulerSettings
    from services.scheduler.cache.interface import CacheEvent
    from services.scheduler.core.core import SchedulerCore
    from services.scheduler.core.sequence import Sequence
    from services.scheduler.loop import SchedulerLoop

# Requests and responses differ by method.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

# Events that may wait for a slow watcher before it is cut off.
MAX_QUEUED_EVENTS = 65_536
AUTHORIZATION_KEY = "authorization"


class SchedulerService(scheduler_pb2_grpc.SchedulerServicer):
    """Decode, call the loop, encode."""

    def __init__(self, loop: SchedulerLoop, settings: SchedulerSettings) -> None:
        """Serve `loop`."""
        self._loop = loop
        self._settings = settings

    async def Submit(  # noqa: N802  (names of rpcs are the contract's)
        self, request_iterator: AsyncIterator[scheduler_pb2.SchedulerSubmitRequest], context: Context
    ) -> AsyncIterator[scheduler_pb2.SchedulerSubmitResponse]:
        """Take in batches of requests and aborts; answer each batch's admissions in one message."""
        async for message in request_iterator:
            admissions = [self._submit(schedule) for schedule in message.schedules]
            for abort in message.aborts:
                self._loop.abort(RequestId(abort.request_id))
            if admissions:
                encoded = [admission_to_wire(admission) for admission in admissions]
                yield scheduler_pb2.SchedulerSubmitResponse(admissions=encoded)

    def _submit(self, message: scheduler_pb2.ScheduleRequest) -> Admission:
        try:
            request = schedule_request_from_wire(message)
        except PandoError as error:
            return Admission(RequestId(message.request_id), len(message.token_ids), error.to_failure())
        return self._loop.submit(request)

    async def GetState(  # noqa: N802
        self, request: scheduler_pb2.GetStateRequest, context: Context
    ) -> scheduler_pb2.GetStateResponse:
        """Tell queues, rows, pages and the state of the worker group."""
        state = scheduler_pb2.GetStateResponse(
            worker_group=self._loop.group_state.value,
            max_rows=self._settings.max_rows,
            page_size_tokens=self._settings.page_size,
            policy=self._settings.policy,
            cache=self._settings.cache,
        )
        core = self._loop.core
        if core is not None:
            _describe_core(core, state)
            if request.include_requests:
                is_admin = self._is_admin(context)
                state.requests.extend(self._describe(core, sequence, is_admin) for sequence in core.open_sequences)
        return state

    def _describe(self, core: SchedulerCore, sequence: Sequence, is_admin: bool) -> scheduler_pb2.RequestState:
        row, rows = sequence.row, core.rows
        running = row is not None
        message = sequence_to_wire(
            sequence,
            computed_tokens=int(rows.computed[row]) if running else 0,
            generated_tokens=int(rows.length[row] if running else len(sequence.token_ids)) - sequence.prompt_tokens,
            pages=int(rows.page_count[row]) if running else 0,
            age_s=self._loop.now - sequence.arrived_at,
        )
        if is_admin:
            message.principal.CopyFrom(principal_to_wire(sequence.request.principal))
        return message

    async def DumpTree(  # noqa: N802
        self, request: scheduler_pb2.DumpTreeRequest, context: Context
    ) -> AsyncIterator[scheduler_pb2.DumpTreeResponse]:
        """Stream the cache's nodes as they are now, parents before children."""
        is_admin = self._is_admin(context)
        principal = principal_from_wire(request.principal) if request.HasField("principal") else None
        nodes = list(self._core().memory.cache.dump(principal))  # the tree may change between two writes
        for node in nodes[: request.max_nodes or None]:
            encoded = node_to_wire(node, is_admin=is_admin, with_ids=request.include_token_ids)
            yield scheduler_pb2.DumpTreeResponse(node=encoded)

    async def FlushCache(  # noqa: N802
        self, request: scheduler_pb2.FlushCacheRequest, context: Context
    ) -> scheduler_pb2.FlushCacheResponse:
        """Drop every cache entry that no running request needs."""
        return scheduler_pb2.FlushCacheResponse(freed_pages=self._core().memory.cache.flush())

    async def Pause(  # noqa: N802
        self, request: scheduler_pb2.PauseRequest, context: Context
    ) -> scheduler_pb2.PauseResponse:
        """Stop admitting rows."""
        self._core().pause(paused=True)
        return scheduler_pb2.PauseResponse()

    async def Resume(  # noqa: N802
        self, request: scheduler_pb2.ResumeRequest, context: Context
    ) -> scheduler_pb2.ResumeResponse:
        """Go on admitting rows."""
        self._core().pause(paused=False)
        self._loop.wake()
        return scheduler_pb2.ResumeResponse()

    async def WatchCacheEvents(  # noqa: N802
        self, request: scheduler_pb2.WatchCacheEventsRequest, context: Context
    ) -> AsyncIterator[scheduler_pb2.WatchCacheEventsResponse]:
        """Stream a snapshot, then every change; a watcher that cannot keep up is cut off."""
        is_admin = self._is_admin(context)
        principal = principal_from_wire(request.principal) if request.HasField("principal") else None
        cache = self._core().memory.cache
        backlog = EventBacklog()
        unsubscribe = cache.events.subscribe(backlog.add)
        try:
            sequence, nodes = cache.events.sequence, list(cache.dump(principal))
            for node in nodes:
                encoded = node_to_wire(node, is_admin=is_admin, with_ids=False)
                kind = scheduler_pb2.CACHE_EVENT_KIND_INSERTED
                yield scheduler_pb2.WatchCacheEventsResponse(sequence=sequence, kind=kind, node=encoded)
            end = scheduler_pb2.CACHE_EVENT_KIND_SNAPSHOT_END
            yield scheduler_pb2.WatchCacheEventsResponse(sequence=sequence, kind=end)
            while True:
                event = await backlog.next()
                if principal is None or event.node is None or event.node.owner in (None, principal):
                    yield event_to_wire(event, is_admin=is_admin)
        finally:
            unsubscribe()

    def _core(self) -> SchedulerCore:
        if self._loop.core is None:
            raise UnavailableError("the scheduler waits for its workers", retry_after_ms=1000)
        return self._loop.core

    def _is_admin(self, context: Context) -> bool:
        """Whether the caller shows the admin token; without a configured token nobody is admin."""
        token = self._settings.admin_token
        if token is None:
            return False
        shown = dict(context.invocation_metadata() or ()).get(AUTHORIZATION_KEY, "")
        return hmac.compare_digest(str(shown).encode(), f"Bearer {token.get_secret_value()}".encode())


class EventBacklog:
    """Events that wait for one watcher; bounded, as a watcher may stop reading and keep its stream open."""

    def __init__(self) -> None:
        """Start empty."""
        self._events: asyncio.Queue[CacheEvent] = asyncio.Queue(MAX_QUEUED_EVENTS)
        self._has_overflown = False

    def add(self, event: CacheEvent) -> None:
        """Keep an event, or note that it is lost."""
        try:
            self._events.put_nowait(event)
        except asyncio.QueueFull:
            self._has_overflown = True

    async def next(self) -> CacheEvent:
        """Wait for the oldest event.

        Raises:
            UnavailableError: events were lost, so that the watcher's picture of the tree would be wrong.
        """
        if self._has_overflown:
            raise UnavailableError("the watcher does not keep up with the cache's events")
        return await self._events.get()


def _describe_core(core: SchedulerCore, state: scheduler_pb2.GetStateResponse) -> None:
    """Fill in what only a scheduler with workers has."""
    accounts = core.memory.account(core.rows)
    state.waiting_requests = len(core.queue)
    state.running_rows = core.rows.running
    state.paused = core.is_paused
    state.planned_steps = core.planned_steps
    state.finished_steps = core.finished_steps
    state.retractions = core.memory.retractions
    state.leaked_pages = core.memory.leaked_pages
    state.tiers.add(
        tier="device",
        capacity_pages=accounts.capacity,
        free_pages=accounts.free,
        soft_free_pages=accounts.soft_free,
        evictable_pages=accounts.evictable,
        protected_pages=accounts.protected,
    )

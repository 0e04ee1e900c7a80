"""gRPC servicer of the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import grpc
import numpy as np

from common.errors import InvalidRequestError, UnavailableError
from common.host import available_memory
from common.recent_images import RecentImages, bytes_to_keep
from common.rpc.stream import MessageNumbers, accept_stream
from common.types import GroupRole
from common.wire.adapters import adapter_to_wire
from common.wire.answers import divided
from common.wire.identity import subject_from_wire, view_from_wire, view_to_wire
from common.wire.requests import role_from_wire, role_to_wire, schedule_request_from_wire, wish_to_wire
from common.wire.sleeping import sleep_level_from_wire, sleep_parts_from_wire
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.scheduler import metrics
from services.scheduler.event_backlog import EventBacklog
from services.scheduler.submissions import Submissions
from services.scheduler.wire.requests import admissions_to_wire, batch_from_wire
from services.scheduler.wire.state import (
    Disclosure,
    cache_to_wire,
    event_to_wire,
    node_to_wire,
    owner_to_wire,
    rank_to_wire,
    sequence_to_wire,
    session_to_wire,
    sleep_mode_from_wire,
    storage_to_wire,
    tier_to_wire,
    traffic_to_wire,
    update_mode_from_wire,
)
from services.scheduler.wire.timelines import timeline_to_wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping

    from common.settings import SchedulerSettings
    from common.types import LoadReport, Pixels, TokenIds, View
    from services.scheduler.audit_desk import CallerActs
    from services.scheduler.cache.interface import PrefixCache
    from services.scheduler.cache.types import CacheEvent
    from services.scheduler.core.core import SchedulerCore
    from services.scheduler.core.sequence import Sequence
    from services.scheduler.credentials import Credentials
    from services.scheduler.disaggregation.prefill_server import PrefillServer
    from services.scheduler.loop import SchedulerLoop
    from services.scheduler.sleep_desk import SleepDesk
    from services.scheduler.submissions import Batch
    from services.scheduler.weights_desk import WeightsDesk

# Requests and responses differ by method.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Filtered: TypeAlias = "scheduler_pb2.DumpTreeRequest | scheduler_pb2.WatchCacheEventsRequest"

# Maximum delay before a watcher learns that its cache was replaced.
WATCH_INTERVAL_S = 1.0
# Shortest time between reports of a load that has changed, unless admissions are sent anyway.
LOAD_INTERVAL_S = 0.2


class SchedulerService(scheduler_pb2_grpc.SchedulerServicer):
    """Decodes requests, calls the loop and encodes the responses."""

    def __init__(
        self,
        loop: SchedulerLoop,
        settings: SchedulerSettings,
        credentials: Credentials,
        acts: CallerActs,
        weights: WeightsDesk,
        sleep: SleepDesk,
    ) -> None:
        """Serve `loop`, `weights` and `sleep`.

        `credentials` decide which callers may read names and make changes, which `acts` records.
        """
        # Verdicts of the content check by outcome; replaced by the content desk's own counts if there is one.
        self.verdicts: dict[str, int] = {}
        # Receives each prompt pinned (True) or unpinned here; replaced by the fleet desk's, if there is one.
        self.announce_pin: Callable[[TokenIds, bool], None] = lambda _token_ids, _is_pinned: None
        self._loop = loop
        self._settings = settings
        self._credentials = credentials
        self._acts = acts
        self._weights = weights
        self._sleep = sleep
        # Pixels of recent requests, by view.
        most_bytes = bytes_to_keep(settings.vision.kept_bytes, available_memory())
        self._images: RecentImages[Pixels] = RecentImages(most_bytes)
        # Computes prompts for other groups; None: not here.
        self.prefill_server: PrefillServer | None = None

    async def drop_images(self) -> NoReturn:
        """Drop the pixels that no request has used for some minutes, until cancelled."""
        await self._images.run()

    async def Submit(  # type: ignore[override]  # noqa: N802  (writes to its context; the contract names it)
        self, request_iterator: AsyncIterator[scheduler_pb2.SchedulerSubmitRequest], context: Context
    ) -> None:
        """Submit batches of requests and aborts; admissions known at once are returned in one message per batch."""
        await accept_stream(context, is_numbered=True)
        submissions = Submissions(self._loop, self._images)
        reading = asyncio.create_task(submissions.read(_batches(request_iterator, submissions)))
        reported: LoadReport | None = None

        async def report() -> None:
            while True:
                if self._loop.load != reported:
                    submissions.confirm()
                await asyncio.sleep(LOAD_INTERVAL_S)

        reporting = asyncio.create_task(report())
        sent = 0
        try:
            # An error of a write means that the stream has broken, as does the end of its requests.
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                async for admissions in submissions.answers():
                    reported = self._loop.load
                    for part in divided(admissions):
                        response = admissions_to_wire(part, reported)
                        response.sequence = sent = sent + 1
                        await context.write(response)
        finally:
            reporting.cancel()
            reading.cancel()
            submissions.close()

    @property
    def open_leases(self) -> int:
        """The number of prompts whose pages other groups may read."""
        return 0 if self.prefill_server is None else self.prefill_server.open_leases

    async def Prefill(  # noqa: N802
        self, request: scheduler_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[scheduler_pb2.PrefillResponse]:
        """Compute a prompt for another group; its pages are kept until the call ends."""
        if self.prefill_server is None:
            raise UnavailableError("this scheduler computes no prompts for others")
        wanted = schedule_request_from_wire(request.request)
        async with contextlib.aclosing(self.prefill_server.serve(wanted)) as parts:
            async for part in parts:
                yield scheduler_pb2.PrefillResponse(
                    fingerprint=part.fingerprint,
                    kv_identity=part.kv_identity,
                    workers=part.workers,
                    lease=part.lease,
                    device_pages=part.pages,
                    cached_tokens=part.cached_tokens,
                    is_last=part.is_last,
                    device_snapshot=part.snapshot,
                    computing_us=part.computing_us,
                )

    async def SetRole(  # noqa: N802
        self, request: scheduler_pb2.SetRoleRequest, context: Context
    ) -> scheduler_pb2.SetRoleResponse:
        """Change the role of this group."""
        self._credentials.require_admin_if_set(_metadata(context), "change the role")
        role = role_from_wire(request.role)
        if role is GroupRole.DECODE and (core := self._loop.core) is not None and core.memory.loads is None:
            raise InvalidRequestError("a group that leaves prompts to others needs a host tier", param="role")
        async with self._acts.act("group.set_role", context, role=role.value):
            self._loop.roles.set(role)
        return scheduler_pb2.SetRoleResponse()

    async def GetState(  # noqa: N802
        self, request: scheduler_pb2.GetStateRequest, context: Context
    ) -> scheduler_pb2.GetStateResponse:
        """Return queues, rows, pages and the state of the worker group."""
        state = scheduler_pb2.GetStateResponse(
            worker_group=self._loop.group_state.value,
            max_rows=self._settings.max_rows,
            page_size_tokens=self._settings.page_size,
            policy=self._settings.queue.policy,
            cache=self._settings.cache.mode,
            sleep_level=self._loop.sleep_level,
            wakes_on_request=self._settings.sleep.wake_on_request or self._settings.device_turns.enabled,
            role=role_to_wire(self._loop.roles.role),
            ranks=[rank_to_wire(number, health) for number, health in enumerate(self._loop.rank_healths)],
        )
        if (change := self._loop.roles.change) is not None:
            state.role_change.CopyFrom(wish_to_wire(change))
        self._describe_disaggregation(state)
        core, weights = self._loop.core, self._loop.weights
        if weights is not None:
            state.weights, state.weight_version = weights.model, weights.version
        if core is not None:
            _describe_core(core, state)
            if core.config.is_encoder:
                state.cache = "chunk"  # an encoder keeps no KV, regardless of the settings
            state.cache_accounting.CopyFrom(cache_to_wire(core.memory.cache, self._loop.meter, self.verdicts))
            shown = self._disclosure(context)
            state.sessions.extend(session_to_wire(each, shown, self._loop.now) for each in core.sessions)
            if request.include_requests:
                state.requests.extend(self._describe(core, sequence, shown) for sequence in core.open_sequences)
            if request.max_owners:
                owners = core.memory.cache.owners()
                largest = heapq.nlargest(request.max_owners, owners, key=lambda owner: owner.device_pages)
                state.owners.extend(owner_to_wire(owner, shown) for owner in largest)
        return state

    def _describe_disaggregation(self, state: scheduler_pb2.GetStateResponse) -> None:
        server, client, core = self.prefill_server, self._loop.prefills, self._loop.core
        if (server is None or not server.prefills) and (client is None or not client.asked):
            return
        loads = None if core is None else core.memory.loads
        state.disaggregation.CopyFrom(
            scheduler_pb2.DisaggregationState(
                open_leases=self.open_leases,
                prefills=server.prefills if server else 0,
                remote_prefills=client.asked if client else 0,
                failed_prefills=client.failed if client else 0,
                fetched_pages=loads.host.fetched_pages if loads else 0,
            )
        )

    def _describe(self, core: SchedulerCore, sequence: Sequence, shown: Disclosure) -> scheduler_pb2.RequestState:
        row, rows = sequence.row, core.rows
        running = row is not None
        message = sequence_to_wire(
            sequence,
            computed_tokens=int(rows.computed[row]) if running else 0,
            generated_tokens=int(rows.length[row] if running else len(sequence.token_ids)) - sequence.prompt_tokens,
            pages=int(rows.page_count[row]) if running else 0,
            age_s=self._loop.now - sequence.arrived_at,
        )
        message.fingerprint = shown.fingerprint(sequence.request.view)
        if shown.is_admin:
            message.view.CopyFrom(view_to_wire(sequence.request.view))
        return message

    async def DumpTree(  # noqa: N802
        self, request: scheduler_pb2.DumpTreeRequest, context: Context
    ) -> AsyncIterator[scheduler_pb2.DumpTreeResponse]:
        """Stream the cache's current nodes, parents before children."""
        shown = self._disclosure(context, with_ids=request.include_token_ids)
        cache = self._core().memory.cache
        # Copied to a list, as the tree may change between two writes.
        nodes = list(islice(cache.dump(self._viewer(request, context, cache)), request.max_nodes or None))
        for node in nodes:
            yield scheduler_pb2.DumpTreeResponse(node=node_to_wire(node, shown))

    async def GetTimelines(  # noqa: N802
        self, request: scheduler_pb2.GetTimelinesRequest, context: Context
    ) -> scheduler_pb2.GetTimelinesResponse:
        """Return the timelines of recent requests."""
        self._credentials.require_admin_if_set(_metadata(context), "read timelines")
        subject = subject_from_wire(request.subject) if request.HasField("subject") else None
        found = ((each, self._loop.timelines.find(each, subject)) for each in request.request_ids)
        return scheduler_pb2.GetTimelinesResponse(
            timelines=[timeline_to_wire(each, timeline) for each, timeline in found if timeline is not None]
        )

    async def FlushCache(  # noqa: N802
        self, request: scheduler_pb2.FlushCacheRequest, context: Context
    ) -> scheduler_pb2.FlushCacheResponse:
        """Drop every cache entry that no running request needs."""
        self._credentials.require_admin_if_set(_metadata(context), "flush the cache")
        async with self._acts.act("cache.flush", context) as results:
            self._images.clear()
            freed = results["freed_pages"] = self._core().memory.flush()
        return scheduler_pb2.FlushCacheResponse(freed_pages=freed)

    async def Forget(  # noqa: N802
        self, request: scheduler_pb2.ForgetRequest, context: Context
    ) -> scheduler_pb2.ForgetResponse:
        """Drop all private entries of one subject, or of one of its sessions."""
        self._credentials.require_admin(_metadata(context), "forget a user")
        subject, session = subject_from_wire(request.subject), request.session or None
        async with self._acts.act(
            "cache.forget", context, tenant=subject.tenant, subject=subject.name, session=session
        ) as results:
            self._images.forget(subject)
            freed = results["freed_pages"] = self._core().forget(subject, session)
        return scheduler_pb2.ForgetResponse(freed_pages=freed)

    async def Pin(self, request: scheduler_pb2.PinRequest, context: Context) -> scheduler_pb2.PinResponse:  # noqa: N802
        """Declare a prompt public."""
        self._credentials.require_admin(_metadata(context), "pin a prompt")
        token_ids = _prompt(self._core(), request.token_ids)
        async with self._acts.act("cache.pin", context, **self._acts.prompt(token_ids)) as results:
            pinned = results["pinned_tokens"] = self._core().memory.cache.pin(token_ids)
            if pinned:
                self.announce_pin(token_ids, True)
        return scheduler_pb2.PinResponse(pinned_tokens=pinned)

    async def Unpin(  # noqa: N802
        self, request: scheduler_pb2.UnpinRequest, context: Context
    ) -> scheduler_pb2.UnpinResponse:
        """Undo `Pin`."""
        self._credentials.require_admin(_metadata(context), "unpin a prompt")
        token_ids = _prompt(self._core(), request.token_ids)
        async with self._acts.act("cache.unpin", context, **self._acts.prompt(token_ids)) as results:
            was_pinned = results["was_pinned"] = self._core().memory.cache.unpin(token_ids)
            self.announce_pin(token_ids, False)
        return scheduler_pb2.UnpinResponse(was_pinned=was_pinned)

    async def LoadAdapter(  # noqa: N802
        self, request: scheduler_pb2.LoadAdapterRequest, context: Context
    ) -> scheduler_pb2.LoadAdapterResponse:
        """Make an adapter available to requests."""
        self._credentials.require_admin_if_set(_metadata(context), "load an adapter")
        async with self._acts.act(
            "adapter.load", context, name=request.name, source=request.source, pinned=request.pinned
        ) as results:
            made = await self._loop.adapters.load(request.name, request.source, pinned=request.pinned)
            results["digest"] = made.digest
        return scheduler_pb2.LoadAdapterResponse(adapter=adapter_to_wire(made))

    async def UnloadAdapter(  # noqa: N802
        self, request: scheduler_pb2.UnloadAdapterRequest, context: Context
    ) -> scheduler_pb2.UnloadAdapterResponse:
        """Make an adapter unavailable."""
        self._credentials.require_admin_if_set(_metadata(context), "unload an adapter")
        async with self._acts.act("adapter.unload", context, name=request.name) as results:
            was_loaded = results["was_loaded"] = await self._loop.adapters.unload(request.name)
        return scheduler_pb2.UnloadAdapterResponse(was_loaded=was_loaded)

    async def ListAdapters(  # noqa: N802
        self, request: scheduler_pb2.ListAdaptersRequest, context: Context
    ) -> scheduler_pb2.ListAdaptersResponse:
        """Return all adapters."""
        self._credentials.require_admin_if_set(_metadata(context), "list adapters")
        slots = self._core().adapters
        response = scheduler_pb2.ListAdaptersResponse(slots=slots.count)
        for adapter in self._loop.adapters.all:
            rows = slots.rows_of(adapter.digest)
            response.adapters.add(adapter=adapter_to_wire(adapter), resident=rows is not None, running_rows=rows or 0)
        return response

    async def UpdateWeights(  # noqa: N802
        self, request: scheduler_pb2.UpdateWeightsRequest, context: Context
    ) -> scheduler_pb2.UpdateWeightsResponse:
        """Replace the weights of all ranks."""
        self._credentials.require_admin_if_set(_metadata(context), "replace the weights")
        mode, version = update_mode_from_wire(request.mode), request.weight_version
        async with self._acts.act(
            "weights.update", context, model=request.model, mode=mode.value, version=version
        ) as results:
            updated = await self._weights.update(request.model, request.load_format, mode, version)
            results["version"] = updated.version
        return scheduler_pb2.UpdateWeightsResponse(
            weight_version=updated.version,
            running_requests=updated.running,
            paused_seconds=updated.paused_s,
            loaded_beside=updated.beside,
        )

    async def Sleep(  # noqa: N802
        self, request: scheduler_pb2.SchedulerSleepRequest, context: Context
    ) -> scheduler_pb2.SchedulerSleepResponse:
        """Put the workers to sleep."""
        self._credentials.require_admin_if_set(_metadata(context), "put the model to sleep")
        self._check_takes_no_turns()
        level, mode = sleep_level_from_wire(request.level), sleep_mode_from_wire(request.mode)
        keep_cache = request.keep_cache
        async with self._acts.act(
            "model.sleep", context, level=level.value, mode=mode.value, keep_cache=keep_cache
        ) as results:
            slept = await self._sleep.sleep(level, mode, keep_cache=keep_cache)
            results["freed_bytes"] = slept.freed_bytes
        return scheduler_pb2.SchedulerSleepResponse(
            running_requests=slept.running, freed_bytes=slept.freed_bytes, seconds=slept.seconds
        )

    async def WakeUp(  # noqa: N802
        self, request: scheduler_pb2.SchedulerWakeUpRequest, context: Context
    ) -> scheduler_pb2.SchedulerWakeUpResponse:
        """Wake the workers."""
        self._credentials.require_admin_if_set(_metadata(context), "wake the model")
        self._check_takes_no_turns()
        parts = sleep_parts_from_wire(request.parts)
        async with self._acts.act("model.wake_up", context, parts=[part.value for part in parts]) as results:
            woken = await self._sleep.wake_up(parts)
            results["is_awake"] = woken.is_awake
        return scheduler_pb2.SchedulerWakeUpResponse(is_awake=woken.is_awake, seconds=woken.seconds)

    def _check_takes_no_turns(self) -> None:
        if self._settings.device_turns.enabled:
            raise InvalidRequestError("the model shares its device with others, and sleeps and wakes by turns")

    async def Pause(  # noqa: N802
        self, request: scheduler_pb2.PauseRequest, context: Context
    ) -> scheduler_pb2.PauseResponse:
        """Pause the admission of waiting requests."""
        self._credentials.require_admin_if_set(_metadata(context), "pause")
        async with self._acts.act("group.pause", context):
            self._core().pause(paused=True)
        return scheduler_pb2.PauseResponse()

    async def Resume(  # noqa: N802
        self, request: scheduler_pb2.ResumeRequest, context: Context
    ) -> scheduler_pb2.ResumeResponse:
        """Resume the admission of waiting requests."""
        self._credentials.require_admin_if_set(_metadata(context), "resume")
        async with self._acts.act("group.resume", context):
            self._core().pause(paused=False)
            self._loop.wake()
        return scheduler_pb2.ResumeResponse()

    async def WatchCacheEvents(  # noqa: N802
        self, request: scheduler_pb2.WatchCacheEventsRequest, context: Context
    ) -> AsyncIterator[scheduler_pb2.WatchCacheEventsResponse]:
        """Stream past decisions and a snapshot, then every change; after losses, their number and all of it again."""
        shown = self._disclosure(context)
        cache = self._core().memory.cache
        viewer = self._viewer(request, context, cache)
        is_filtered = request.HasField("view") or request.HasField("fingerprint")

        def concerns(event: CacheEvent) -> bool:
            return not is_filtered or _is_in_view(event, viewer)

        def beginning() -> list[scheduler_pb2.WatchCacheEventsResponse]:
            # Copied to a list, as the tree may change between two writes.
            past = self._past_decisions(request.max_past_decisions, shown, concerns)
            return [*past, *_snapshot(cache, viewer, shown)]

        backlog = EventBacklog()
        unsubscribe = cache.events.subscribe(backlog.add)
        try:
            for message in beginning():
                yield message
            while True:
                event = await backlog.next(WATCH_INTERVAL_S)
                if event is not None:
                    if concerns(event):
                        yield event_to_wire(event, shown)
                elif lost := backlog.take_lost():
                    metrics.CACHE_EVENTS_LOST_TOTAL.inc(lost)
                    messages = beginning()
                    kind = scheduler_pb2.CACHE_EVENT_KIND_LOST
                    yield scheduler_pb2.WatchCacheEventsResponse(
                        sequence=cache.events.sequence, kind=kind, lost_events=lost
                    )
                    for message in messages:
                        yield message
                elif self._core().memory.cache is not cache:
                    raise UnavailableError("the cache was replaced with the workers; watch again")
        finally:
            unsubscribe()

    def _past_decisions(
        self, number: int, shown: Disclosure, concerns: Callable[[CacheEvent], bool]
    ) -> Iterator[scheduler_pb2.WatchCacheEventsResponse]:
        kept, now = self._loop.past_decisions, self._loop.now
        for decision in kept.latest(number) if kept is not None else ():
            if concerns(decision.event):
                yield event_to_wire(decision.event, shown, age_s=now - decision.taken_at)

    def _core(self) -> SchedulerCore:
        if self._loop.core is None:
            raise UnavailableError("the scheduler waits for its workers", retry_after_ms=1000)
        return self._loop.core

    def _disclosure(self, context: Context, *, with_ids: bool = False) -> Disclosure:
        is_admin = self._credentials.is_admin(_metadata(context))
        return Disclosure(is_admin, self._credentials.fingerprint, with_ids)

    def _viewer(self, request: Filtered, context: Context, cache: PrefixCache) -> View | None:
        """Return the view that a request is filtered by, None for all views.

        Raises:
            PermissionDeniedError: a view is named without the admin token, which would reveal its fingerprint.
            InvalidRequestError: no view in the cache has the fingerprint.
        """
        if request.HasField("view"):
            self._credentials.require_admin(_metadata(context), "name a user; a fingerprint needs none")
            return view_from_wire(request.view)
        if not request.HasField("fingerprint"):
            return None
        for owner in cache.owners():
            if owner.view and self._credentials.fingerprint(owner.view) == request.fingerprint:
                return owner.view
        raise InvalidRequestError("no view with this fingerprint has entries in the cache", param="fingerprint")


def _metadata(context: Context) -> Mapping[str, str | bytes]:
    return dict(context.invocation_metadata() or ())


def _prompt(core: SchedulerCore, token_ids: Iterable[int]) -> TokenIds:
    """Return the token ids of a prompt, [tokens] int32.

    Raises:
        InvalidRequestError: the prompt is empty, or an id is outside the model's vocabulary.
    """
    ids = np.fromiter(token_ids, dtype=np.int64)
    if not len(ids):
        raise InvalidRequestError("token_ids must not be empty", param="token_ids")
    if int(ids.max()) >= core.config.vocabulary_size:
        raise InvalidRequestError(f"token ids must be in [0, {core.config.vocabulary_size})", param="token_ids")
    return ids.astype(np.int32)


async def _batches(
    messages: AsyncIterator[scheduler_pb2.SchedulerSubmitRequest], submissions: Submissions
) -> AsyncIterator[Batch]:
    numbers = MessageNumbers()
    async for message in messages:
        numbers.check(message.sequence)
        if message.heartbeat:
            submissions.confirm()
        yield batch_from_wire(message)


def _snapshot(
    cache: PrefixCache, viewer: View | None, shown: Disclosure
) -> Iterator[scheduler_pb2.WatchCacheEventsResponse]:
    """Yield the tree as INSERTED events, followed by SNAPSHOT_END."""
    sequence = cache.events.sequence
    for node in cache.dump(viewer):
        kind = scheduler_pb2.CACHE_EVENT_KIND_INSERTED
        yield scheduler_pb2.WatchCacheEventsResponse(sequence=sequence, kind=kind, node=node_to_wire(node, shown))
    yield scheduler_pb2.WatchCacheEventsResponse(sequence=sequence, kind=scheduler_pb2.CACHE_EVENT_KIND_SNAPSHOT_END)


def _is_in_view(event: CacheEvent, viewer: View | None) -> bool:
    node = event.node
    if node is None or node.owner is not None:
        return node is None or node.owner == viewer
    return node.tenant is None or (viewer is not None and node.tenant == viewer.tenant)


def _describe_core(core: SchedulerCore, state: scheduler_pb2.GetStateResponse) -> None:
    """Fill in the fields that exist only once the workers are connected."""
    state.waiting_requests = len(core.queue)
    state.running_rows = core.rows.running
    state.paused = core.is_paused
    state.planned_steps = core.planned_steps
    state.finished_steps = core.finished_steps
    state.retractions = core.memory.retractions
    state.preemptions = core.preemptions
    state.jumped_tokens = core.jumped_tokens
    images = core.memory.images
    state.encoded_images = images.encoded_images + images.encodings.encoded_images + images.encodings.failed_images
    state.leaked_pages = core.memory.leaked_pages
    state.tiers.append(tier_to_wire("device", core.memory.account(core.rows)))
    windows = core.memory.account_windows(core.rows)
    if windows is not None:
        state.tiers.append(tier_to_wire("device_window", windows))
    snapshots = core.memory.account_snapshots(core.rows)
    if snapshots is not None:
        state.tiers.append(tier_to_wire("device_snapshots", snapshots))
    if core.memory.cache.host is not None:
        state.tiers.append(tier_to_wire("host", core.memory.cache.host.account()))
        on_host = core.memory.cache.host.account_snapshots()
        if on_host is not None:
            state.tiers.append(tier_to_wire("host_snapshots", on_host))
        if core.memory.cache.host.storage is not None:
            state.storage.CopyFrom(storage_to_wire(core.memory.cache.host.storage))
    if core.memory.loads is not None:
        state.host_tier.CopyFrom(traffic_to_wire(core.memory.loads))

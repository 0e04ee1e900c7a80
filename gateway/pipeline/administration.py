"""Administrators' calls to all scheduler groups that exist now."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

import grpc
import structlog
from google.protobuf.json_format import MessageToDict

from common.errors import UnavailableError
from common.rpc.status import to_error
from common.wire.adapters import adapter_from_wire
from common.wire.identity import subject_to_wire
from gateway.pipeline.cache_changes import watch_groups
from gateway.pipeline.port import (
    FallenAsleep,
    LoadedAdapter,
    ScheduledMilestone,
    ScheduledRequest,
    SleepState,
    WeightsUpdated,
)
from protos.gen.pando.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    Stub = scheduler_pb2_grpc.SchedulerAsyncStub
    from common.adapters import AdapterInfo
    from common.rpc.peers import Servers
    from common.types import RequestId, Subject
    from gateway.pipeline.port import CacheChanges, SleepWish, WeightsUpdate


Answer = TypeVar("Answer")
TIMEOUT_S = 10.0
# Part of the answer to probes.
STATE_TIMEOUT_S = 1.0
# Covers the download of an adapter.
LOAD_S = 900.0
# Requests that run may have to finish first, and large weights take minutes to load.
UPDATE_TIMEOUT_S = 3600.0


class GrpcAdministration:
    """Implements `gateway.pipeline.port.Administration`."""

    def __init__(self, groups: SchedulerGroups, admin_token: str | None) -> None:
        """Call all groups, with `admin_token` if their schedulers require one."""
        self._groups = groups
        self._credential = (("authorization", f"Bearer {admin_token}"),) if admin_token else ()

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """The credential, and the id of the HTTP request that a call is made for, which schedulers record."""
        request_id = structlog.contextvars.get_contextvars().get("http_request_id")
        return (*self._credential, ("x-request-id", request_id)) if request_id else self._credential

    async def flush_cache(self) -> int:
        """Drop every cache entry that no running request needs; return the number of freed pages."""
        request = scheduler_pb2.FlushCacheRequest()
        answers = await self._ask(lambda stub: stub.FlushCache(request, timeout=TIMEOUT_S, metadata=self._metadata))
        return sum(answer.freed_pages for answer in answers)

    async def update_weights(self, update: WeightsUpdate) -> list[WeightsUpdated]:
        """Replace the weights of all groups, each of which keeps its weights if it cannot; return what each says."""
        request = scheduler_pb2.UpdateWeightsRequest(
            model=update.model,
            load_format=update.load_format,
            mode=scheduler_pb2.WeightsUpdateMode.Value(f"WEIGHTS_UPDATE_MODE_{update.mode.upper()}"),
            weight_version=update.version,
        )
        answers = await self._ask(
            lambda stub: stub.UpdateWeights(request, timeout=UPDATE_TIMEOUT_S, metadata=self._metadata)
        )
        return [
            WeightsUpdated(answer.weight_version, answer.running_requests, answer.paused_seconds, answer.loaded_beside)
            for answer in answers
        ]

    async def sleep(self, wish: SleepWish) -> list[FallenAsleep]:
        """Put the workers of all groups to sleep, even if one of them fails; return what each says."""
        request = scheduler_pb2.SchedulerSleepRequest(
            level=wish.level,
            mode=scheduler_pb2.SleepMode.Value(f"SLEEP_MODE_{wish.mode.upper()}"),
            keep_cache=wish.keep_cache,
        )
        answers = await self._ask(lambda stub: stub.Sleep(request, timeout=UPDATE_TIMEOUT_S, metadata=self._metadata))
        return [FallenAsleep(answer.running_requests, answer.freed_bytes, answer.seconds) for answer in answers]

    async def wake_up(self, parts: Sequence[str]) -> bool:
        """Restore parts of what the workers of all groups have given back, or all; return whether they are awake."""
        request = scheduler_pb2.SchedulerWakeUpRequest(parts=parts)
        answers = await self._ask(lambda stub: stub.WakeUp(request, timeout=UPDATE_TIMEOUT_S, metadata=self._metadata))
        return all(answer.is_awake for answer in answers)

    async def sleep_states(self) -> list[SleepState]:
        """Return whether the workers of each group sleep."""
        answers = await self._ask(lambda stub: stub.GetState(scheduler_pb2.GetStateRequest(), timeout=STATE_TIMEOUT_S))
        return [SleepState(answer.sleep_level, answer.wakes_on_request) for answer in answers]

    async def states(self) -> list[dict[str, object]]:
        """Return each group's statistics, as JSON."""
        # Sent without the token, so that the answer omits owners and other private data, which the gateway must not
        # show.
        answers = await self._ask(lambda stub: stub.GetState(scheduler_pb2.GetStateRequest(), timeout=TIMEOUT_S))
        return [
            MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            for answer in answers
        ]

    async def timelines(self, request_ids: Sequence[RequestId], subject: Subject) -> list[ScheduledRequest]:
        """Return the schedulers' records of those of `request_ids` that are requests of `subject`."""
        request = scheduler_pb2.GetTimelinesRequest(request_ids=request_ids, subject=subject_to_wire(subject))
        answers = await self._ask(lambda stub: stub.GetTimelines(request, timeout=TIMEOUT_S, metadata=self._metadata))
        return [_scheduled_from_wire(timeline) for answer in answers for timeline in answer.timelines]

    async def detailed_states(self, max_owners: int) -> list[dict[str, object]]:
        """Return each group's statistics with owners and open requests, as JSON; `error` for one that is away."""
        request = scheduler_pb2.GetStateRequest(include_requests=True, max_owners=max_owners)
        stubs = await self._groups.named_stubs()
        calls = (stub.GetState(request, timeout=TIMEOUT_S, metadata=self._metadata) for stub in stubs.values())
        answers = await asyncio.gather(*calls, return_exceptions=True)
        states: list[dict[str, object]] = []
        for group, answer in zip(stubs, answers, strict=True):
            if isinstance(answer, grpc.RpcError):
                states.append({"group": group, "error": to_error(answer).message})
            elif isinstance(answer, BaseException):
                raise answer
            else:
                fields = MessageToDict(
                    answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
                )
                states.append({"group": group, **fields})
        return states

    async def watch_caches(self) -> AsyncGenerator[CacheChanges]:
        """Yield all groups' snapshots and changes; a group that is away is watched again when it is back."""
        if not await self._groups.stubs():
            raise UnavailableError("this gateway knows no scheduler (gateway.schedulers)")
        async with aclosing(watch_groups(self._groups.named_stubs, self._metadata)) as changes:
            async for change in changes:
                yield change

    async def load_adapter(self, name: str, source: str, *, pinned: bool) -> AdapterInfo:
        """Make an adapter available in all groups; without `source`, change its pin only."""
        request = scheduler_pb2.LoadAdapterRequest(name=name, source=source, pinned=pinned)
        answers = await self._ask(lambda stub: stub.LoadAdapter(request, timeout=LOAD_S, metadata=self._metadata))
        return adapter_from_wire(answers[0].adapter)

    async def unload_adapter(self, name: str) -> bool:
        """Make an adapter unavailable in all groups; return whether any had it."""
        request = scheduler_pb2.UnloadAdapterRequest(name=name)
        answers = await self._ask(lambda stub: stub.UnloadAdapter(request, timeout=TIMEOUT_S, metadata=self._metadata))
        return any(answer.was_loaded for answer in answers)

    async def adapters(self) -> list[LoadedAdapter]:
        """Return the adapters that all groups have, by name."""
        request = scheduler_pb2.ListAdaptersRequest()
        answers = await self._ask(lambda stub: stub.ListAdapters(request, timeout=TIMEOUT_S, metadata=self._metadata))
        by_name: dict[str, list[scheduler_pb2.AdapterState]] = {}
        for state in (state for answer in answers for state in answer.adapters):
            by_name.setdefault(state.adapter.name, []).append(state)
        return [
            LoadedAdapter(
                adapter_from_wire(states[0].adapter),
                sum(state.resident for state in states),
                sum(state.running_rows for state in states),
            )
            for _, states in sorted(by_name.items())
            if len(states) == len(answers)
        ]

    async def _ask(self, call: Callable[[Stub], Awaitable[Answer]]) -> list[Answer]:
        """Call every group, even if one of them fails; raise the first error after that."""
        stubs = await self._groups.stubs()
        if not stubs:
            raise UnavailableError("this gateway knows no scheduler (gateway.schedulers)")
        results = await asyncio.gather(*(call(stub) for stub in stubs), return_exceptions=True)
        answers: list[Answer] = []
        for result in results:
            if isinstance(result, grpc.RpcError):
                raise to_error(result) from result
            if isinstance(result, BaseException):
                raise result
            answers.append(result)
        return answers


def _scheduled_from_wire(message: scheduler_pb2.RequestTimeline) -> ScheduledRequest:
    return ScheduledRequest(message.request_id, tuple(map(_milestone_from_wire, message.milestones)))


def _milestone_from_wire(message: scheduler_pb2.Milestone) -> ScheduledMilestone:
    found = message.found
    return ScheduledMilestone(
        kind=_name(scheduler_pb2.MilestoneKind.Name(message.kind), "MILESTONE_KIND_"),
        unix_s=message.unix_s,
        choice=message.choice_index,
        wait=_name(scheduler_pb2.WaitReason.Name(message.wait), "WAIT_REASON_") if message.wait else None,
        found={field.name: getattr(found, field.name) for field in found.DESCRIPTOR.fields}
        if message.HasField("found")
        else None,
        finish_reason=_name(common_pb2.FinishReason.Name(message.finish_reason), "FINISH_REASON_")
        if message.HasField("finish_reason")
        else None,
        output_tokens=message.output_tokens,
        charged_tokens=message.charged_tokens,
    )


def _name(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower()


class SchedulerGroups:
    """Keeps a channel to each group that discovery finds."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def stubs(self) -> list[scheduler_pb2_grpc.SchedulerAsyncStub]:
        """Return a stub for each group that exists now."""
        return list((await self.named_stubs()).values())

    async def named_stubs(self) -> dict[str, scheduler_pb2_grpc.SchedulerAsyncStub]:
        """Return the stubs of the groups that exist now by address; channels to removed groups are closed."""
        found = {group.address: group for group in await self._servers.discovery.look()}
        for channel in [self._channels.pop(address) for address in self._channels.keys() - found.keys()]:
            await channel.close()
        for address, group in found.items():
            if address not in self._channels:
                self._channels[address] = self._servers.connect(group)
        return {address: scheduler_pb2_grpc.SchedulerStub(self._channels[address]) for address in found}

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

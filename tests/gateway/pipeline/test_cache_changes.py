"""The changes of the schedulers' caches as the console gets them, over real gRPC."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

from common.rpc.channel import open_channel
from common.rpc.discovery import Discovery
from common.rpc.peers import Servers, servers_at
from common.rpc.server import RpcServer
from gateway.pipeline import cache_changes
from gateway.pipeline.administration import GrpcAdministration, SchedulerGroups
from gateway.pipeline.port import CacheChanges
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    import pytest

SHARED = scheduler_pb2.TreeNode(
    node_id=1,
    edge_tokens=16,
    depth_tokens=16,
    visibility=scheduler_pb2.VISIBILITY_TENANT,
    state=scheduler_pb2.NODE_STATE_LIVE,
    promoted_by=3,
    promoted_epoch=7,
)


def event(sequence: int, kind: str, age_ms: int | None = None) -> scheduler_pb2.WatchCacheEventsResponse:
    number = scheduler_pb2.CacheEventKind.Value(f"CACHE_EVENT_KIND_{kind}")
    node = None if kind in ("SNAPSHOT_END", "LOST") else SHARED
    return scheduler_pb2.WatchCacheEventsResponse(sequence=sequence, kind=number, node=node, age_ms=age_ms)


class Scheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Sends what it is given to each watcher, then waits."""

    def __init__(self, address: str, events: Sequence[scheduler_pb2.WatchCacheEventsResponse]) -> None:
        self.address = address
        self.server = RpcServer("pando.v1.Scheduler", address)
        self.dumps = 0
        self._events = events

    async def WatchCacheEvents(
        self, request: scheduler_pb2.WatchCacheEventsRequest, context: Any
    ) -> AsyncIterator[scheduler_pb2.WatchCacheEventsResponse]:
        assert request.max_past_decisions
        for each in self._events:
            yield each
        await asyncio.Event().wait()

    async def DumpTree(
        self, request: scheduler_pb2.DumpTreeRequest, context: Any
    ) -> AsyncIterator[scheduler_pb2.DumpTreeResponse]:
        self.dumps += 1
        yield scheduler_pb2.DumpTreeResponse(node=SHARED)


@asynccontextmanager
async def running(path: Path, *events: scheduler_pb2.WatchCacheEventsResponse) -> AsyncIterator[Scheduler]:
    """Run a scheduler with these events."""
    scheduler = Scheduler(f"unix:{path}", events)  # type: ignore[abstract]  # the generated base answers what it doesn't
    scheduler.server.add(scheduler_pb2_grpc.add_SchedulerServicer_to_server, scheduler)
    await scheduler.server.start()
    try:
        yield scheduler
    finally:
        await scheduler.server.stop(0)


def pool(addresses: list[str]) -> Servers:
    """Return the servers of a name that has these addresses, which the caller may change."""

    async def resolve(host: str, port: int) -> list[str]:
        return list(addresses)

    return Servers(Discovery(["dns:pool:1"], resolve), lambda found: open_channel(found.address))


@asynccontextmanager
async def watching(
    path: Path, *events: scheduler_pb2.WatchCacheEventsResponse
) -> AsyncIterator[AsyncIterator[CacheChanges]]:
    """Yield the changes that a gateway reports of a scheduler with these events."""
    async with running(path / "s.sock", *events) as scheduler:
        groups = SchedulerGroups(servers_at([scheduler.address]))
        async with asyncio.timeout(60), aclosing(GrpcAdministration(groups, None).watch_caches()) as changes:
            yield changes
        await groups.close()


async def snapshot_of(changes: AsyncIterator[CacheChanges], sequence: int) -> CacheChanges:
    """Join the messages from the last reset to the end of the snapshot with this number."""
    joined = CacheChanges("nothing arrived")
    while not joined.events or joined.events[-1][:2] != (sequence, "snapshot_end"):
        change = await anext(changes)
        if change.reset:
            joined = change
        else:
            joined.past.extend(change.past)
            joined.events.extend(change.events)
    return joined


async def test_past_decisions_come_before_the_end_of_their_snapshot(tmp_path: Path) -> None:
    past = event(4, "PROMOTED", age_ms=5000)
    async with watching(tmp_path, past, event(9, "INSERTED"), event(9, "SNAPSHOT_END")) as changes:
        snapshot = await snapshot_of(changes, 9)
    [(age_ms, sequence, kind, node)] = snapshot.past
    assert (age_ms, sequence, kind) == (5000, 4, "promoted")
    assert (node["id"], node["visibility"], node["promoted_by"]) == (1, "tenant", 3)
    assert snapshot.events == [(9, "inserted", node), (9, "snapshot_end", None)]


async def test_after_losses_all_of_it_comes_again(tmp_path: Path) -> None:
    begins = event(4, "PROMOTED", age_ms=5000), event(9, "SNAPSHOT_END")
    again = event(12, "LOST"), event(4, "PROMOTED", age_ms=6000), event(12, "SNAPSHOT_END")
    async with watching(tmp_path, *begins, *again) as changes:
        snapshot = await snapshot_of(changes, 12)
    assert [age_ms for age_ms, *_ in snapshot.past] == [6000]
    assert [kind for _, kind, _ in snapshot.events] == ["lost", "snapshot_end"]


async def test_groups_that_come_are_watched_and_those_that_go_are_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_changes, "LOOK_S", 0.05)
    monkeypatch.setattr(cache_changes, "RETRY_S", 0.05)
    events = event(9, "INSERTED"), event(9, "SNAPSHOT_END")
    async with running(tmp_path / "a.sock", *events) as first, running(tmp_path / "b.sock", *events) as second:
        there = [first.address]
        groups = SchedulerGroups(pool(there))
        seen: dict[str, list[CacheChanges]] = {first.address: [], second.address: []}
        async with asyncio.timeout(60), aclosing(GrpcAdministration(groups, None).watch_caches()) as changes:
            assert (await anext(changes)).group == first.address
            there[:] = [second.address]
            while not seen[second.address] or not any(change.reset for change in seen[first.address]):
                change = await anext(changes)
                seen[change.group].append(change)
        await groups.close()
    emptied = next(change for change in seen[first.address] if change.reset)
    assert [kind for _, kind, _ in emptied.events] == ["snapshot_end"]
    assert seen[second.address][0].events[0][1] == "inserted"


async def test_a_watch_outlasts_its_channel_and_its_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_changes, "RETRY_S", 0.05)
    monkeypatch.setattr(cache_changes, "COUNTERS_INTERVAL_S", 0.2)
    there: list[str] = []
    groups = SchedulerGroups(pool(there))
    asking = GrpcAdministration(groups, None)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(running(tmp_path / "s.sock", event(9, "SNAPSHOT_END")))
        there.append(first.address)
        await stack.enter_async_context(asyncio.timeout(60))
        changes = await stack.enter_async_context(aclosing(asking.watch_caches()))
        assert (await anext(changes)).reset
        # For a moment the name has no address, and another call closes the channel.
        there.clear()
        assert await asking.detailed_states(1) == []
        there.append(first.address)
        counted = first.dumps
        while first.dumps < counted + 2:
            await anext(changes)
        await first.server.stop(0)
        second = await stack.enter_async_context(running(tmp_path / "s.sock", event(3, "SNAPSHOT_END")))
        while (3, "snapshot_end", None) not in (await anext(changes)).events:
            pass
        while not second.dumps:
            await anext(changes)
    await groups.close()

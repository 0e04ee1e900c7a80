"""The changes of the schedulers' caches as the console gets them, over real gRPC."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

from common.rpc.peers import servers_at
from common.rpc.server import RpcServer
from gateway.pipeline.administration import GrpcAdministration, SchedulerGroups
from gateway.pipeline.port import CacheChanges
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

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

    def __init__(self, *events: scheduler_pb2.WatchCacheEventsResponse) -> None:
        self.events = events

    async def WatchCacheEvents(
        self, request: scheduler_pb2.WatchCacheEventsRequest, context: Any
    ) -> AsyncIterator[scheduler_pb2.WatchCacheEventsResponse]:
        assert request.max_past_decisions
        for each in self.events:
            yield each
        await asyncio.Event().wait()


@asynccontextmanager
async def watching(
    path: Path, *events: scheduler_pb2.WatchCacheEventsResponse
) -> AsyncIterator[AsyncIterator[CacheChanges]]:
    """Yield the changes that a gateway reports of a scheduler with these events."""
    address = f"unix:{path}/s.sock"
    server = RpcServer("pando.v1.Scheduler", address)
    server.add(
        scheduler_pb2_grpc.add_SchedulerServicer_to_server,
        Scheduler(*events),  # type: ignore[abstract]  # the generated base answers what it doesn't
    )
    await server.start()
    groups = SchedulerGroups(servers_at([address]))
    try:
        async with asyncio.timeout(60), aclosing(GrpcAdministration(groups, None).watch_caches()) as changes:
            yield changes
    finally:
        await groups.close()
        await server.stop(0)


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

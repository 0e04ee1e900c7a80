"""The changes of the schedulers' prefix caches, as JSON for the console.

A node has `id` and, where they are not at their default, `parent`, `edge` and `depth` (tokens), `owner` (names, or a
pseudonym if the scheduler does not disclose names), `pages` and `host_pages` (counts), `locks`, `state` and
`visibility` (lower case), and the fields of `TreeNode` that say why it is shared. It has no token ids.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import grpc

from common.rpc.status import to_error
from gateway.pipeline.port import CacheChanges
from protos.gen.pando.v1 import scheduler_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from gateway.pipeline.port import JsonObject
    from protos.gen.pando.v1 import scheduler_pb2_grpc

    Metadata = Sequence[tuple[str, str]]

KINDS = {
    number: name.removeprefix("CACHE_EVENT_KIND_").lower() for name, number in scheduler_pb2.CacheEventKind.items()
}
VISIBILITIES = {number: name.removeprefix("VISIBILITY_").lower() for name, number in scheduler_pb2.Visibility.items()}
STATES = {number: name.removeprefix("NODE_STATE_").lower() for name, number in scheduler_pb2.NodeState.items()}
# Fields of a node with the same meaning in JSON; left out at their default.
SAME = (
    ("edge", "edge_tokens"),
    ("depth", "depth_tokens"),
    ("locks", "lock_ref"),
    ("used", "last_access"),
    ("hits", "hits"),
    ("users", "users"),
    ("previous_hits", "previous_hits"),
    ("previous_users", "previous_users"),
    ("epoch", "epoch"),
    ("creators", "creators"),
    ("quarantined", "quarantined"),
    ("quarantined_tenants", "quarantined_tenants"),
    ("generation", "generation"),
    ("pinned", "pinned"),
    ("no_promote", "no_promote"),
    ("promoted_tenants", "promoted_tenants"),
    ("required", "required_subjects"),
)
# Events are collected for this long, so that a busy cache does not cost a message and a redraw for each.
COLLECT_S = 0.05
MAX_EVENTS_PER_MESSAGE = 1000
# Hits change without an event, so they are asked for. A dump blocks scheduling for about 10 µs per node.
COUNTERS_INTERVAL_S = 5.0
MAX_COUNTED_NODES = 1000
RETRY_S = 1.0
# As many as a scheduler keeps.
PAST_DECISIONS = 1000
QUEUED_MESSAGES = 16


async def watch_groups(
    stubs: Mapping[str, scheduler_pb2_grpc.SchedulerAsyncStub], metadata: Metadata
) -> AsyncGenerator[CacheChanges]:
    """Yield the changes of all groups, keyed by address, in the order in which they arrive, until closed."""
    queue: asyncio.Queue[CacheChanges] = asyncio.Queue(QUEUED_MESSAGES)
    tasks = [asyncio.create_task(_watch(name, stub, metadata, queue)) for name, stub in stubs.items()]
    try:
        while True:
            yield await queue.get()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _watch(
    group: str, stub: scheduler_pb2_grpc.SchedulerAsyncStub, metadata: Metadata, queue: asyncio.Queue[CacheChanges]
) -> None:
    """Watch one group, and again after each failure, until cancelled."""
    while True:
        counting = asyncio.create_task(_count(group, stub, metadata, queue))
        try:
            await _watch_once(group, stub, metadata, queue)
            error = "the scheduler ended the stream"
        except grpc.RpcError as failure:
            error = to_error(failure).message
        finally:
            counting.cancel()
        await queue.put(CacheChanges(group, error=error))
        await asyncio.sleep(RETRY_S)


async def _watch_once(
    group: str, stub: scheduler_pb2_grpc.SchedulerAsyncStub, metadata: Metadata, queue: asyncio.Queue[CacheChanges]
) -> None:
    request = scheduler_pb2.WatchCacheEventsRequest(max_past_decisions=PAST_DECISIONS)
    call = stub.WatchCacheEvents(request, metadata=metadata)
    collected = CacheChanges(group, reset=True)
    arrived = asyncio.Event()

    async def send() -> None:
        nonlocal collected
        while True:
            await arrived.wait()
            await asyncio.sleep(COLLECT_S)
            arrived.clear()
            if collected.events:
                full, collected = collected, CacheChanges(group)
                await queue.put(full)

    sending = asyncio.create_task(send())
    try:
        async for event in call:
            if event.kind == scheduler_pb2.CACHE_EVENT_KIND_LOST:
                collected = CacheChanges(group, reset=True)
            node = node_to_json(event.node) if event.HasField("node") else None
            if event.HasField("age_ms") and node is not None:
                # Sent with the events of the snapshot that follow.
                collected.past.append((event.age_ms, event.sequence, KINDS[event.kind], node))
                continue
            collected.events.append((event.sequence, KINDS[event.kind], node))
            arrived.set()
            if len(collected.events) >= MAX_EVENTS_PER_MESSAGE:
                full, collected = collected, CacheChanges(group)
                # Waits while the viewer is slow; the scheduler bounds its own queue and reports what was lost.
                await queue.put(full)
    finally:
        call.cancel()
        sending.cancel()


async def _count(
    group: str, stub: scheduler_pb2_grpc.SchedulerAsyncStub, metadata: Metadata, queue: asyncio.Queue[CacheChanges]
) -> None:
    """Report the hits of shared nodes periodically."""
    request = scheduler_pb2.DumpTreeRequest(max_nodes=MAX_COUNTED_NODES)
    while True:
        await asyncio.sleep(COUNTERS_INTERVAL_S)
        # A failure also ends the watch, which reports it.
        with contextlib.suppress(grpc.RpcError):
            call = stub.DumpTree(request, metadata=metadata, timeout=COUNTERS_INTERVAL_S)
            nodes = [answer.node async for answer in call]
            shared = [node_to_json(node) for node in nodes if node.visibility != scheduler_pb2.VISIBILITY_PRIVATE]
            await queue.put(CacheChanges(group, counters=shared))


def node_to_json(node: scheduler_pb2.TreeNode) -> JsonObject:
    """Return a node as the module describes."""
    fields: JsonObject = {
        "id": node.node_id,
        "visibility": VISIBILITIES[node.visibility],
        "owner": _owner(node),
        "pages": len(node.device_pages),
        "state": STATES[node.state],
    }
    if node.HasField("parent_id"):
        fields["parent"] = node.parent_id
    if node.host_pages:
        fields["host_pages"] = len(node.host_pages)
    if node.HasField("promoted_by"):
        fields["promoted_by"], fields["promoted_epoch"] = node.promoted_by, node.promoted_epoch
    for name, field in SAME:
        if value := getattr(node, field):
            fields[name] = value
    return fields


def _owner(node: scheduler_pb2.TreeNode) -> JsonObject:
    owner: JsonObject = {"fingerprint": node.owner_fingerprint}
    if node.HasField("owner_view"):
        view = node.owner_view
        owner |= {"tenant": view.subject.tenant, "subject": view.subject.name}
        if view.salt:
            owner["salt"] = view.salt
    elif node.HasField("owner_tenant"):
        owner["tenant"] = node.owner_tenant
    return owner

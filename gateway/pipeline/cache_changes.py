"""The changes of the schedulers' prefix caches, as JSON for the console.

A node has `id` and, where they are not at their default, `parent`, `edge` and `depth` (tokens), `owner` (names, or a
pseudonym if the scheduler does not disclose names), `pages` and `host_pages` (counts), `locks`, `state` and
`visibility` (lower case), and the fields of `TreeNode` that say why it is shared. It has no token ids.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from common.rpc.status import CLOSED_DURING_CALL, is_own_cancellation, to_error
from gateway.pipeline.port import CacheChanges
from protos.gen.pando.v1 import scheduler_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    from gateway.pipeline.port import JsonObject
    from protos.gen.pando.v1 import scheduler_pb2_grpc

    Metadata = Sequence[tuple[str, str]]
    # Returns the groups that exist now, by address. Channels of others are closed.
    Find = Callable[[], Awaitable[Mapping[str, scheduler_pb2_grpc.SchedulerAsyncStub]]]

KINDS = {
    number: name.removeprefix("CACHE_EVENT_KIND_").lower() for name, number in scheduler_pb2.CacheEventKind.items()
}
VISIBILITIES = {number: name.removeprefix("VISIBILITY_").lower() for name, number in scheduler_pb2.Visibility.items()}
STATES = {number: name.removeprefix("NODE_STATE_").lower() for name, number in scheduler_pb2.NodeState.items()}
# From a scheduler of a later version.
UNKNOWN = "unknown"
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
# Groups are looked for this often.
LOOK_S = 5.0
# As many as a scheduler keeps.
PAST_DECISIONS = 1000
QUEUED_MESSAGES = 16


async def watch_groups(find: Find, metadata: Metadata) -> AsyncGenerator[CacheChanges]:
    """Yield the changes of all groups in the order in which they arrive, until closed.

    `find` returns the groups that exist now. A group that comes is watched; one that goes is reported as empty.
    """
    queue: asyncio.Queue[CacheChanges] = asyncio.Queue(QUEUED_MESSAGES)
    watching = asyncio.create_task(_watch_all(find, metadata, queue))
    receiving = asyncio.create_task(queue.get())
    try:
        while True:
            await asyncio.wait((watching, receiving), return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                # It ends by an error only.
                await watching
            change = await receiving
            receiving = asyncio.create_task(queue.get())
            yield change
    finally:
        watching.cancel()
        receiving.cancel()
        await asyncio.gather(watching, receiving, return_exceptions=True)


async def _watch_all(find: Find, metadata: Metadata, queue: asyncio.Queue[CacheChanges]) -> None:
    watched: dict[str, tuple[asyncio.Task[None], asyncio.Task[None]]] = {}
    async with asyncio.TaskGroup() as tasks:
        while True:
            found = (await find()).keys()
            for group in watched.keys() - found:
                for task in watched.pop(group):
                    task.cancel()
                await queue.put(CacheChanges(group, reset=True, events=[(0, "snapshot_end", None)]))
            for group in found - watched.keys():
                watch, count = _watch(group, find, metadata, queue), _count(group, find, metadata, queue)
                watched[group] = tasks.create_task(watch), tasks.create_task(count)
            await asyncio.sleep(LOOK_S)


async def _watch(group: str, find: Find, metadata: Metadata, queue: asyncio.Queue[CacheChanges]) -> None:
    """Watch one group, and again after each failure, until cancelled."""
    while True:
        stub = (await find()).get(group)
        if stub is not None:
            try:
                await _watch_once(group, stub, metadata, queue)
                error = "the scheduler ended the stream"
            except grpc.RpcError as failure:
                error = to_error(failure).message
            except asyncio.CancelledError:
                if is_own_cancellation():
                    raise
                error = CLOSED_DURING_CALL
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
                collected.past.append((event.age_ms, event.sequence, _kind(event), node))
                continue
            collected.events.append((event.sequence, _kind(event), node))
            arrived.set()
            if len(collected.events) >= MAX_EVENTS_PER_MESSAGE:
                full, collected = collected, CacheChanges(group)
                # Waits while the viewer is slow; the scheduler bounds its own queue and reports what was lost.
                await queue.put(full)
    finally:
        call.cancel()
        sending.cancel()


async def _count(group: str, find: Find, metadata: Metadata, queue: asyncio.Queue[CacheChanges]) -> None:
    """Report the hits of a group's shared nodes periodically, until cancelled."""
    request = scheduler_pb2.DumpTreeRequest(max_nodes=MAX_COUNTED_NODES)
    while True:
        await asyncio.sleep(COUNTERS_INTERVAL_S)
        stub = (await find()).get(group)
        if stub is None:
            continue
        # Failures also end the watch, which reports them.
        try:
            call = stub.DumpTree(request, metadata=metadata, timeout=COUNTERS_INTERVAL_S)
            nodes = [answer.node async for answer in call]
        except grpc.RpcError:
            continue
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
            continue
        shared = [node_to_json(node) for node in nodes if node.visibility != scheduler_pb2.VISIBILITY_PRIVATE]
        await queue.put(CacheChanges(group, counters=shared))


def _kind(event: scheduler_pb2.WatchCacheEventsResponse) -> str:
    return KINDS.get(event.kind, UNKNOWN)


def node_to_json(node: scheduler_pb2.TreeNode) -> JsonObject:
    """Return a node as the module describes."""
    fields: JsonObject = {
        "id": node.node_id,
        "visibility": VISIBILITIES.get(node.visibility, UNKNOWN),
        "owner": _owner(node),
        "pages": len(node.device_pages),
        "state": STATES.get(node.state, UNKNOWN),
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

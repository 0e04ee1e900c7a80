"""The output of `pando cache tree` and `pando cache watch`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.tree import Tree

from deploy.cli.inspection.connection import TIMEOUT_S
from deploy.cli.inspection.identities import name_of
from protos.gen.pando.v1 import scheduler_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deploy.cli.inspection.connection import Connection
    from deploy.cli.inspection.identities import Filter


def show_tree(connection: Connection, *, shown: Filter, max_nodes: int, with_ids: bool) -> None:
    """Print the nodes as a tree."""
    request = scheduler_pb2.DumpTreeRequest(
        view=shown.view, fingerprint=shown.fingerprint, max_nodes=max_nodes, include_token_ids=with_ids
    )
    answers = connection.scheduler.DumpTree(request, timeout=TIMEOUT_S, metadata=connection.metadata)
    nodes = [answer.node for answer in answers]
    connection.console.print(draw(nodes))
    if max_nodes and len(nodes) >= max_nodes:
        connection.console.print(f"(the first {max_nodes} nodes; --max-nodes 0 shows all)")


def draw(nodes: Iterable[scheduler_pb2.TreeNode]) -> Tree:
    """Return the nodes as a tree; parents must come before their children."""
    root = Tree("root")
    branches: dict[int, Tree] = {}
    for node in nodes:
        # The filter may exclude the parent: then the node is drawn below the root.
        parent = branches.get(node.parent_id, root) if node.HasField("parent_id") else root
        branches[node.node_id] = parent.add(escape(describe(node)))
    return root


def describe(node: scheduler_pb2.TreeNode) -> str:
    """Return one node as a line, without values that are at their default."""
    visibility = scheduler_pb2.Visibility.Name(node.visibility).removeprefix("VISIBILITY_").lower()
    state = scheduler_pb2.NodeState.Name(node.state).removeprefix("NODE_STATE_").lower()
    parts = [
        f"{node.edge_tokens:,} tokens (to {node.depth_tokens:,})",
        visibility + _owner(node) + _evidence(node),
        f"{len(node.device_pages):,} device pages",
    ]
    optional = {
        f"{len(node.host_pages):,} host pages": node.host_pages,
        state.replace("_", " "): node.state > scheduler_pb2.NODE_STATE_LIVE,
        f"{node.lock_ref} running": node.lock_ref,
        f"{node.host_ref} in transfer": node.host_ref,
        f"{node.hits:,} hits by {node.users:,} users in epoch {node.epoch:,}": node.hits,
        f"{node.previous_hits:,} by {node.previous_users:,} before": node.previous_hits,
        f"hidden from {node.quarantined:,} users": node.quarantined,
        f"hidden from {node.quarantined_tenants:,} tenants": node.quarantined_tenants,
        f"generation {node.generation}": node.generation,
        f"priority {node.priority}": node.priority,
        "never to be shared": node.no_promote,
        f"ids {' '.join(map(str, node.token_ids))}": node.token_ids,
    }
    parts += [text for text, is_there in optional.items() if is_there]
    return f"{node.node_id}: {', '.join(parts)}, last access {node.last_access:,}"


def _owner(node: scheduler_pb2.TreeNode) -> str:
    if node.visibility == scheduler_pb2.VISIBILITY_PUBLIC:
        return ""
    if node.visibility == scheduler_pb2.VISIBILITY_TENANT:
        return f" {node.owner_tenant or node.owner_fingerprint}"
    return f" of {name_of(node.owner_view if node.HasField('owner_view') else None, node.owner_fingerprint)}"


def _evidence(node: scheduler_pb2.TreeNode) -> str:
    """Return the reason why a node is shared; empty if it is private."""
    if node.pinned:
        return " (pinned)"
    if node.HasField("promoted_by"):
        tenants = f" of {node.promoted_tenants:,} tenants" if node.promoted_tenants else ""
        users = f"{node.promoted_by:,} users{tenants} in epoch {node.promoted_epoch:,}"
        return f" (by {users}; {node.creators:,} computed it)"
    return ""


def watch(connection: Connection, *, shown: Filter) -> None:
    """Print every change until Ctrl-C."""
    request = scheduler_pb2.WatchCacheEventsRequest(view=shown.view, fingerprint=shown.fingerprint)
    # No deadline: the stream lasts until Ctrl-C.
    for event in connection.scheduler.WatchCacheEvents(request, metadata=connection.metadata):
        kind = scheduler_pb2.CacheEventKind.Name(event.kind).removeprefix("CACHE_EVENT_KIND_").lower()
        text = describe(event.node) if event.HasField("node") else ""
        if event.kind == scheduler_pb2.CACHE_EVENT_KIND_LOST:
            text = f"{event.lost_events:,} changes were missed; the current tree follows"
        connection.console.print(f"{event.sequence:>8} {kind:<12} {escape(text)}", soft_wrap=True)

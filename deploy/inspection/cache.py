"""`pando cache`: the prefix cache's tree, numbers and changes, and a way to empty it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rich.table import Table
from rich.tree import Tree

from deploy.inspection.connection import TIMEOUT_S, add_connection_arguments, with_scheduler
from deploy.inspection.replay import add_replay_arguments, run_replay
from deploy.inspection.state import tiers
from protos.gen.pando.v1 import common_pb2, scheduler_pb2

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from deploy.inspection.connection import Connection

SHOWN_NODES = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `pando cache`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    tree = actions.add_parser("tree", help="print the cache's nodes")
    tree.add_argument("--max-nodes", type=int, default=SHOWN_NODES, help=f"0: all (default {SHOWN_NODES})")
    watch = actions.add_parser("watch", help="print every change until Ctrl-C")
    for action in (tree, watch):
        action.add_argument("--principal", metavar="TENANT/USER", help="only what this principal sees")
    stats = actions.add_parser("stats", help="pages, nodes and sharing in numbers")
    flush = actions.add_parser("flush", help="drop every entry that no running request needs")
    for action in (tree, watch, stats, flush):
        add_connection_arguments(action)
    add_replay_arguments(actions.add_parser("replay", help="do again what a decision log says; show what differs"))


def run(arguments: argparse.Namespace) -> int:
    """Do what the chosen action says."""
    match arguments.action:
        case "replay":
            return run_replay(arguments)
        case "tree":
            ask = partial(_tree, principal=_principal(arguments.principal), max_nodes=arguments.max_nodes)
        case "watch":
            ask = partial(_watch, principal=_principal(arguments.principal))
        case "stats":
            ask = partial(_stats)
        case _:
            ask = partial(_flush)
    return with_scheduler(arguments, ask)


def _principal(text: str | None) -> common_pb2.Principal | None:
    if text is None:
        return None
    tenant, _, user = text.partition("/")
    return common_pb2.Principal(tenant=tenant, user=user)


def _tree(connection: Connection, *, principal: common_pb2.Principal | None, max_nodes: int) -> None:
    nodes = _dump(connection, scheduler_pb2.DumpTreeRequest(principal=principal, max_nodes=max_nodes))
    connection.console.print(draw(nodes))
    if max_nodes and len(nodes) >= max_nodes:
        connection.console.print(f"(the first {max_nodes} nodes; --max-nodes 0 shows all)")


def _dump(connection: Connection, request: scheduler_pb2.DumpTreeRequest) -> list[scheduler_pb2.TreeNode]:
    answers = connection.scheduler.DumpTree(request, timeout=TIMEOUT_S, metadata=connection.metadata)
    return [answer.node for answer in answers]


def draw(nodes: Iterable[scheduler_pb2.TreeNode]) -> Tree:
    """Return the nodes, of which parents come before their children, as a drawing."""
    root = Tree("root")
    branches: dict[int, Tree] = {}
    for node in nodes:
        # A parent may be outside of what was asked for: then the node hangs at the root.
        parent = branches.get(node.parent_id, root) if node.HasField("parent_id") else root
        branches[node.node_id] = parent.add(describe(node))
    return root


def describe(node: scheduler_pb2.TreeNode) -> str:
    """Return one node as a line."""
    visibility = scheduler_pb2.Visibility.Name(node.visibility).removeprefix("VISIBILITY_").lower()
    owner = f" of {node.owner.tenant}/{node.owner.user}" if node.HasField("owner") else ""
    locks = f", {node.lock_ref} running" if node.lock_ref else ""
    return (
        f"{node.node_id}: {node.edge_tokens:,} tokens (to {node.depth_tokens:,}), {visibility}{owner}, "
        f"{len(node.device_pages):,} device pages{locks}, last access {node.last_access:,}"
    )


def _stats(connection: Connection) -> None:
    request = scheduler_pb2.GetStateRequest()
    state = connection.scheduler.GetState(request, timeout=TIMEOUT_S, metadata=connection.metadata)
    nodes = _dump(connection, scheduler_pb2.DumpTreeRequest())
    connection.console.print(tiers(state))
    connection.console.print(numbers(nodes))


def numbers(nodes: Iterable[scheduler_pb2.TreeNode]) -> Table:
    """Return how much of the tree is public, private and in use."""
    table = Table(title="tree", title_justify="left")
    for name in ("visibility", "nodes", "tokens", "in use"):
        table.add_column(name, justify="left" if name == "visibility" else "right")
    nodes = list(nodes)
    for visibility in (scheduler_pb2.VISIBILITY_PUBLIC, scheduler_pb2.VISIBILITY_PRIVATE):
        of_kind = [node for node in nodes if node.visibility == visibility]
        tokens = sum(node.edge_tokens for node in of_kind)
        in_use = sum(node.lock_ref > 0 for node in of_kind)
        name = scheduler_pb2.Visibility.Name(visibility).removeprefix("VISIBILITY_").lower()
        table.add_row(name, f"{len(of_kind):,}", f"{tokens:,}", f"{in_use:,}")
    return table


def _flush(connection: Connection) -> None:
    request = scheduler_pb2.FlushCacheRequest()
    answer = connection.scheduler.FlushCache(request, timeout=TIMEOUT_S, metadata=connection.metadata)
    connection.console.print(f"{answer.freed_pages:,} pages freed")


def _watch(connection: Connection, *, principal: common_pb2.Principal | None) -> None:
    request = scheduler_pb2.WatchCacheEventsRequest(principal=principal)
    # No deadline: it goes on until the person has seen enough.
    for event in connection.scheduler.WatchCacheEvents(request, metadata=connection.metadata):
        kind = scheduler_pb2.CacheEventKind.Name(event.kind).removeprefix("CACHE_EVENT_KIND_").lower()
        node = describe(event.node) if event.HasField("node") else ""
        connection.console.print(f"{event.sequence:>8} {kind:<12} {node}", soft_wrap=True)

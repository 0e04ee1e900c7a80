"""`pando cache`: inspects the prefix cache's tree, figures and changes, replays logs; pins, forgets, flushes."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from deploy.cli.inspection.arguments import Filter, Prompt, name_of, parse_subject, subject_text
from deploy.cli.inspection.connection import TIMEOUT_S, add_connection_arguments, with_scheduler
from deploy.cli.inspection.state import tiers
from deploy.evaluation.bench.report import output_console
from protos.gen.pando.v1 import scheduler_pb2
from services.scheduler.cache.debug.replay import LogError, replay

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Mapping

    from deploy.cli.inspection.connection import Connection
    from protos.gen.pando.v1 import common_pb2
    from services.scheduler.cache.debug.replay import Difference

SHOWN_NODES = 200
SHOWN_OWNERS = 10
SHOWN_CHARACTERS = 400
DIFFERENT, UNREADABLE = 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `pando cache`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    add_replay_arguments(actions.add_parser("replay", help="replay a decision log and show the first difference"))
    tree = actions.add_parser("tree", help="print the cache's nodes")
    tree.add_argument("--max-nodes", type=int, default=SHOWN_NODES, help=f"0: all (default {SHOWN_NODES})")
    tree.add_argument("--token-ids", action="store_true", help="also print token ids; needs the admin token")
    changes = actions.add_parser("watch", help="print every change until Ctrl-C")
    for action in (tree, changes):
        seen = action.add_mutually_exclusive_group()
        seen.add_argument(
            "--view",
            metavar="TENANT/SUBJECT",
            help="only the view of this subject, e.g. acme/user/ann; needs the admin token",
        )
        seen.add_argument("--salt", default="", help="with --view: the salt of the view")
        seen.add_argument("--fingerprint", metavar="HEX", help="only the view with this fingerprint")
    stats = actions.add_parser("stats", help="pages, owners, hits and events in numbers")
    stats.add_argument(
        "--owners", type=int, default=SHOWN_OWNERS, help=f"owners to list, most pages first (default {SHOWN_OWNERS})"
    )
    gone = actions.add_parser("forget", help="drop all private entries of a user; needs the admin token")
    gone.add_argument("subject", metavar="TENANT/SUBJECT", help="e.g. acme/user/ann, acme/key/KEYID, default/local")
    gone.add_argument("--session", metavar="ID", help="only entries that belong to this conversation and no other")
    pinned = actions.add_parser("pin", help="declare a prompt public; needs the admin token")
    unpinned = actions.add_parser("unpin", help="undo a pin; needs the admin token")
    for action in (pinned, unpinned):
        prompt = action.add_mutually_exclusive_group(required=True)
        prompt.add_argument("--system", metavar="TEXT", help="a system prompt, rendered with the model's chat template")
        prompt.add_argument("--system-file", metavar="FILE", type=Path, help="the same from a file")
        prompt.add_argument("--text", metavar="TEXT", help="the beginning of plain prompts")
        prompt.add_argument("--text-file", metavar="FILE", type=Path, help="the same from a file")
        action.add_argument("--tokenizer", metavar="ADDRESS", help="gRPC address; default: this machine's deployment")
    flushed = actions.add_parser("flush", help="drop all entries that no running request needs")
    for action in (tree, changes, stats, gone, pinned, unpinned, flushed):
        add_connection_arguments(action)


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen action; return the exit status."""
    if arguments.action == "replay":
        return run_replay(arguments)
    return with_scheduler(arguments, _chosen(arguments))


def _chosen(arguments: argparse.Namespace) -> Callable[[Connection], None]:
    match arguments.action:
        case "tree":
            shown = Filter.of(arguments)
            return partial(show_tree, shown=shown, max_nodes=arguments.max_nodes, with_ids=arguments.token_ids)
        case "watch":
            return partial(watch, shown=Filter.of(arguments))
        case "stats":
            return partial(show_stats, max_owners=arguments.owners)
        case "forget":
            return partial(forget, subject=parse_subject(arguments.subject), session=arguments.session)
        case "pin":
            return partial(pin, prompt=Prompt.of(arguments))
        case "unpin":
            return partial(unpin, prompt=Prompt.of(arguments))
        case _:
            return flush


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


def show_stats(connection: Connection, *, max_owners: int) -> None:
    """Print pages, totals, owners and costs."""
    request = scheduler_pb2.GetStateRequest(max_owners=max_owners)
    state = connection.scheduler.GetState(request, timeout=TIMEOUT_S, metadata=connection.metadata)
    accounting = state.cache_accounting
    for table in (tiers(state), totals(accounting), owners(state.owners), operations(accounting.operations)):
        if table.row_count:
            connection.console.print(table)


def totals(accounting: scheduler_pb2.CacheAccounting) -> Table:
    """Return the contents of the tree, its hits, and its events as a table."""
    table = Table(show_header=False, box=None)
    table.add_row("epoch, events", f"{accounting.epoch:,}, {accounting.sequence:,}")
    table.add_row("nodes, views", f"{accounting.nodes:,}, {accounting.views:,}")
    pages = accounting.public_pages, accounting.tenant_pages, accounting.private_pages
    table.add_row("pages public, tenants', private", ", ".join(f"{number:,}" for number in pages))
    table.add_row("pages saved by sharing", f"{accounting.merged_pages:,}")
    table.add_row("tokens found", _counts(accounting.hit_tokens))
    table.add_row("events", _counts(accounting.events))
    if accounting.verdicts:
        table.add_row("content check", _counts(accounting.verdicts))
    return table


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in sorted(counts.items())) or "none"


def owners(accounts: Iterable[scheduler_pb2.OwnerAccounting]) -> Table:
    """Return the owners and their cache usage as a table."""
    table = Table(title="owners", title_justify="left")
    for name in ("owner", "device pages", "host pages", "nodes", "running", "last epoch", "active"):
        table.add_column(name, justify="left" if name in ("owner", "active") else "right")
    for account in accounts:
        match account.visibility:
            case scheduler_pb2.VISIBILITY_PUBLIC:
                name = "public"
            case scheduler_pb2.VISIBILITY_TENANT:
                name = f"tenant {account.tenant or account.fingerprint}"
            case _:
                name = name_of(account.view if account.HasField("view") else None, account.fingerprint)
        numbers = (account.device_pages, account.host_pages, account.nodes, account.leases, account.last_epoch)
        table.add_row(escape(name), *(f"{number:,}" for number in numbers), "yes" if account.active else "")
    return table


def operations(costs: Mapping[str, scheduler_pb2.OperationCost]) -> Table:
    """Return the cost of the cache's operations as a table."""
    table = Table(title="operations", title_justify="left")
    for name in ("operation", "calls", "CPU s", "µs per call"):
        table.add_column(name, justify="left" if name == "operation" else "right")
    for name, cost in sorted(costs.items()):
        if cost.calls:
            mean = f"{cost.cpu_seconds / cost.calls * 1e6:,.1f}"
            table.add_row(name, f"{cost.calls:,}", f"{cost.cpu_seconds:,.3f}", mean)
    return table


def flush(connection: Connection) -> None:
    """Drop all entries that no running request needs."""
    request = scheduler_pb2.FlushCacheRequest()
    answer = connection.scheduler.FlushCache(request, timeout=TIMEOUT_S, metadata=connection.metadata)
    connection.console.print(f"{answer.freed_pages:,} pages freed")


def forget(connection: Connection, *, subject: common_pb2.Subject, session: str | None) -> None:
    """Drop all private entries of a subject, or those of one of its conversations."""
    request = scheduler_pb2.ForgetRequest(subject=subject, session=session)
    answer = connection.scheduler.Forget(request, timeout=TIMEOUT_S, metadata=connection.metadata)
    connection.console.print(f"{escape(subject_text(subject))} is forgotten: {answer.freed_pages:,} pages freed")


def pin(connection: Connection, *, prompt: Prompt) -> None:
    """Declare a prompt public."""
    ids = prompt.token_ids()
    request = scheduler_pb2.PinRequest(token_ids=ids)
    answer = connection.scheduler.Pin(request, timeout=TIMEOUT_S, metadata=connection.metadata)
    if answer.pinned_tokens:
        console_text = f"{answer.pinned_tokens:,} of {len(ids):,} tokens are public from the next boundary on"
    else:
        console_text = f"nothing pinned: {len(ids):,} tokens are less than a page, or this cache does not support pins"
    connection.console.print(console_text)


def unpin(connection: Connection, *, prompt: Prompt) -> None:
    """Undo a pin."""
    request = scheduler_pb2.UnpinRequest(token_ids=prompt.token_ids())
    answer = connection.scheduler.Unpin(request, timeout=TIMEOUT_S, metadata=connection.metadata)
    connection.console.print("unpinned; cached entries stay public" if answer.was_pinned else "there is no such pin")


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pando cache replay`."""
    parser.add_argument("log", type=Path, help="the file of scheduler.cache.decision_log; it contains all prompts")


def run_replay(arguments: argparse.Namespace) -> int:
    """Replay the log; return 0 if all decisions are as logged, 1 at a difference, 2 if the log cannot be read."""
    console = output_console()
    try:
        with arguments.log.open("rb") as lines:
            report = replay(lines)
    except (OSError, LogError) as error:
        sys.stderr.write(f"pando cache replay: {error}\n")
        return UNREADABLE
    console.print(f"{report.operations:,} operations of {report.starts:,} starts replayed")
    if report.is_lost:
        console.print("the log ends early: its writer was killed or too slow")
    if report.difference is None:
        console.print(f"no difference; the tree has {report.nodes:,} nodes, {report.cached_pages:,} pages are in use")
        return 0
    difference = report.difference
    place = f"operation {difference.operation:,} ({difference.logged.get('operation')}), line {difference.line:,}"
    console.print(f"first difference: {place}")
    console.print(_describe(difference))
    return DIFFERENT


def _describe(difference: Difference) -> Table:
    table = Table()
    for name in ("", "logged", "replayed"):
        table.add_column(name, overflow="fold")
    for field in difference.fields:
        part, _, name = field.partition(".")
        sides = (facts.get(part, {}) for facts in (difference.logged, difference.replayed))
        table.add_row(field, *(_shorten(side.get(name) if name else side) for side in sides))
    return table


def _shorten(value: object) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}… ({len(text):,} characters)"

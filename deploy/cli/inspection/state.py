"""`pando state`: prints the scheduler's current queues, rows and pages."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rich.table import Table

from deploy.cli.inspection.arguments import name_of
from deploy.cli.inspection.connection import TIMEOUT_S, add_connection_arguments, with_schedulers
from protos.gen.pando.v1 import scheduler_pb2

if TYPE_CHECKING:
    import argparse

    from deploy.cli.inspection.connection import Connection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pando state`."""
    add_connection_arguments(parser)
    parser.add_argument("--requests", action="store_true", help="also list all open requests")


def run(arguments: argparse.Namespace) -> int:
    """Print the state of the scheduler, or of those of all models; return the exit status."""
    return with_schedulers(arguments, partial(_show, include_requests=arguments.requests))


def _show(connection: Connection, *, include_requests: bool) -> None:
    request = scheduler_pb2.GetStateRequest(include_requests=include_requests)
    state = connection.scheduler.GetState(request, timeout=TIMEOUT_S, metadata=connection.metadata)
    connection.console.print(summary(state))
    connection.console.print(tiers(state))
    if state.HasField("host_tier"):
        connection.console.print(traffic(state))
        connection.console.print(load_cost(state.host_tier.load_cost))
        if state.HasField("storage"):
            connection.console.print(storage_cost(state.host_tier.load_cost))
    if state.sessions:
        connection.console.print(sessions(state))
    if include_requests:
        connection.console.print(requests(state))


def summary(state: scheduler_pb2.GetStateResponse) -> Table:
    """Return queues, rows and counters as a table of names and values."""
    table = Table(show_header=False, box=None)
    table.add_row("worker group", state.worker_group + (", paused" if state.paused else ""))
    table.add_row("policy, cache", f"{state.policy}, {state.cache}")
    table.add_row("waiting requests", f"{state.waiting_requests:,}")
    table.add_row("running rows", f"{state.running_rows:,} of {state.max_rows:,}")
    table.add_row("steps", f"{state.finished_steps:,} finished, {state.planned_steps:,} planned")
    table.add_row("retractions", f"{state.retractions:,}, of which {state.preemptions:,} for waiting requests")
    table.add_row("jumped tokens", f"{state.jumped_tokens:,} that grammars determined")
    table.add_row("leaked pages", f"{state.leaked_pages:,}")
    if state.HasField("storage"):
        storage = state.storage
        text = f"{storage.stored_pages:,} pages stored, {storage.fetched_pages:,} fetched, {storage.misses:,} misses; "
        if storage.stored_snapshots or storage.fetched_snapshots or storage.unused_pages:
            text += f"{storage.stored_snapshots:,} snapshots stored, {storage.fetched_snapshots:,} fetched, "
            text += f"{storage.unused_pages:,} pages without one; "
        table.add_row("storage", f"{text}prefetch {storage.prefetch}")
    return table


def tiers(state: scheduler_pb2.GetStateResponse) -> Table:
    """Return the page accounting, one row per tier."""
    table = Table(title=f"pages of {state.page_size_tokens} tokens", title_justify="left")
    for name in ("tier", "capacity", "free", "soft-free", "evictable", "protected"):
        table.add_column(name, justify="left" if name == "tier" else "right")
    for tier in state.tiers:
        counts = (
            tier.capacity_pages,
            tier.free_pages,
            tier.soft_free_pages,
            tier.evictable_pages,
            tier.protected_pages,
        )
        table.add_row(tier.tier, *(f"{count:,}" for count in counts))
    return table


def traffic(state: scheduler_pb2.GetStateResponse) -> Table:
    """Return the transfers between the tiers as a table."""
    host = state.host_tier
    table = Table(title=f"moved between the tiers ({host.open_transfers:,} open)", title_justify="left")
    for name in ("direction", "transfers", "pages", "seconds", "pages/s"):
        table.add_column(name, justify="left" if name == "direction" else "right")
    for moved in host.traffic:
        rate = f"{moved.pages / moved.seconds:,.0f}" if moved.seconds else "-"
        table.add_row(
            moved.direction.replace("_", " "), f"{moved.transfers:,}", f"{moved.pages:,}", f"{moved.seconds:.2f}", rate
        )
    table.add_row("computed instead of loaded", "", f"{host.skipped_load_tokens // state.page_size_tokens:,}", "", "")
    unread = host.skipped_storage_tokens // state.page_size_tokens
    table.add_row("computed instead of read from storage", "", f"{unread:,}", "", "")
    table.add_row("not copied, host full", "", f"{host.skipped_backup_pages:,}", "", "")
    return table


def load_cost(cost: scheduler_pb2.LoadCost) -> str:
    """Return the rule by which the scheduler loads a prefix from the host instead of computing it."""
    if not (cost.prefill_tokens_per_s and cost.load_bytes_per_s):
        return "load from the host: always, as no cost has been measured"
    rule = f"{cost.break_even_tokens:,} tokens or more" if cost.HasField("break_even_tokens") else "never"
    return (
        f"load from the host: {rule} (prefill {cost.prefill_tokens_per_s:,.0f} tokens/s; "
        f"{cost.load_bytes_per_s / 1e9:.2f} GB/s, {cost.bytes_per_token:,} bytes per token, "
        f"{cost.load_latency_s * 1e3:.1f} ms latency)"
    )


def storage_cost(cost: scheduler_pb2.LoadCost) -> str:
    """Return the rule by which the scheduler reads a prefix from storage instead of computing it."""
    if not (cost.prefill_tokens_per_s and cost.storage_bytes_per_s):
        return "read from storage: always, as no cost has been measured"
    has_rule = cost.HasField("storage_break_even_tokens")
    rule = f"{cost.storage_break_even_tokens:,} tokens or more" if has_rule else "never, as computing is faster"
    return f"read from storage: {rule} ({cost.storage_bytes_per_s / 1e9:.2f} GB/s)"


def sessions(state: scheduler_pb2.GetStateResponse) -> Table:
    """Return the open sessions, oldest first; only administrators see their owners and names."""
    table = Table(title="open sessions", title_justify="left")
    for name in ("user", "session", "holds", "of tokens", "turns", "running", "ends in"):
        table.add_column(name, justify="left" if name in ("user", "session") else "right")
    for session in state.sessions:
        whose = name_of(session.view, session.fingerprint) if session.HasField("view") else ""
        table.add_row(
            whose or session.fingerprint,
            session.session,
            f"{session.pinned_tokens:,}",
            f"{session.capacity_tokens:,}",
            f"{session.turns:,}",
            f"{session.open_requests:,}",
            "" if session.open_requests else f"{session.expires_in_ms / 1000:.0f} s",
        )
    return table


def requests(state: scheduler_pb2.GetStateResponse) -> Table:
    """Return the open requests, in the scheduler's order."""
    table = Table(title="open requests", title_justify="left")
    for name in ("request", "phase", "age", "prompt", "cached", "computed", "generated", "pages"):
        table.add_column(name, justify="left" if name in ("request", "phase") else "right")
    for request in state.requests:
        counts = (
            request.prompt_tokens,
            request.cached_tokens,
            request.computed_tokens,
            request.generated_tokens,
            request.pages,
        )
        table.add_row(
            f"{request.request_id}#{request.choice_index}",
            request.phase,
            f"{request.age_ms / 1000:.1f} s",
            *(f"{count:,}" for count in counts),
        )
    return table

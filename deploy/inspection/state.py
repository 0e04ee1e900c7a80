"""`pando state`: the scheduler's queues, rows and pages at one moment."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rich.table import Table

from deploy.inspection.connection import TIMEOUT_S, add_connection_arguments, with_scheduler
from protos.gen.pando.v1 import scheduler_pb2

if TYPE_CHECKING:
    import argparse

    from deploy.inspection.connection import Connection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pando state`."""
    add_connection_arguments(parser)
    parser.add_argument("--requests", action="store_true", help="also list every open request")


def run(arguments: argparse.Namespace) -> int:
    """Ask the scheduler and print its answer."""
    return with_scheduler(arguments, partial(_show, include_requests=arguments.requests))


def _show(connection: Connection, *, include_requests: bool) -> None:
    request = scheduler_pb2.GetStateRequest(include_requests=include_requests)
    state = connection.scheduler.GetState(request, timeout=TIMEOUT_S, metadata=connection.metadata)
    connection.console.print(summary(state))
    connection.console.print(tiers(state))
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
    table.add_row("retractions", f"{state.retractions:,}")
    table.add_row("leaked pages", f"{state.leaked_pages:,}")
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

"""The figures of `pando cache stats`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from deploy.cli.inspection.connection import TIMEOUT_S
from deploy.cli.inspection.identities import name_of
from deploy.cli.inspection.state import tiers
from protos.gen.pando.v1 import scheduler_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from deploy.cli.inspection.connection import Connection


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

"""`pando adapters`: lists, loads, unloads and pins adapters (LoRA) of a served model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.table import Table

from deploy.cli.inspection.connection import add_connection_arguments, with_scheduler
from protos.gen.pando.v1 import scheduler_pb2

if TYPE_CHECKING:
    import argparse

    from deploy.cli.inspection.connection import Connection

# Covers the download of an adapter.
LOAD_S = 900.0
MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pando adapters`."""
    actions = parser.add_subparsers(dest="action", required=True)
    listing = actions.add_parser("list", help="show all adapters, and which of them are on the device")
    load = actions.add_parser("load", help="load an adapter, or replace the one with its name")
    load.add_argument("name", help="requests choose it as MODEL:NAME")
    load.add_argument("source", help="a directory on the workers' hosts, or organisation/repository on the hub")
    load.add_argument("--pin", action="store_true", help="keep it on the device while no request uses it")
    unload = actions.add_parser("unload", help="make an adapter unavailable; requests that use it continue")
    pin = actions.add_parser("pin", help="keep an adapter on the device while no request uses it")
    unpin = actions.add_parser("unpin", help="let an adapter make room on the device for others")
    for each in (unload, pin, unpin):
        each.add_argument("name")
    for each in (listing, load, unload, pin, unpin):
        add_connection_arguments(each)


def run(arguments: argparse.Namespace) -> int:
    """Carry out an action; return the exit status."""
    statuses: list[int] = []

    def ask(connection: Connection) -> None:
        statuses.append(_act(connection, arguments))

    return with_scheduler(arguments, ask) or max(statuses, default=0)


def _act(connection: Connection, arguments: argparse.Namespace) -> int:
    match arguments.action:
        case "list":
            _list(connection)
        case "unload":
            request = scheduler_pb2.UnloadAdapterRequest(name=arguments.name)
            if not connection.scheduler.UnloadAdapter(request, timeout=LOAD_S, metadata=connection.metadata).was_loaded:
                sys.stderr.write(f"the adapter {arguments.name!r} is not loaded\n")
                return 1
        case _:
            is_pinned = arguments.pin if arguments.action == "load" else arguments.action == "pin"
            source = arguments.source if arguments.action == "load" else ""
            load = scheduler_pb2.LoadAdapterRequest(name=arguments.name, source=source, pinned=is_pinned)
            made = connection.scheduler.LoadAdapter(load, timeout=LOAD_S, metadata=connection.metadata).adapter
            connection.console.print(
                f"{made.name}: rank {made.rank}, {made.bytes / MIB:.1f} MiB, digest {made.digest[:12]}"
                f"{', pinned' if made.pinned else ''}"
            )
    return 0


def _list(connection: Connection) -> None:
    answer = connection.scheduler.ListAdapters(
        scheduler_pb2.ListAdaptersRequest(), timeout=LOAD_S, metadata=connection.metadata
    )
    table = Table("adapter", "rank", "MiB", "digest", "on the device", "rows", "source", box=None)
    for state in answer.adapters:
        adapter = state.adapter
        place = "pinned" if adapter.pinned else "yes" if state.resident else "no"
        table.add_row(
            adapter.name, str(adapter.rank), f"{adapter.bytes / MIB:.1f}", adapter.digest[:12], place,
            str(state.running_rows), adapter.source,
        )  # fmt: skip
    connection.console.print(table)
    connection.console.print(f"{len(answer.adapters)} adapters, {answer.slots} slots")

"""`pando role`: shows or changes what a scheduler group does with prompts."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from common.types import GroupRole
from common.wire.requests import role_from_wire, role_to_wire, wish_from_wire
from deploy.cli.inspection.connection import add_connection_arguments, with_scheduler
from protos.gen.pando.v1 import scheduler_pb2

if TYPE_CHECKING:
    import argparse

    from deploy.cli.inspection.connection import Connection

CALL_S, POLL_S = 30.0, 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pando role`."""
    parser.add_argument(
        "role",
        nargs="?",
        choices=[role.value for role in GroupRole],
        help="prefill: compute prompts for other groups only; decode: have them computed; both. Without: show it",
    )
    parser.add_argument(
        "--drain",
        action="store_true",
        help="wait until all requests, and prompts for other groups, of the role before have ended",
    )
    add_connection_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Show or change the role; return the exit status."""
    role = None if arguments.role is None else GroupRole(arguments.role)
    return with_scheduler(arguments, partial(change, role=role, drains=arguments.drain))


def change(connection: Connection, *, role: GroupRole | None, drains: bool) -> None:
    """Change the role, wait if asked to, and print what the group does then."""
    if role is not None:
        request = scheduler_pb2.SetRoleRequest(role=role_to_wire(role))
        connection.scheduler.SetRole(request, timeout=CALL_S, metadata=connection.metadata)
    state = _state(connection)
    while drains and (_requests(state) or state.disaggregation.open_leases):
        time.sleep(POLL_S)
        state = _state(connection)
    prompts = state.disaggregation
    connection.console.print(
        f"role {role_from_wire(state.role).value}: {_requests(state):,} open requests, {prompts.open_leases:,} prompts "
        f"offered to other groups; since its start {prompts.prefills:,} computed for others and "
        f"{prompts.remote_prefills:,} by others{_change(state)}"
    )


def _change(state: scheduler_pb2.GetStateResponse) -> str:
    """Return the part of the line that says which role comes next, if one does."""
    if not state.HasField("role_change"):
        return ""
    wish = wish_from_wire(state.role_change)
    return f"; {wish.role.value} once these requests have ended, as the load asks for it: {wish.reason}"


def _state(connection: Connection) -> scheduler_pb2.GetStateResponse:
    request = scheduler_pb2.GetStateRequest()
    return connection.scheduler.GetState(request, timeout=CALL_S, metadata=connection.metadata)


def _requests(state: scheduler_pb2.GetStateResponse) -> int:
    return state.waiting_requests + state.running_rows

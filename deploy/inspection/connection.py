"""How a command finds the scheduler it asks."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from rich.console import Console

from common.rpc.options import CHANNEL_OPTIONS
from common.rpc.status import to_error
from deploy.supervisor.state import find_state
from protos.gen.pando.v1 import scheduler_pb2_grpc

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

TIMEOUT_S = 10.0
ADMIN_TOKEN_VARIABLE = "PANDO_SCHEDULER__ADMIN_TOKEN"


@dataclass(frozen=True, slots=True)
class Connection:
    """A scheduler to ask, what to show it with each call, and where to print its answers."""

    scheduler: scheduler_pb2_grpc.SchedulerStub
    metadata: tuple[tuple[str, str], ...]
    console: Console


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a scheduler."""
    parser.add_argument("--scheduler", metavar="ADDRESS", help="gRPC address; default: the deployment running here")
    parser.add_argument("--port", type=int, help="HTTP port of the deployment meant, if several run here")
    parser.add_argument(
        "--admin-token",
        metavar="TOKEN",
        help=f"shows owners and token ids too; must be the scheduler's admin_token (or {ADMIN_TOKEN_VARIABLE})",
    )


def with_scheduler(arguments: argparse.Namespace, ask: Callable[[Connection], None]) -> int:
    """Call `ask` with the scheduler that `arguments` name; return the exit status.

    Raises:
        ConfigurationError: no scheduler is named, and not exactly one deployment runs here.
    """
    address = arguments.scheduler or find_state(port=arguments.port).address_of("scheduler")
    token = arguments.admin_token or os.environ.get(ADMIN_TOKEN_VARIABLE)
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        try:
            ask(Connection(scheduler_pb2_grpc.SchedulerStub(channel), metadata, Console(highlight=False)))
        except grpc.RpcError as error:
            sys.stderr.write(f"the scheduler at {address}: {to_error(error).message}\n")
            return 1
    return 0

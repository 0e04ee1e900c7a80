"""Connections of the inspection commands: addresses of services, and credentials from the services' settings."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from rich.console import Console

from common.rpc.options import CHANNEL_OPTIONS
from common.rpc.security import Security, read_security
from common.rpc.status import to_error
from common.section import read_secret
from common.settings import CONFIG_VARIABLE, parse_settings
from deploy.supervisor.state import find_state
from protos.gen.pando.v1 import scheduler_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.settings import Settings

TIMEOUT_S = 10.0
ADMIN_TOKEN_VARIABLE = "PANDO_SCHEDULER__ADMIN_TOKEN"


@dataclass(frozen=True, slots=True)
class Connection:
    """A scheduler's stub, the metadata of each call (the admin token), and the console for output."""

    scheduler: scheduler_pb2_grpc.SchedulerStub
    metadata: tuple[tuple[str, str], ...]
    console: Console


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select a scheduler and the credentials."""
    parser.add_argument("--scheduler", metavar="ADDRESS", help="gRPC address; default: this machine's deployment")
    parser.add_argument("--model", metavar="NAME", help="selects the scheduler of a model, if several are served")
    parser.add_argument("--port", type=int, help="selects a deployment by its HTTP port, if several run here")
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help=f"the services' settings, of which rpc.* is used for connections over TCP (or {CONFIG_VARIABLE}, or "
        "variables such as PANDO_RPC__CERTIFICATE)",
    )
    parser.add_argument("--plaintext", action="store_true", help="connect over TCP without TLS (rpc.plaintext)")
    parser.add_argument(
        "--server-name", metavar="NAME", help="name in the server's certificate, if it differs from the address's host"
    )
    parser.add_argument(
        "--admin-token",
        metavar="TOKEN",
        help=f"the scheduler's admin_token, for owners, token ids and changes (or {ADMIN_TOKEN_VARIABLE})",
    )


def with_scheduler(arguments: argparse.Namespace, ask: Callable[[Connection], None]) -> int:
    """Call `ask` with the scheduler that `arguments` select; return the exit status.

    Raises:
        ConfigurationError: no scheduler is given, and not exactly one deployment runs here.
    """
    address = arguments.scheduler or find_state(port=arguments.port).address_of("scheduler", arguments.model)
    return _ask(arguments, address, ask)


def with_schedulers(arguments: argparse.Namespace, ask: Callable[[Connection], None]) -> int:
    """Call `ask` with the scheduler that `arguments` select, or with those of all models; return the exit status.

    Raises:
        ConfigurationError: no scheduler is given, and not exactly one deployment runs here.
    """
    if arguments.scheduler or arguments.model:
        return with_scheduler(arguments, ask)
    state = find_state(port=arguments.port)
    if len(state.models) < 2:
        return with_scheduler(arguments, ask)
    statuses = []
    for model in state.models:
        Console(highlight=False).print(f"{model}:", style="bold")
        statuses.append(_ask(arguments, state.address_of("scheduler", model), ask))
    return max(statuses)


def _ask(arguments: argparse.Namespace, address: str, ask: Callable[[Connection], None]) -> int:
    token = arguments.admin_token or read_admin_token(arguments)
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with open_channel(address, arguments) as channel:
        try:
            ask(Connection(scheduler_pb2_grpc.SchedulerStub(channel), metadata, Console(highlight=False)))
        except grpc.RpcError as error:
            sys.stderr.write(f"the scheduler at {address}: {to_error(error).message}\n")
            return 1
    return 0


def open_channel(address: str, arguments: argparse.Namespace) -> grpc.Channel:
    """Open a channel to a service; over TCP, with the certificates and the token of the settings.

    Raises:
        ConfigurationError: the address is TCP, there are no certificates, and plaintext is not allowed.
    """
    rpc = _settings(arguments).rpc
    security = Security(plaintext=True) if arguments.plaintext else read_security(rpc)
    if not security.needs_tls(address):
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    name = arguments.server_name
    options = [*CHANNEL_OPTIONS, *([("grpc.ssl_target_name_override", name)] if name else [])]
    return grpc.secure_channel(address, security.channel_credentials(security.load()), options=options)


def read_admin_token(arguments: argparse.Namespace) -> str | None:
    """Return the scheduler's admin token from the settings or the environment; None if it is not set.

    Raises:
        ConfigurationError: the token's file cannot be read.
    """
    return read_secret("scheduler.admin_token", _settings(arguments).scheduler.admin_token)


def _settings(arguments: argparse.Namespace) -> Settings:
    flags = ["--config", str(arguments.config)] if arguments.config else []
    return parse_settings(argparse.ArgumentParser(), flags, os.environ)[0]

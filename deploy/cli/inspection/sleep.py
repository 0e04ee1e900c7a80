"""`pando sleep`: has the workers give back KV memory and weights until `pando wake`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from deploy.cli.inspection.connection import add_connection_arguments, with_scheduler
from protos.gen.pando.v1 import scheduler_pb2

if TYPE_CHECKING:
    import argparse

    from deploy.cli.inspection.connection import Connection

# Requests that run may have to finish first.
TIMEOUT_S = 3600.0
MODES = ("drain", "requeue", "abort")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pando sleep`."""
    parser.add_argument(
        "--level", type=int, choices=(1, 2), default=1, help="1: weights move to host memory; 2: they are dropped"
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default=MODES[0],
        help="requests that run finish first (drain), continue after the model has woken, or are aborted",
    )
    parser.add_argument("--keep-cache", action="store_true", help="copy the cache to the host tier, and keep it there")
    add_connection_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Put the model to sleep; return the exit status."""
    request = scheduler_pb2.SchedulerSleepRequest(
        level=arguments.level,
        mode=scheduler_pb2.SleepMode.Value(f"SLEEP_MODE_{arguments.mode.upper()}"),
        keep_cache=arguments.keep_cache,
    )
    return with_scheduler(arguments, partial(sleep, request=request))


def sleep(connection: Connection, *, request: scheduler_pb2.SchedulerSleepRequest) -> None:
    """Put the model to sleep, and wait until it sleeps."""
    answer = connection.scheduler.Sleep(request, timeout=TIMEOUT_S, metadata=connection.metadata)
    connection.console.print(
        f"the model sleeps at level {request.level}: {answer.freed_bytes / 2**20:,.0f} MiB were given back in "
        f"{answer.seconds:.1f} s; {answer.running_requests:,} requests were running"
    )

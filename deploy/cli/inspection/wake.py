"""`pando wake`: wakes a model that was put to sleep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deploy.cli.inspection.connection import add_connection_arguments, with_scheduler
from protos.gen.pando.v1 import scheduler_pb2

if TYPE_CHECKING:
    import argparse

    from deploy.cli.inspection.connection import Connection

# Weights that were dropped are loaded again.
TIMEOUT_S = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pando wake`."""
    add_connection_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Wake the model; return the exit status."""
    return with_scheduler(arguments, wake)


def wake(connection: Connection) -> None:
    """Wake the model, and wait until it is awake."""
    request = scheduler_pb2.SchedulerWakeUpRequest()
    answer = connection.scheduler.WakeUp(request, timeout=TIMEOUT_S, metadata=connection.metadata)
    connection.console.print(f"the model is awake after {answer.seconds:.1f} s")

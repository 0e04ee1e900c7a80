"""`pando weights`: shows the weights that serve, and replaces them while requests run."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from deploy.cli.inspection.connection import TIMEOUT_S, add_connection_arguments, with_scheduler, with_schedulers
from protos.gen.pando.v1 import scheduler_pb2

if TYPE_CHECKING:
    import argparse

    from deploy.cli.inspection.connection import Connection

# Requests that run may have to finish first, and large weights take minutes to load.
UPDATE_TIMEOUT_S = 3600.0
MODES = ("drain", "recompute", "abort")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pando weights`."""
    actions = parser.add_subparsers(dest="action", required=True)
    shown = actions.add_parser("show", help="show the weights and their version")
    update = actions.add_parser("update", help="load other weights of the same shape")
    update.add_argument("path", help="a directory or file that all workers can read, or a model's name")
    update.add_argument("--load-format", default="", help="auto, safetensors, gguf or dummy; default: as loaded")
    update.add_argument("--version", default="", help="the weights' name in responses and metrics; default: a number")
    update.add_argument(
        "--mode",
        choices=MODES,
        default=MODES[0],
        help="requests that run finish with the old weights (drain), continue with the new ones, or are aborted",
    )
    for action in (shown, update):
        add_connection_arguments(action)


def run(arguments: argparse.Namespace) -> int:
    """Run the action; return the exit status."""
    if arguments.action == "show":
        return with_schedulers(arguments, show)
    request = scheduler_pb2.UpdateWeightsRequest(
        model=arguments.path,
        load_format=arguments.load_format,
        mode=scheduler_pb2.WeightsUpdateMode.Value(f"WEIGHTS_UPDATE_MODE_{arguments.mode.upper()}"),
        weight_version=arguments.version,
    )
    return with_scheduler(arguments, partial(update_weights, request=request))


def show(connection: Connection) -> None:
    """Print the weights and their version."""
    state = connection.scheduler.GetState(scheduler_pb2.GetStateRequest(), timeout=TIMEOUT_S)
    connection.console.print(f"{state.weights or 'no weights yet'}: version {state.weight_version or 'unknown'}")


def update_weights(connection: Connection, *, request: scheduler_pb2.UpdateWeightsRequest) -> None:
    """Replace the weights, and wait until the new ones serve."""
    answer = connection.scheduler.UpdateWeights(request, timeout=UPDATE_TIMEOUT_S, metadata=connection.metadata)
    connection.console.print(
        f"{request.model} serves as version {answer.weight_version}; {answer.running_requests:,} requests were "
        f"running, and none ran for {answer.paused_seconds:.1f} s"
    )

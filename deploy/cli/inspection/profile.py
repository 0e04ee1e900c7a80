"""`pando profile`: records the workers' computations as traces for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

import grpc

from common.rpc.status import to_error
from deploy.cli.inspection.connection import add_connection_arguments, open_channel
from deploy.supervisor.state import find_state
from protos.gen.pando.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    import argparse

    from protos.gen.pando.v1.worker_pb2_grpc import WorkerStub

ProfileResponse = worker_pb2.StartProfileResponse | worker_pb2.StopProfileResponse

# `stop` returns after the trace is written.
TIMEOUT_S = 120.0


class _Call(Protocol):
    """A call in progress."""

    def result(self) -> ProfileResponse:
        """Wait for the answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pando profile`."""
    parser.add_argument("action", choices=("start", "stop"), help="start recording, or stop and write the traces")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="duration after which the recording ends; default: as configured"
    )
    parser.add_argument(
        "--worker", metavar="ADDRESS", action="append", help="a rank; default: all ranks of this machine's deployment"
    )
    add_connection_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Call all ranks at the same time, as they compute together; return the exit status."""
    workers = arguments.worker or find_state(port=arguments.port).workers(arguments.model)
    failures = 0
    with ExitStack() as stack:
        channels = [stack.enter_context(open_channel(address, arguments)) for address in workers]
        calls = [_ask(worker_pb2_grpc.WorkerStub(channel), arguments) for channel in channels]
        for address, call in zip(workers, calls, strict=True):
            try:
                sys.stdout.write(f"{address}: {_describe(call.result())}\n")
            except grpc.RpcError as error:
                sys.stderr.write(f"the worker at {address}: {to_error(error).message}\n")
                failures += 1
    return 1 if failures else 0


def _ask(stub: WorkerStub, arguments: argparse.Namespace) -> _Call:
    if arguments.action == "start":
        request = worker_pb2.StartProfileRequest(max_seconds=max(arguments.seconds, 0.0))
        return stub.StartProfile.future(request, timeout=TIMEOUT_S)
    return stub.StopProfile.future(worker_pb2.StopProfileRequest(), timeout=TIMEOUT_S)


def _describe(answer: ProfileResponse) -> str:
    if isinstance(answer, worker_pb2.StartProfileResponse):
        return f"recording for at most {answer.max_seconds:g} s, to {answer.path}"
    return f"{answer.path}: {answer.passes:,} passes, {answer.bytes / 2**20:.1f} MiB"

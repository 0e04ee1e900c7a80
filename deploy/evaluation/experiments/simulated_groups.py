"""Simulated scheduler groups: servers that admit every request at once, compute nothing, and report a load.

`python -m deploy.evaluation.experiments.simulated_groups DIRECTORY FIRST COUNT MODE` serves groups FIRST … at
DIRECTORY/NUMBER.sock until it is killed. They report their load when it changes (`idle`), report another one five times
per second (`busy`), or report none, as schedulers of earlier versions, which are polled (`polled`).
"""

from __future__ import annotations

import argparse
import asyncio
import random
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import uvloop

from common.rpc.server import RpcServer
from common.rpc.stream import accept_stream
from protos.gen.pando.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from services.scheduler.service import LOAD_INTERVAL_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc

MODES = ("idle", "busy", "polled")
SERVICE = "pando.v1.Scheduler"
MOST_CHOICES = 256


class GroupEngine(Protocol):
    """Handles the requests of a simulated group."""

    def submit(self, schedule: scheduler_pb2.ScheduleRequest) -> None:
        """Take a request, which has been admitted."""

    def abort(self, request_id: str) -> None:
        """End a request; unknown ones are ignored."""

    @property
    def open_choices(self) -> int | None:
        """The load to report; None: loads are not reported."""


class NoEngine:
    """Forgets all requests, and has the load of a mode."""

    def __init__(self, mode: str) -> None:
        self._mode = mode

    def submit(self, schedule: scheduler_pb2.ScheduleRequest) -> None:
        """Ignore a request."""

    def abort(self, request_id: str) -> None:
        """Ignore an abort."""

    @property
    def open_choices(self) -> int | None:
        """None, as it is polled, a random load if it is busy, or none at all."""
        if self._mode == "polled":
            return None
        return random.randrange(MOST_CHOICES) if self._mode == "busy" else 0


class SimulatedGroup(scheduler_pb2_grpc.SchedulerServicer):
    """One group without workers."""

    def __init__(self, engine: GroupEngine) -> None:
        self._engine = engine

    async def Submit(  # type: ignore[override]  # noqa: N802  (writes to its context; the contract names it)
        self,
        request_iterator: AsyncIterator[scheduler_pb2.SchedulerSubmitRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Admit all requests, answer heartbeats, and report each load that differs from the last one."""
        await accept_stream(context, is_numbered=True)
        answers: asyncio.Queue[list[common_pb2.Admission]] = asyncio.Queue()
        answers.put_nowait([])
        writing = asyncio.create_task(self._write(answers, context))
        reporting = asyncio.create_task(self._report(answers))
        try:
            async for message in request_iterator:
                for schedule in message.schedules:
                    self._engine.submit(schedule)
                for abort in message.aborts:
                    self._engine.abort(abort.request_id)
                if message.heartbeat or message.schedules:
                    answers.put_nowait([_admission(schedule) for schedule in message.schedules])
        finally:
            writing.cancel()
            reporting.cancel()

    async def GetState(  # noqa: N802
        self, request: scheduler_pb2.GetStateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> scheduler_pb2.GetStateResponse:
        """Return an idle state."""
        return scheduler_pb2.GetStateResponse(worker_group="READY", max_rows=MOST_CHOICES)

    async def _write(
        self, answers: asyncio.Queue[list[common_pb2.Admission]], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        for sequence in count(1):
            response = scheduler_pb2.SchedulerSubmitResponse(admissions=await answers.get(), sequence=sequence)
            load = self._engine.open_choices
            if load is not None:
                response.load.CopyFrom(scheduler_pb2.SchedulerLoad(open_choices=load, serves=True))
            await context.write(response)

    async def _report(self, answers: asyncio.Queue[list[common_pb2.Admission]]) -> None:
        """Send a message without admissions whenever the load has changed."""
        reported = self._engine.open_choices
        while True:
            await asyncio.sleep(LOAD_INTERVAL_S)
            load = self._engine.open_choices
            if load != reported:
                reported = load
                answers.put_nowait([])


def _admission(schedule: scheduler_pb2.ScheduleRequest) -> common_pb2.Admission:
    return common_pb2.Admission(request_id=schedule.request_id, prompt_tokens=len(schedule.token_ids))


async def start_group(address: str, engine: GroupEngine) -> RpcServer:
    """Serve a group at an address; the caller keeps the server."""
    server = RpcServer(SERVICE, address)
    servicer = SimulatedGroup(engine)  # type: ignore[abstract]  # the generated base answers what it does not
    server.add(scheduler_pb2_grpc.add_SchedulerServicer_to_server, servicer)
    await server.start()
    await server.set_serving(True)
    return server


async def serve(directory: str, first: int, groups: int, mode: str) -> None:
    """Serve until cancelled."""
    _servers = [
        await start_group(f"unix:{directory}/{number}.sock", NoEngine(mode)) for number in range(first, first + groups)
    ]
    await asyncio.Event().wait()


def main() -> None:
    """Serve until the process ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", help="of the groups' sockets")
    parser.add_argument("first", type=int, help="number of the first group")
    parser.add_argument("groups", type=int)
    parser.add_argument("mode", help="polled, idle or busy")
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.directory, arguments.first, arguments.groups, arguments.mode))


if __name__ == "__main__":
    main()

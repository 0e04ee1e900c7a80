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
from typing import TYPE_CHECKING, Any

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


class SimulatedGroup(scheduler_pb2_grpc.SchedulerServicer):
    """One group without workers."""

    def __init__(self, mode: str) -> None:
        self._mode = mode

    async def Submit(  # type: ignore[override]  # noqa: N802  (writes to its context; the contract names it)
        self,
        request_iterator: AsyncIterator[scheduler_pb2.SchedulerSubmitRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Admit all requests, answer heartbeats, and report loads as the mode says."""
        await accept_stream(context, is_numbered=True)
        answers: asyncio.Queue[list[common_pb2.Admission]] = asyncio.Queue()
        answers.put_nowait([])
        tasks = [asyncio.create_task(self._write(answers, context))]
        if self._mode == "busy":
            tasks.append(asyncio.create_task(_change(answers)))
        try:
            async for message in request_iterator:
                if message.heartbeat or message.schedules:
                    answers.put_nowait([_admission(schedule) for schedule in message.schedules])
        finally:
            for task in tasks:
                task.cancel()

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
            if self._mode != "polled":
                load = random.randrange(MOST_CHOICES) if self._mode == "busy" else 0
                response.load.CopyFrom(scheduler_pb2.SchedulerLoad(open_choices=load, serves=True))
            await context.write(response)


async def _change(answers: asyncio.Queue[list[common_pb2.Admission]]) -> None:
    while True:
        await asyncio.sleep(LOAD_INTERVAL_S)
        answers.put_nowait([])


def _admission(schedule: scheduler_pb2.ScheduleRequest) -> common_pb2.Admission:
    return common_pb2.Admission(request_id=schedule.request_id, prompt_tokens=len(schedule.token_ids))


async def serve(directory: str, first: int, groups: int, mode: str) -> None:
    """Serve until cancelled."""
    servers = [RpcServer(SERVICE, f"unix:{directory}/{number}.sock") for number in range(first, first + groups)]
    for server in servers:
        servicer = SimulatedGroup(mode)  # type: ignore[abstract]  # the generated base answers what it does not
        server.add(scheduler_pb2_grpc.add_SchedulerServicer_to_server, servicer)
        await server.start()
        await server.set_serving(True)
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

"""A stream of plans leaves nothing when it ends, also if its worker has ended it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from common.rpc.channel import open_channel
from common.rpc.server import RpcServer
from common.steps import StepPlan
from common.types import StepId
from protos.gen.pando.v1 import worker_pb2_grpc
from services.scheduler.rank import RankConnection
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from protos.gen.pando.v1 import worker_pb2


class FailingWorker(worker_pb2_grpc.WorkerServicer):
    """Ends each stream of plans at its first plan."""

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.StepPlan], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.StepResult]:
        async for _ in request_iterator:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is gone")
        yield  # type: ignore[misc]  # makes this a generator


@pytest.mark.parametrize("has_failed", [False, True])
async def test_no_task_outlives_a_stream_of_plans(tmp_path: Path, *, has_failed: bool) -> None:
    address = f"unix:{tmp_path}/worker.sock"
    server = RpcServer("pando.v1.Worker", address)
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, FailingWorker())  # type: ignore[abstract]
    await server.start()
    channel = open_channel(address)
    before = asyncio.all_tasks()
    stream = RankConnection(channel).execute()
    await stream.wait_until_open()
    if has_failed:
        stream.send_to_all(StepPlan(StepId(1)), [stream])
        with pytest.raises(grpc.aio.AioRpcError, match="the engine is gone"):
            await anext(stream.results())
    stream.cancel()
    await until(lambda: asyncio.all_tasks() <= before)
    await channel.close()
    await server.stop(grace_s=0)

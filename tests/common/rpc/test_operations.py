"""What people do to a running process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import grpc
import pytest

from common.rpc.channel import open_channel
from common.rpc.server import RpcServer
from protos.gen.pando.v1 import operations_pb2, operations_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PROGRAM = """
from common.logs import configure_logging, get_logger, set_level
from common.settings import LogSettings
configure_logging("test", LogSettings(level="info", format="json"))
log = get_logger("made before")
log.debug("unwritten")
assert set_level("debug") == "info"
log.debug("written")
get_logger("made after").debug("written, too")
assert set_level("error") == "debug"
log.warning("unwritten again")
log.error("written at last")
"""


def test_loggers_that_are_there_follow_the_level() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=os.environ)
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert [event["event"] for event in events] == ["written", "written, too", "written at last"]
    assert {event["service"] for event in events} == {"test"}


@pytest.fixture
async def stub(tmp_path: Path) -> AsyncIterator[operations_pb2_grpc.OperationsAsyncStub]:
    server = RpcServer("pando.v1.Worker", f"unix:{tmp_path}/s.sock")
    await server.start()
    async with open_channel(server.address) as channel:
        yield operations_pb2_grpc.OperationsStub(channel)
    await server.stop(0)


async def test_the_answer_contains_the_previous_level(stub: operations_pb2_grpc.OperationsAsyncStub) -> None:
    await stub.SetLogLevel(operations_pb2.SetLogLevelRequest(level=operations_pb2.LOG_LEVEL_ERROR))
    answer = await stub.SetLogLevel(operations_pb2.SetLogLevelRequest(level=operations_pb2.LOG_LEVEL_INFO))
    assert answer.previous == operations_pb2.LOG_LEVEL_ERROR


async def test_no_level_or_an_unknown_one_is_refused(stub: operations_pb2_grpc.OperationsAsyncStub) -> None:
    for level in (0, 17):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.SetLogLevel(operations_pb2.SetLogLevelRequest(level=level))  # type: ignore[arg-type]  # as sent
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

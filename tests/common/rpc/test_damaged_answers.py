"""Answers in which a bit has flipped, which can happen without TLS: every call ends, with an error of ours."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import PandoError, QueueFullError, UnavailableError
from common.rpc.channel import is_serving, open_channel
from common.rpc.status import answered, to_error, to_status
from common.types import RequestFailure
from protos.gen.pando.v1 import worker_pb2, worker_pb2_grpc
from services.scheduler.rank import RankConnection, RankLostError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

WORKER = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
# A field of length 127 of which nothing follows.
DAMAGED = b"\x0a\x7f"
STATUS = to_status(QueueFullError("full", param="text", retry_after_ms=1500))
DETAILS = b"".join(value for _, value in STATUS.trailing_metadata or () if isinstance(value, bytes))


async def answer(_request: bytes, _context: grpc.aio.ServicerContext[Any, Any]) -> bytes:  # Any: messages are bytes
    return DAMAGED


@asynccontextmanager
async def damaged_peer(path: Path) -> AsyncIterator[grpc.aio.Channel]:
    handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(answer)
    server = grpc.aio.server()
    for name, methods in ((WORKER, ("GetState", "GetAdapters")), ("grpc.health.v1.Health", ("Check",))):
        handlers = dict.fromkeys(methods, handler)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    server.add_insecure_port(f"unix:{path}/damaged.sock")
    await server.start()
    async with open_channel(f"unix:{path}/damaged.sock") as channel:
        yield channel
    await server.stop(0)


async def test_an_answer_that_cannot_be_decoded_is_an_unreachable_peer(tmp_path: Path) -> None:
    async with damaged_peer(tmp_path) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).GetAdapters(worker_pb2.GetAdaptersRequest(), timeout=60)
        with pytest.raises(UnavailableError, match="could not be decoded"):
            await answered(call)
        assert not await is_serving(channel, WORKER, timeout_s=60)


async def test_a_rank_whose_answer_cannot_be_decoded_is_lost_or_silent(tmp_path: Path) -> None:
    async with damaged_peer(tmp_path) as channel:
        rank = RankConnection(channel)
        with pytest.raises(RankLostError, match="a message could not be read"):
            await rank.wait_until_up()
        assert await rank.pulse(60) is None


@given(st.binary(max_size=40) | st.integers(0, 8 * len(DETAILS) - 1).map(lambda bit: flipped(DETAILS, bit)))
def test_details_of_an_error_that_are_damaged_do_not_hide_it(details: bytes) -> None:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", details))
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailing, details="full")
    assert isinstance(to_error(error), PandoError)
    assert isinstance(to_error(error).to_failure(), RequestFailure)


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)

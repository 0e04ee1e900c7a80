from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.errors import ConfigurationError, PandoError, QueueFullError
from common.rpc.channel import is_serving, open_channel
from common.rpc.security import Security
from common.rpc.server import RpcServer
from common.rpc.status import to_error
from common.types import ErrorCode
from protos.gen.pando.v1 import tokenizer_pb2, tokenizer_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NAME = "pando.v1.Tokenizer"


class Failing(tokenizer_pb2_grpc.TokenizerServicer):
    """Fails as its request says."""

    async def Tokenize(
        self, request: tokenizer_pb2.TokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> tokenizer_pb2.TokenizeResponse:
        if request.text == "expected":
            raise QueueFullError("full", param="text", retry_after_ms=1500)
        raise ValueError("a secret detail")

    async def Submit(
        self,
        request_iterator: AsyncIterator[tokenizer_pb2.TokenizerSubmitRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[tokenizer_pb2.TokenizerSubmitResponse]:
        async for _ in request_iterator:
            yield tokenizer_pb2.TokenizerSubmitResponse()
            raise QueueFullError("enough")


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    server = RpcServer(NAME, f"unix:{tmp_path}/server.sock")
    server.add(tokenizer_pb2_grpc.add_TokenizerServicer_to_server, Failing())  # type: ignore[abstract]  # the rest is unused
    await server.start()
    await server.set_serving(True)
    yield server.address
    await server.stop(0)


@pytest.fixture
async def channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(address) as channel:
        yield channel


async def failure_of(channel: grpc.aio.Channel, text: str) -> PandoError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await tokenizer_pb2_grpc.TokenizerStub(channel).Tokenize(tokenizer_pb2.TokenizeRequest(text=text), timeout=60)
    return to_error(raised.value)


async def test_our_errors_arrive_whole(channel: grpc.aio.Channel) -> None:
    failure = (await failure_of(channel, "expected")).to_failure()
    assert failure == QueueFullError("full", param="text", retry_after_ms=1500).to_failure()


async def test_defects_arrive_without_their_details(channel: grpc.aio.Channel) -> None:
    failure = (await failure_of(channel, "defect")).to_failure()
    assert failure.code is ErrorCode.INTERNAL
    assert "secret" not in failure.message


async def test_an_error_in_a_stream_ends_it_with_our_status(channel: grpc.aio.Channel) -> None:
    call = tokenizer_pb2_grpc.TokenizerStub(channel).Submit(timeout=60)
    await call.write(tokenizer_pb2.TokenizerSubmitRequest())
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in call:
            pass
    assert to_error(raised.value).code is ErrorCode.QUEUE_FULL


async def test_an_absent_peer_is_unavailable(tmp_path: Path) -> None:
    async with open_channel(f"unix:{tmp_path}/nobody.sock") as channel:
        error = await failure_of(channel, "expected")
    assert error.code is ErrorCode.UNAVAILABLE
    assert error.retryable


async def test_health_distinguishes_alive_from_serving(tmp_path: Path) -> None:
    server = RpcServer(NAME, f"unix:{tmp_path}/health.sock")
    await server.start()
    async with open_channel(server.address) as channel:
        assert await is_serving(channel, "")
        assert not await is_serving(channel, NAME)
        await server.set_serving(True)
        assert await is_serving(channel, NAME)
        assert not await is_serving(channel, "pando.v1.Unknown")
        await server.stop(0)
        assert not await is_serving(channel, NAME)


async def test_reflection_lists_the_service(channel: grpc.aio.Channel) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]  # stubs know no aio
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    answer = await call.read()
    assert NAME in {service.name for service in answer.list_services_response.service}


async def test_an_address_in_use_is_a_clear_error() -> None:
    server = RpcServer(NAME, "127.0.0.1:0", Security(plaintext=True))
    await server.start()
    with pytest.raises(ConfigurationError, match="cannot listen"):
        await RpcServer(NAME, f"127.0.0.1:{server.port}", Security(plaintext=True)).start()
    await server.stop(0)


async def test_a_socket_left_by_a_killed_process_is_no_obstacle(tmp_path: Path) -> None:
    first = RpcServer(NAME, f"unix:{tmp_path}/same.sock")
    await first.start()
    second = RpcServer(NAME, f"unix:{tmp_path}/same.sock")
    await second.start()
    async with open_channel(second.address) as channel:
        assert await is_serving(channel, "")
    await first.stop(0)
    await second.stop(0)

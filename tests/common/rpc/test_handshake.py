"""Services state their protocol, and work with those of the release before and after theirs only."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from common.metrics import BUILD_INFO
from common.rpc import handshake, interceptors, stream
from common.rpc.channel import open_channel
from common.rpc.handshake import FIRST_PROTOCOL, PROTOCOL, Build, client_build, own_build, refusal
from common.rpc.server import RpcServer
from common.rpc.stream import wait_until_accepted
from common.runtime import run_service
from common.settings import Settings
from common.version import version
from protos.gen.pando.v1 import detokenizer_pb2, detokenizer_pb2_grpc, operations_pb2, operations_pb2_grpc
from tests.fakes.detokenizer_service import RecordingDetokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path


class SilentDetokenizer(RecordingDetokenizer):
    """Accepts subscriptions, and sends nothing."""

    async def Subscribe(
        self, request: detokenizer_pb2.SubscribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[detokenizer_pb2.SubscribeResponse]:
        await asyncio.Event().wait()
        yield detokenizer_pb2.SubscribeResponse()

    async def FindUnknown(
        self, request: detokenizer_pb2.FindUnknownRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> detokenizer_pb2.FindUnknownResponse:
        return detokenizer_pb2.FindUnknownResponse()


@pytest.mark.parametrize("own", range(1, 6))
@pytest.mark.parametrize("peer", range(1, 6))
def test_neighbouring_protocols_work_together_and_others_do_not(own: int, peer: int) -> None:
    reason = refusal(Build(own, "1.0"), Build(peer, "2.0"))
    assert (reason is None) == (abs(own - peer) <= 1)
    if reason is not None:
        assert reason.startswith(f"the server has protocol {own} (version 1.0) and the client protocol {peer} (")
        assert reason.endswith("upgrade the server" if own < peer else "upgrade the client")


def test_the_first_release_with_a_handshake_works_with_the_one_before() -> None:
    assert FIRST_PROTOCOL + 1 == PROTOCOL
    assert client_build({}) == client_build({"user-agent": "grpc-python/1.76.0"}) == Build(FIRST_PROTOCOL)
    assert client_build({"user-agent": f"{Build(7, '3.1').user_agent} grpc-python-asyncio/1.76.0"}) == Build(7, "3.1")


async def refused(address: str, tell: Callable[[grpc.aio.Channel], Awaitable[None]]) -> str | None:
    """Return why a server refuses a call; None if it accepts it."""
    async with open_channel(address) as channel:
        try:
            await tell(channel)
        except grpc.aio.AioRpcError as error:
            return str(error.details()) if error.code() is grpc.StatusCode.UNIMPLEMENTED else error.code().name
    return None


async def subscribe(channel: grpc.aio.Channel) -> None:
    stub = detokenizer_pb2_grpc.DetokenizerStub(channel)
    await wait_until_accepted(stub.Subscribe(detokenizer_pb2.SubscribeRequest(subscriber_id="x")))


async def set_level(channel: grpc.aio.Channel) -> None:
    stub = operations_pb2_grpc.OperationsStub(channel)
    await stub.SetLogLevel(operations_pb2.SetLogLevelRequest(level=operations_pb2.LOG_LEVEL_WARNING))


@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL, PROTOCOL + 1, PROTOCOL + 2])
@pytest.mark.parametrize("call", [subscribe, set_level])
async def test_a_server_refuses_streams_and_calls_of_a_client_that_is_too_old(
    protocol: int, call: Callable[[grpc.aio.Channel], Awaitable[None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interceptors, "own_build", lambda: Build(protocol, "9.9"))
    server = RpcServer("pando.v1.Detokenizer", f"unix:{tmp_path}/server.sock")
    server.add(detokenizer_pb2_grpc.add_DetokenizerServicer_to_server, SilentDetokenizer())
    await server.start()
    try:
        assert await refused(server.address, call) == refusal(Build(protocol, "9.9"), own_build())
    finally:
        await server.stop(0)


@pytest.mark.parametrize("stated", [(), Build(PROTOCOL + 1, "9.9").metadata, Build(PROTOCOL + 2, "9.9").metadata])
async def test_a_client_refuses_the_stream_of_a_server_that_is_too_new(
    stated: tuple[tuple[str, str], ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's own check is disabled: servers of before the handshake have none, and state nothing."""

    async def accept(context: grpc.aio.ServicerContext[object, object]) -> None:
        await context.send_initial_metadata(((stream.ACCEPTED_KEY, "1"), *stated))

    monkeypatch.setattr(interceptors, "accept_stream", accept)
    server = RpcServer("pando.v1.Detokenizer", f"unix:{tmp_path}/server.sock")
    server.add(detokenizer_pb2_grpc.add_DetokenizerServicer_to_server, SilentDetokenizer())
    await server.start()
    try:
        reason = await refused(server.address, subscribe)
    finally:
        await server.stop(0)
    protocol = int(dict(stated).get(handshake.PROTOCOL_KEY, FIRST_PROTOCOL))
    assert reason == refusal(Build(protocol, "9.9"), own_build())


def test_the_protocol_of_a_process_can_be_set_for_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(handshake.PROTOCOL_VARIABLE, "7")
    assert handshake.own_build.__wrapped__() == Build(7, version())


def test_every_service_exports_its_build() -> None:
    """Each of them runs by `run_service`."""

    async def main(_: asyncio.Event) -> None:
        return

    run_service("test", Settings(), None, main)
    [sample] = [sample for metric in BUILD_INFO.collect() for sample in metric.samples]
    assert (sample.labels, sample.value) == ({"version": version(), "protocol": str(PROTOCOL)}, 1.0)

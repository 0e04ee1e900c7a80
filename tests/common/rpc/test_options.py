from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio

from common.rpc.options import CHANNEL_OPTIONS, SERVER_OPTIONS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from google.protobuf.message import Message

FASTER = 100
# The fourth ping that comes too soon ends the connection; clients send no more than one a second.
PATIENCE_S = 5.0


def hurried(options: Sequence[tuple[str, int | str]]) -> list[tuple[str, int | str]]:
    """Return the same options with shorter intervals, but as much patience with a busy peer."""
    patience = {"timeout", "reconnect"}
    return [
        (name, int(value) // FASTER if name.endswith("_ms") and not patience & set(name.split("_")) else value)
        for name, value in options
    ]


@asynccontextmanager
async def watching(
    address: str,
) -> AsyncIterator[grpc.aio.UnaryStreamCall[Message, health_pb2.HealthCheckResponse]]:
    """A stream on which nothing is said after its first message."""
    server = grpc.aio.server(options=hurried(SERVER_OPTIONS))
    health_pb2_grpc.add_HealthServicer_to_server(aio.HealthServicer(), server)
    server.add_insecure_port(address)
    await server.start()
    async with grpc.aio.insecure_channel(address, options=hurried(CHANNEL_OPTIONS)) as channel:
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        yield watch(health_pb2.HealthCheckRequest(service=""))
    await server.stop(0)


async def test_a_silent_stream_outlives_the_pings_that_keep_it_alive(tmp_path: Path) -> None:
    async with watching(f"unix:{tmp_path}/silent.sock") as stream:
        await stream.read()
        reading = asyncio.ensure_future(stream.read())
        done, _ = await asyncio.wait([reading], timeout=PATIENCE_S)
        assert not done, stream
        stream.cancel()
        await asyncio.wait([reading])

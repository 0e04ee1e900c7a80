"""The client side of gRPC connections: channels, and health checks of peers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.rpc.options import CHANNEL_OPTIONS
from common.rpc.renewing_channel import RenewingChannel
from common.rpc.security import UNIX_ONLY

if TYPE_CHECKING:
    from common.rpc.security import Pem, Security


def open_channel(address: str, security: Security = UNIX_ONLY, certified_as: str | None = None) -> grpc.aio.Channel:
    """Open a channel to the service at host:port or unix:path.

    `certified_as` is the name that the service's certificate must have, if it is not the address's host.

    Raises:
        ConfigurationError: the address is TCP, and `security` does not allow TCP.
    """
    if not security.needs_tls(address):
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)

    options = [*CHANNEL_OPTIONS, *([("grpc.ssl_target_name_override", certified_as)] if certified_as else [])]

    def connect(pem: Pem) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, security.channel_credentials(pem), options=options)

    return RenewingChannel(security.load, connect)


async def is_serving(channel: grpc.aio.Channel, service: str, timeout_s: float = 1.0) -> bool:
    """Whether the peer's health service reports `service` (full name, or "" for the process) as serving."""
    stub: Any = health_pb2_grpc.HealthStub(channel)  # Any: its type stubs lack the methods
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

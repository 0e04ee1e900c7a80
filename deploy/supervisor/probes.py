"""How the supervisor learns that a service is alive and that the deployment would serve a request."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.rpc.options import CHANNEL_OPTIONS


class Probes:
    """Asks services for their health.

    The blocking gRPC client in threads, not `grpc.aio`: the supervisor also runs in a thread of tests and benchmarks,
    and all aio objects of a process must live on one event loop.
    """

    def __init__(self, timeout_s: float = 2.0) -> None:
        """Create probes that take a service that does not answer in `timeout_s` for not healthy."""
        self._timeout_s = timeout_s

    async def is_alive(self, address: str) -> bool:
        """Return whether the process at `address` (gRPC target or HTTP base URL) answers at all."""
        if address.startswith(("http://", "https://")):
            return await self._answers(f"{address}/health")
        return await asyncio.to_thread(self._check, address)

    async def is_ready(self, url: str) -> bool:
        """Return whether the gateway at `url` says that requests for all its models would be served now."""
        answer = await self._ask(f"{url}/ready")
        try:
            return answer is not None and answer.json().get("status") == "ready"
        except (ValueError, AttributeError):
            return False

    async def _answers(self, url: str) -> bool:
        answer = await self._ask(url)
        return answer is not None and answer.status_code == httpx.codes.OK

    async def _ask(self, url: str) -> httpx.Response | None:
        try:
            # A new connection each time: what is asked is whether one can be made. Proxies have no part in it.
            # Nor has the certificate: it need not name this address, and nothing is told.
            async with httpx.AsyncClient(timeout=self._timeout_s, trust_env=False, verify=False) as client:
                return await client.get(url)
        except httpx.HTTPError:
            return None

    def _check(self, address: str) -> bool:
        with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # its stubs leave the methods out
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=self._timeout_s)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

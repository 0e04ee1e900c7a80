"""Health checks by the supervisor: whether a service is alive, and whether the deployment can serve a request."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.rpc.options import CHANNEL_OPTIONS


class Probes:
    """Checks the health of services; a service that does not answer within `timeout_s` counts as unhealthy.

    It uses the blocking gRPC client in threads, not `grpc.aio`: the supervisor also runs in a thread of tests and
    benchmarks, and all aio objects of a process must belong to one event loop.
    """

    def __init__(self, timeout_s: float = 2.0) -> None:
        self._timeout_s = timeout_s

    async def is_alive(self, address: str) -> bool:
        """Whether the process at `address` (gRPC target or HTTP base URL) answers at all."""
        if address.startswith(("http://", "https://")):
            return await self._answers(f"{address}/health")
        return await asyncio.to_thread(self._check, address)

    async def is_ready(self, url: str) -> bool:
        """Whether the gateway at `url` reports that it can serve requests for all its models now."""
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
            # A new connection each time, because the check is whether one can be opened; no proxies. The certificate is
            # not verified: it need not name this address, and nothing confidential is sent.
            async with httpx.AsyncClient(timeout=self._timeout_s, trust_env=False, verify=False) as client:
                return await client.get(url)
        except httpx.HTTPError:
            return None

    def _check(self, address: str) -> bool:
        with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # Any: its type stubs lack the methods
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=self._timeout_s)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

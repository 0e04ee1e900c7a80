"""What containers are asked about themselves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from common.rpc.server import RpcServer
from common.settings import GatewaySettings, RpcSettings, SchedulerSettings, Settings, TlsSettings
from deploy.health import is_healthy, local
from gateway.app import create_probe_app
from gateway.server.http_server import ProbeServer
from tests.gateway.support import gateway_saying

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("listening", "reached"),
    [
        ("0.0.0.0:50052", "127.0.0.1:50052"),
        ("[::]:50052", "[::1]:50052"),
        ("10.0.0.1:50052", "10.0.0.1:50052"),
        ("unix:/run/pando/scheduler.sock", "unix:/run/pando/scheduler.sock"),
    ],
)
def test_a_server_on_all_interfaces_is_reached_on_the_loopback(listening: str, reached: str) -> None:
    assert local(listening) == reached


async def test_a_service_is_healthy_once_it_serves(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    settings = Settings(scheduler=SchedulerSettings(address=address))
    server = RpcServer("pando.v1.Scheduler", address)
    await server.start()
    try:
        assert not await is_healthy(settings, "scheduler")
        await server.set_serving(True)
        assert await is_healthy(settings, "scheduler")
    finally:
        await server.stop(0)


async def test_an_unreachable_service_is_not_healthy(tmp_path: Path) -> None:
    # At an address of its own: channels of one process share a failed connection's wait before the next attempt.
    settings = Settings(scheduler=SchedulerSettings(address=f"unix:{tmp_path}/away.sock"))
    assert not await is_healthy(settings, "scheduler")


async def test_a_gateway_that_requires_certificates_is_checked_at_its_probe_port(tmp_path: Path) -> None:
    gateway = gateway_saying("x")
    probes = ProbeServer(create_probe_app(gateway.context), "127.0.0.1", 0)
    settings = Settings(
        gateway=GatewaySettings(port=1, tls=TlsSettings(client_authority=tmp_path / "ca.crt")),
        rpc=RpcSettings(probe_port=probes.port),
    )
    running = asyncio.create_task(probes.run())
    try:
        assert await is_healthy(settings, "gateway")
        gateway.readiness.lacking = ["tokenizer: not connected"]
        assert not await is_healthy(settings, "gateway")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_an_unreachable_gateway_is_not_healthy() -> None:
    assert not await is_healthy(Settings(gateway=GatewaySettings(port=1)), "gateway")

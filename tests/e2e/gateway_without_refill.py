"""`python -m gateway` with limits whose clock stands still, so that a minute's budget is a number and not a rate.

Its state server may take as long to answer as a busy machine lets it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

from prometheus_client import REGISTRY

from common.rpc.security import read_security
from common.runtime import run_service
from common.settings import load_settings
from gateway.assembly import Gateway

if TYPE_CHECKING:
    import asyncio


def main() -> None:
    settings = load_settings("gateway_without_refill", "A gateway for tests.")

    async def serve(stopping: asyncio.Event) -> None:
        security = read_security(settings.rpc)
        gateway = Gateway(settings, REGISTRY, security, limits_clock=lambda: 1.0)
        await gateway.run(stopping)

    with patch("gateway.state.state.TIMEOUT_S", 30.0):
        run_service("gateway", settings, settings.gateway.metrics_port, serve)


if __name__ == "__main__":
    main()

"""`python -m gateway`: the HTTP front end as a process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import REGISTRY

from common.rpc.security import read_security
from common.runtime import collect_garbage_rarely, run_service
from common.settings import load_settings
from gateway.assembly import Gateway
from gateway.server.http_server import allow_many_connections

if TYPE_CHECKING:
    import asyncio


def main() -> None:
    """Run the gateway until the process receives a termination signal."""
    settings = load_settings("python -m gateway", "OpenAI-compatible HTTP front end of Pando.")
    allow_many_connections()

    async def serve(stopping: asyncio.Event) -> None:
        security = read_security(settings.rpc)
        await Gateway(settings, REGISTRY, security).run(stopping)

    collect_garbage_rarely()
    run_service("gateway", settings, settings.gateway.metrics_port, serve)


if __name__ == "__main__":
    main()

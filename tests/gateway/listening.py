"""A gateway that really listens, for clients that speak HTTP."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from gateway.server.http_server import HttpServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gateway.server.http_server import HttpsFiles
    from tests.gateway.support import FakedGateway


@asynccontextmanager
async def listening(gateway: FakedGateway, drain_s: float = 5.0, https: HttpsFiles | None = None) -> AsyncIterator[int]:
    """Serve `gateway` on a free port of the loopback interface, and yield the port."""
    server = HttpServer(gateway.app, "127.0.0.1", 0, https)
    stopping = asyncio.Event()
    serving = asyncio.create_task(server.serve(stopping, gateway.generations, drain_s))
    try:
        yield server.port
    finally:
        stopping.set()
        await serving

"""Health and readiness over plain HTTP on a separate port, for probes without a client certificate."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from gateway.endpoints import health as operations
from gateway.server.http_server import QuietServer, listen

if TYPE_CHECKING:
    from gateway.endpoints.context import Context


class ProbeServer:
    """Serves only the gateway's endpoints that need no credentials."""

    def __init__(self, context: Context, host: str, port: int) -> None:
        """Listen on `host` and `port`; 0 picks a free port.

        Raises:
            ConfigurationError: the address is in use or cannot be bound.
        """
        self._socket = listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        app = FastAPI(openapi_url=None)
        app.include_router(operations.create_router(context))
        self._server = QuietServer(uvicorn.Config(app, ws="none", lifespan="off", access_log=False, log_config=None))

    async def run(self) -> None:
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        try:
            await asyncio.shield(serving)
        finally:
            self._server.should_exit = True
            await serving

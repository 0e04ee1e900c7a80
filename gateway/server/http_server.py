"""The HTTP server and its shutdown: new requests are refused, open ones finish, then the server stops."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import TYPE_CHECKING

import uvicorn

from common.errors import ConfigurationError
from common.logs import get_logger
from gateway.server.connections import ImpatientProtocol, notice_dead_peers
from gateway.server.https import keep_renewing

if TYPE_CHECKING:
    from collections.abc import Generator

    from fastapi import FastAPI

    from gateway.generation.generations import Generations
    from gateway.server.https import HttpsFiles

BACKLOG = 4096
KEEP_ALIVE_S = 75
# Time after draining for responses that lack only their last bytes.
GRACE_S = 2


class HttpServer:
    """Serves an application over HTTP or HTTPS until a stop event is set."""

    def __init__(self, app: FastAPI, host: str, port: int, https: HttpsFiles | None = None) -> None:
        """Listen on `host` and `port`; 0 picks a free port. Connections wait in the backlog until `serve` runs.

        With `https`, the port accepts only TLS.

        Raises:
            ConfigurationError: the address is in use or cannot be bound.
        """
        self._socket = listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._https = https
        self._server = QuietServer(
            uvicorn.Config(
                app,
                ssl_certfile=https.certificate if https else None,
                ssl_keyfile=https.key if https else None,
                ssl_ca_certs=https.clients if https else None,
                ssl_cert_reqs=ssl.CERT_REQUIRED if https and https.clients else ssl.CERT_NONE,
                http=ImpatientProtocol,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                # Only a direct peer is trusted to name its user; uvicorn would replace the peer's address by
                # X-Forwarded-For.
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
                backlog=BACKLOG,
            )
        )
        self._log = get_logger("server")

    async def serve(self, stopping: asyncio.Event, generations: Generations, drain_s: float) -> None:
        """Serve until `stopping` is set, then let open requests finish for up to `drain_s` seconds.

        Meanwhile, connections are still accepted and answered with 503, so that a load balancer can choose another
        server.
        """
        self._log.info("server.listening", port=self.port)
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        stop = asyncio.create_task(stopping.wait())
        renewing = asyncio.create_task(self._renew())
        try:
            await asyncio.wait((serving, stop), return_when=asyncio.FIRST_COMPLETED)
            await generations.drain(drain_s)
        finally:
            stop.cancel()
            renewing.cancel()
            self._server.should_exit = True
            await serving

    async def _renew(self) -> None:
        if self._https is None:
            return
        config = self._server.config
        if not config.loaded:
            config.load()
        assert config.ssl is not None, "made of the files that it was given"
        await keep_renewing(self._https, config.ssl)


class QuietServer(uvicorn.Server):
    """Leaves signals to `common.runtime`, which translates them into the `stopping` event."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 picks a free port.

    Raises:
        ConfigurationError: the address is in use or cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigurationError(f"the gateway cannot listen on {host}:{port}: {error}") from error
    notice_dead_peers(listening)
    return listening

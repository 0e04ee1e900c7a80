"""The HTTP server, and how it ends: new requests are refused, the open ones finish, then it goes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import TYPE_CHECKING

import uvicorn

from common.errors import ConfigurationError
from common.logs import get_logger
from gateway.connections import ImpatientProtocol, notice_dead_peers
from gateway.https import keep_renewing

if TYPE_CHECKING:
    from collections.abc import Generator

    from fastapi import FastAPI

    from gateway.generations import Generations
    from gateway.https import HttpsFiles

BACKLOG = 4096
KEEP_ALIVE_S = 75
# After draining, for responses that lack only their last bytes.
GRACE_S = 2


class HttpServer:
    """Serves an application until told to stop."""

    def __init__(self, app: FastAPI, host: str, port: int, https: HttpsFiles | None = None) -> None:
        """Listen on `host` and `port`; 0 picks a free one. Connections wait until `serve` takes them.

        With `https`, only TLS is spoken.

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
                # Identity trusts the direct peer only; uvicorn would replace its address by X-Forwarded-For.
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
                backlog=BACKLOG,
            )
        )
        self._log = get_logger("server")

    async def serve(self, stopping: asyncio.Event, generations: Generations, drain_s: float) -> None:
        """Serve until `stopping` is set, then let open requests finish for up to `drain_s` seconds.

        While they do, connections are still taken and told 503, so that a load balancer can look elsewhere.
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
    """Leaves signals to `common.runtime`, which turns them into the `stopping` event."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture none."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that takes connections; 0 picks a free port.

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

"""The HTTP and HTTPS server: its shutdown, its certificates, and its limits on slow, silent and dead connections.

At shutdown, new requests are refused, open ones finish, then the server stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from common.errors import ConfigurationError
from common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from fastapi import FastAPI

    from common.settings import TlsSettings

BACKLOG = 4096
KEEP_ALIVE_S = 75
# Time after draining for responses that lack only their last bytes.
GRACE_S = 2
# Limits on the time and the size of a request's line and headers.
HEADER_S = 30.0
MAX_HEADER_BYTES = 128 * 1024
# A peer that vanished is detected after about IDLE + COUNT * INTERVAL seconds of silence, or when sent data stays
# unacknowledged for UNACKNOWLEDGED_MS.
IDLE_S, INTERVAL_S, COUNT = 30, 10, 3
UNACKNOWLEDGED_MS = 60_000
# More connections than one process can serve.
MAX_FILES = 65_536
WATCH_INTERVAL_S = 5.0


class OpenRequests(Protocol):
    """The requests that are being served."""

    async def drain(self, limit_s: float) -> None:
        """Refuse new requests, wait up to `limit_s` for the open ones to end, then fail the rest."""


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

    async def serve(self, stopping: asyncio.Event, requests: OpenRequests, drain_s: float) -> None:
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
            await requests.drain(drain_s)
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


class ProbeServer:
    """Serves an application over plain HTTP on a separate port: for probes, which have no client certificate."""

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        """Listen on `host` and `port`; 0 picks a free port.

        Raises:
            ConfigurationError: the address is in use or cannot be bound.
        """
        self._socket = listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._server = QuietServer(uvicorn.Config(app, ws="none", lifespan="off", access_log=False, log_config=None))

    async def run(self) -> None:
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        try:
            await asyncio.shield(serving)
        finally:
            self._server.should_exit = True
            await serving


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


class ImpatientProtocol(HttpToolsProtocol):
    """Closes connections whose request headers are incomplete after HEADER_S or larger than MAX_HEADER_BYTES."""

    _deadline: asyncio.TimerHandle | None = None
    _header_bytes = 0
    _is_in_headers = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the base has it
        super().connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        """Process `data`; close the connection if the headers are too large."""
        if self._is_in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES + len(data):
                self.transport.close()
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_headers()

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        self._stop_waiting()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        self._stop_waiting()
        self._is_in_headers, self._header_bytes = True, 0
        self._deadline = self.loop.call_later(HEADER_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def allow_many_connections() -> int:
    """Raise this process's limit on open files, of which each connection is one, and return the limit then in force.

    Shells often set it to 1,024; the new limit is the hard limit or MAX_FILES, whichever is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if 0 <= soft < allowed:
        # Some systems report a hard limit that they do not grant.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def notice_dead_peers(listening: socket.socket) -> None:
    """Set options on `listening` so that the kernel closes accepted connections whose peer is gone."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Accepted connections inherit these options, on systems that have them.
    options = {
        "TCP_KEEPIDLE": IDLE_S,
        "TCP_KEEPINTVL": INTERVAL_S,
        "TCP_KEEPCNT": COUNT,
        "TCP_USER_TIMEOUT": UNACKNOWLEDGED_MS,
    }
    for name, value in options.items():
        option = getattr(socket, name, None)
        if option is not None:
            listening.setsockopt(socket.IPPROTO_TCP, option, value)


@dataclass(frozen=True, slots=True)
class HttpsFiles:
    """Paths of the certificate, its key and, if client certificates are required, the authorities that sign them."""

    certificate: Path
    key: Path
    clients: Path | None = None

    def stamps(self) -> tuple[int, ...]:
        """Return the files' modification times in nanoseconds; symbolic links are followed.

        Raises:
            OSError: a file is missing.
        """
        return tuple(path.stat().st_mtime_ns for path in (self.certificate, self.key, self.clients) if path)

    def load_into(self, context: ssl.SSLContext) -> None:
        """Make `context` use the certificate from the next handshake on, and require client certificates if configured.

        Authorities are added to those that `context` has: a removed one stays valid until the next start.

        Raises:
            OSError: a file cannot be read, or certificate and key do not match (`ssl.SSLError`).
        """
        if self.clients is not None:
            context.load_verify_locations(self.clients)
            context.verify_mode = ssl.CERT_REQUIRED
        # A context that loaded a certificate without its key fails all handshakes: test the pair in another context
        # first.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
        context.load_cert_chain(self.certificate, self.key)


def https_files(settings: TlsSettings) -> HttpsFiles | None:
    """Return the files that the settings name; None for plain HTTP.

    Raises:
        ConfigurationError: only one is named, or they are not a certificate and its key.
    """
    if settings.certificate is None and settings.key is None:
        if settings.client_authority is not None:
            raise ConfigurationError(
                "gateway.tls.client_authority needs gateway.tls.certificate: HTTP has no client certificates"
            )
        return None
    if settings.certificate is None or settings.key is None:
        raise ConfigurationError("gateway.tls.certificate and gateway.tls.key belong together")
    files = HttpsFiles(settings.certificate, settings.key, settings.client_authority)
    try:
        files.load_into(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))
    except OSError as error:
        raise ConfigurationError(f"gateway.tls.certificate {settings.certificate}: {error}") from error
    return files


async def keep_renewing(files: HttpsFiles, context: ssl.SSLContext, interval_s: float = WATCH_INTERVAL_S) -> NoReturn:
    """Reload the files into `context` whenever they change; unusable files are tried again at the next interval."""
    log = get_logger("https")
    loaded = files.stamps()
    while True:
        await asyncio.sleep(interval_s)
        try:
            stamps = files.stamps()
            if stamps != loaded:
                files.load_into(context)
                loaded = stamps
                log.info("https.certificate_renewed", path=str(files.certificate))
        except OSError as error:
            log.warning("https.certificate_unusable", path=str(files.certificate), reason=str(error))

"""Connections whose other end is slow, silent or gone."""

from __future__ import annotations

import contextlib
import resource
import socket
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    import asyncio

# A client gets so long to send the line and the headers of a request, and may not send more than this for them.
HEADER_S = 30.0
MAX_HEADER_BYTES = 128 * 1024
# An end that went away without a word is noticed after silence of about IDLE + COUNT * INTERVAL, or when what was sent
# is not acknowledged for so long.
IDLE_S, INTERVAL_S, COUNT = 30, 10, 3
UNACKNOWLEDGED_MS = 60_000
# More than anybody serves from one process.
MAX_FILES = 65_536


class ImpatientProtocol(HttpToolsProtocol):
    """Closes connections that do not come to the end of their headers."""

    _deadline: asyncio.TimerHandle | None = None
    _header_bytes = 0
    _is_in_headers = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the base has it
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        """Take bytes; too many of headers end the connection."""
        if self._is_in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES + len(data):
                self.transport.close()
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Begin to wait for the end of the headers."""
        super().on_message_begin()
        self._expect_headers()

    def on_headers_complete(self) -> None:
        """End the wait."""
        self._is_in_headers = False
        self._stop_waiting()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait."""
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
    """Let this process open as many files as it may, since shells allow 1,024; return how many. A connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if 0 <= soft < allowed:
        # Some systems name a limit that they do not grant.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def notice_dead_peers(listening: socket.socket) -> None:
    """Have all connections that `listening` accepts end by themselves if their other end is gone."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Connections inherit these where they exist.
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

"""Limits on slow, silent and dead connections."""

from __future__ import annotations

import contextlib
import resource
import socket
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    import asyncio

# Limits on the time and the size of a request's line and headers.
HEADER_S = 30.0
MAX_HEADER_BYTES = 128 * 1024
# A peer that vanished is detected after about IDLE + COUNT * INTERVAL seconds of silence, or when sent data stays
# unacknowledged for UNACKNOWLEDGED_MS.
IDLE_S, INTERVAL_S, COUNT = 30, 10, 3
UNACKNOWLEDGED_MS = 60_000
# More connections than one process can serve.
MAX_FILES = 65_536


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

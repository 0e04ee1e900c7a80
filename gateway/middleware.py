"""What happens around every request: its id, its metrics, its log line, and an answer even to our own defects."""

from __future__ import annotations

import re
import time
import uuid
from typing import TYPE_CHECKING

import structlog

from common.logs import get_logger
from gateway.errors import internal_error_response

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from gateway.metrics import GatewayMetrics

REQUEST_ID_HEADER = b"x-request-id"
SANE_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
# Asked every few seconds by whoever watches over this process.
QUIET_ROUTES = frozenset({"/health", "/ready", "/metrics"})
# What metrics and logs show if the client went away before there was a status.
CLIENT_GONE_STATUS = 499
# Where in the scope of a request stand headers that its answer shall have, whatever becomes of it.
EXTRA_HEADERS = "pando.headers"
# Where stands whose request it is, once that is known; and why it was refused, if it was.
TENANT = "pando.tenant"
REFUSAL = "pando.refusal"


def add_headers(scope: Scope, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Have the answer to a request show `headers`, in the place of earlier ones of the same names."""
    extra: list[tuple[bytes, bytes]] = scope[EXTRA_HEADERS]
    names = {name for name, _ in headers}
    extra[:] = [*(header for header in extra if header[0] not in names), *headers]


class RequestContext:
    """Outermost layer of the application."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        """Surround `app`."""
        self._app = app
        self._metrics = metrics
        self._log = get_logger("http")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        extra = [(REQUEST_ID_HEADER, request_id)]
        scope[EXTRA_HEADERS] = extra
        exchange = _Exchange(send, extra)
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(http_request_id=request_id.decode())
        started = time.monotonic()
        method = scope["method"]
        if method == "HEAD":
            # What answers GET answers this, too; the server leaves the body out.
            scope = {**scope, "method": "GET"}
        try:
            await self._app(scope, receive, exchange.send)
        except Exception as error:  # noqa: BLE001  (the edge of the request's task: every defect must get an answer)
            self._log.error("http.failed", path=scope["path"], exc_info=error)
            # One that breaks off stays incomplete: the server then closes the connection, so nobody takes it for whole.
            if exchange.status is None:
                await internal_error_response()(scope, receive, exchange.send)
        finally:
            self._note_end(scope, method, exchange, time.monotonic() - started)

    def _note_end(self, scope: Scope, method: str, exchange: _Exchange, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        status = exchange.status or CLIENT_GONE_STATUS
        self._metrics.requests.labels(route, str(status)).inc()
        self._metrics.request_seconds.labels(route).observe(seconds)
        if REFUSAL in scope:
            self._metrics.refuse(scope.get(TENANT), scope[REFUSAL])
        log = self._log.debug if route in QUIET_ROUTES else self._log.info
        log(
            "request.finished",
            method=method,
            path=scope["path"],
            status=status,
            complete=exchange.complete,
            seconds=round(seconds, 4),
        )


class _Exchange:
    """The sending half of one request: adds headers, remembers what was sent."""

    def __init__(self, send: Send, extra: Iterable[tuple[bytes, bytes]]) -> None:
        self.status: int | None = None
        self.complete = False
        self._send = send
        self._extra = extra

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self._extra]}
        elif message["type"] == "http.response.body":
            self.complete = not message.get("more_body", False)
        await self._send(message)


def _request_id(scope: Scope) -> bytes:
    """Return the client's own id, if it can safely go into logs and headers, or a new one."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER and SANE_REQUEST_ID.fullmatch(value):
            return bytes(value)
    return f"req_{uuid.uuid4().hex}".encode()

"""The middleware around every request: request id, trace context, metrics, log event, unhandled exceptions."""

from __future__ import annotations

import re
import secrets
import time
import uuid
from typing import TYPE_CHECKING

import structlog

from common.logs import get_logger
from common.tracing import exemplar_of, samples_new_trace
from common.types import TraceContext
from gateway.server.errors import internal_error_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Mapping, Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from gateway.metrics import GatewayMetrics

REQUEST_ID_HEADER = b"x-request-id"
SANE_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
# Polled every few seconds by orchestrators and monitoring.
QUIET_ROUTES = frozenset({"/health", "/ready", "/metrics", "/console/fleet", "/console/static/{name:path}"})
# Status in metrics and logs if the client disconnected before the response had one.
CLIENT_GONE_STATUS = 499
# Key in a request's ASGI scope: headers that are added to its response, regardless of its outcome.
EXTRA_HEADERS = "pando.headers"
# Key in the scope: the connection's `send`, below all layers that look only at a response's start and end.
PIECES = "pando.pieces"
# Keys in the scope: the tenant, once known, and the cause of a refusal.
TENANT = "pando.tenant"
REFUSAL = "pando.refusal"
# Key in the scope: the trace of a request that is computed.
TRACE = "pando.trace"
# Key in the scope of a batch line's request: the caller in whose name it runs.
BATCH_CALLER = "pando.batch_caller"
TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
MAX_TRACESTATE_CHARACTERS = 512


def add_headers(scope: Scope, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Add `headers` to the response, replacing earlier ones of the same names."""
    extra: list[tuple[bytes, bytes]] = scope[EXTRA_HEADERS]
    names = {name for name, _ in headers}
    extra[:] = [*(header for header in extra if header[0] not in names), *headers]


def pass_pieces(scope: Scope, send: Send) -> Send:
    """Return a `send` that takes pieces of a body past the layers that have nothing to do with them: one per token."""
    of_pieces: Send = scope[PIECES]

    def either(message: Message) -> Awaitable[None]:
        return (of_pieces if message.get("more_body") else send)(message)

    return either


class RequestContext:
    """Outermost layer of the ASGI application."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics
        self._log = get_logger("http")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        extra = [(REQUEST_ID_HEADER, request_id)]
        scope[EXTRA_HEADERS] = extra
        scope[PIECES] = send
        exchange = _Exchange(send, extra)
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(http_request_id=request_id.decode())
        started = time.monotonic()
        method = scope["method"]
        if method == "HEAD":
            # HEAD is routed like GET; the server omits the body.
            scope = {**scope, "method": "GET"}
        try:
            await self._app(scope, receive, exchange.send)
        except Exception as error:  # noqa: BLE001  (the edge of the request's task: every defect must get an answer)
            self._log.error("http.failed", path=scope["path"], exc_info=error)
            # A response that has started is left incomplete: the server then closes the connection, which shows the
            # client that it is truncated.
            if exchange.status is None:
                await internal_error_response()(scope, receive, exchange.send)
        finally:
            self._note_end(scope, method, exchange, time.monotonic() - started)

    def _note_end(self, scope: Scope, method: str, exchange: _Exchange, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        status = exchange.status or CLIENT_GONE_STATUS
        self._metrics.requests.labels(route, str(status)).inc()
        if BATCH_CALLER not in scope:
            # Lines of batches wait for hours.
            self._metrics.request_seconds.labels(route).observe(seconds, exemplar_of(scope.get(TRACE)))
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
    """The sending half of one request: adds headers and records the status and whether the response was complete."""

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
    """Return the client's request id if it is safe in logs and headers, otherwise a new one."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER and SANE_REQUEST_ID.fullmatch(value):
            return bytes(value)
    return f"req_{uuid.uuid4().hex}".encode()


def begin_trace(scope: Scope, headers: Mapping[str, str]) -> TraceContext:
    """Return the trace context of the request with this scope, which keeps it for the request's metrics."""
    trace = scope[TRACE] = trace_of(headers)
    return trace


def trace_of(headers: Mapping[str, str]) -> TraceContext:
    """Return the trace context of this request's span.

    A valid `traceparent` header names the trace to continue (https://www.w3.org/TR/trace-context/); without one, a new
    trace starts, and a `tracestate` is dropped, as the standard requires.
    """
    match = TRACEPARENT.fullmatch(headers.get("traceparent", "").strip())
    span = _nonzero_hex(8)
    if match is None or not _is_valid(match):
        return TraceContext(f"00-{_nonzero_hex(16)}-{span}-{'01' if samples_new_trace() else '00'}")
    state = headers.get("tracestate", "").strip()
    keep = bool(state) and len(state) <= MAX_TRACESTATE_CHARACTERS and state.isascii() and state.isprintable()
    return TraceContext(f"00-{match[2]}-{span}-{match[4]}", state if keep else None, match[3])


def _is_valid(match: re.Match[str]) -> bool:
    version, trace, parent, _, rest = match.groups()
    if version == "ff" or (version == "00" and rest):
        return False
    return int(trace, 16) != 0 and int(parent, 16) != 0


def _nonzero_hex(size: int) -> str:
    value = secrets.token_hex(size)
    return value if int(value, 16) else _nonzero_hex(size)

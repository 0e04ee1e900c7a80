"""The server interceptor of all calls: check of the caller's role, request id, logging, metrics, rich status."""

from __future__ import annotations

import contextlib
import inspect
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import grpc
import structlog

from common.errors import PandoError, PermissionDeniedError
from common.logs import get_logger
from common.metrics import RPC_REFUSED, RPC_SECONDS, RPC_TOTAL
from common.rpc.handshake import client_build, own_build, refusal
from common.rpc.roles import CALLERS, Role
from common.rpc.status import to_status
from common.rpc.stream import accept_stream

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NO_ROLE = "none"
REQUEST_ID_KEY = "x-request-id"
TRACE_KEYS = ("traceparent", "tracestate")
# Health checks need no role, and would flood logs and metrics.
QUIET_PREFIX = "/grpc.health."
# Reflection and health are the same in all versions.
OWN_PREFIX = "/pando."
MAX_REFUSED_VERSIONS = 100
# Any: the types of requests and responses depend on the method.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
MethodHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Handler = Callable[[Any, Context], Any]
CheckCaller = Callable[[str, Context], None]


def accept_every_caller(method: str, context: Context) -> None:
    """Accept the call: a plaintext connection does not identify its caller."""


class CallerGuard:
    """Accepts calls from certificates with a role that `CALLERS` lists for the method."""

    def __init__(self, server: str, names: Mapping[Role, Iterable[str]]) -> None:
        """Guard the server whose main service is `server`; `names` are the certificate names of each role.

        A name with "://" is a URI, and any other is a DNS name.
        """
        self._callers = CALLERS.get(server, {})
        self._uris: dict[str, set[Role]] = {}
        self._hosts: dict[str, set[Role]] = {}
        for role, of_role in names.items():
            for name in of_role:
                if "://" in name:
                    self._uris.setdefault(name, set()).add(role)
                else:
                    self._hosts.setdefault(name.lower(), set()).add(role)

    def check(self, method: str, context: Context) -> None:
        """Return if the call is allowed.

        Raises:
            PermissionDeniedError: no role of the caller's certificate may call `method`.
        """
        # URIs and DNS names are compared separately, so that a DNS name that looks like a role's URI does not match.
        identity = context.auth_context()
        uris = [name.decode(errors="replace") for name in identity.get("peer_uri", ())]
        hosts = [name.decode(errors="replace") for name in identity.get("peer_dns", ())]
        roles: set[Role] = set()
        for uri in uris:
            roles |= self._uris.get(uri, set())
        for host in hosts:
            roles |= self._hosts.get(host.lower(), set())
        allowed = self._callers.get(method, frozenset())
        if roles & allowed:
            return
        shown = "+".join(sorted(roles)) or NO_ROLE
        RPC_REFUSED.labels(method, shown).inc()
        get_logger("rpc").warning("rpc.refused", method=method, role=shown, names=[*uris, *hosts], peer=context.peer())
        caller = f"the role {shown}" if roles else f"a certificate without a role ({', '.join(uris + hosts)})"
        raise PermissionDeniedError(f"{caller} may not call {method}; allowed: {', '.join(sorted(allowed)) or NO_ROLE}")


class ServerInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler of a server."""

    def __init__(self, check_caller: CheckCaller = accept_every_caller) -> None:
        """Refuse calls for which `check_caller` raises, and those of versions that do not work with this one."""
        self._check_caller = check_caller
        self._refused: set[str] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MethodHandler | None:
        """Return the method's handler, wrapped unless it is a health check."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(QUIET_PREFIX):
            return handler
        caller = client_build(dict(handler_call_details.invocation_metadata or ()))
        reason = refusal(own_build(), caller) if method.startswith(OWN_PREFIX) else None
        if reason is not None:
            self._note_refusal(reason, method)
            return grpc.stream_stream_rpc_method_handler(partial(_refuse, reason))
        return _wrapped(handler, method, self._check_caller)

    def _note_refusal(self, reason: str, method: str) -> None:
        """Log a version that is refused, once: its calls will be repeated."""
        if reason not in self._refused and len(self._refused) < MAX_REFUSED_VERSIONS:
            self._refused.add(reason)
            get_logger("rpc").error("version.refused", method=method, reason=reason)


async def _refuse(reason: str, _requests: object, context: Context) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, reason)


def _wrapped(handler: Any, method: str, check: CheckCaller) -> MethodHandler:
    decode, encode = handler.request_deserializer, handler.response_serializer
    match handler.request_streaming, handler.response_streaming:
        case False, False:
            bracketed = _bracket_unary(handler.unary_unary, method, check)
            return grpc.unary_unary_rpc_method_handler(bracketed, decode, encode)
        case True, False:
            bracketed = _bracket_unary(handler.stream_unary, method, check)
            return grpc.stream_unary_rpc_method_handler(bracketed, decode, encode)
        case False, True:
            streamed = _bracket_stream(handler.unary_stream, method, check)
            return grpc.unary_stream_rpc_method_handler(streamed, decode, encode)
        case _:
            streamed = _bracket_stream(handler.stream_stream, method, check)
            return grpc.stream_stream_rpc_method_handler(streamed, decode, encode)


def _bracket_unary(call: Handler, method: str, check: CheckCaller) -> Handler:
    async def handle(request: Any, context: Context) -> Any:
        async with _Bracket(method, context):
            check(method, context)
            return await call(request, context)

    return handle


def _bracket_stream(call: Handler, method: str, check: CheckCaller) -> Handler:
    async def handle(request: Any, context: Context) -> AsyncIterator[Any]:
        async with _Bracket(method, context):
            check(method, context)
            responses = call(request, context)
            if inspect.isawaitable(responses):  # a handler that uses context.write, and accepts by itself
                await responses
                return
            await accept_stream(context)
            async with contextlib.aclosing(responses):
                async for response in responses:
                    yield response

    return handle


class _Bracket:
    """Context of one call: binds its ids to the log, measures it, and converts our errors into rich statuses."""

    def __init__(self, method: str, context: Context) -> None:
        self._method = method
        self._context = context
        self._started = time.monotonic()
        self._log = get_logger("rpc")

    async def __aenter__(self) -> None:
        metadata = dict(self._context.invocation_metadata() or ())
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(
            request_id=metadata.get(REQUEST_ID_KEY) or uuid.uuid4().hex,
            **{key: metadata[key] for key in TRACE_KEYS if key in metadata},
        )
        self._log.debug("rpc.started", method=self._method)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        status = "OK"
        if error is not None:
            status = "CANCELLED" if not isinstance(error, Exception) else "INTERNAL"
        if isinstance(error, PandoError):
            status = error.code.name
        elif isinstance(error, grpc.aio.AbortError):  # the handler set a status itself
            status = _status_name(self._context.code())
        seconds = time.monotonic() - self._started
        RPC_SECONDS.labels(self._method, status).observe(seconds)
        RPC_TOTAL.labels(self._method, status).inc()
        self._log.debug("rpc.ended", method=self._method, status=status, seconds=round(seconds, 4))
        if isinstance(error, PandoError):
            await self._context.abort_with_status(to_status(error))
        if isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError | grpc.RpcError):
            self._log.error("rpc.failed", method=self._method, exc_info=error)
            await self._context.abort(grpc.StatusCode.INTERNAL, f"internal error in {self._method}")
        return False


def _status_name(code: object) -> str:
    """Return the name of a status that the context holds as a `grpc.StatusCode` or as its number."""
    named = {status.value[0]: status.name for status in grpc.StatusCode}
    return code.name if isinstance(code, grpc.StatusCode) else named.get(code, "UNKNOWN")  # type: ignore[call-overload]  # a number, says grpc

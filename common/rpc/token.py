"""The secret token that services may share: clients send it with every call, servers over TCP require it."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import NoReturn

TOKEN_KEY = "x-pando-token"
# Probes have no token; health answers are not confidential.
FREE_PREFIX = "/grpc.health."

MethodHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def send_token(token: str) -> grpc.CallCredentials:
    """Return credentials that put `token` into the metadata of every call."""

    class Plugin(grpc.AuthMetadataPlugin):
        """Returns without blocking, so that gRPC can call it in its own thread."""

        def __call__(self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback) -> None:
            callback(((TOKEN_KEY, token),), None)

    return grpc.metadata_call_credentials(Plugin())


class TokenGuard(grpc.aio.ServerInterceptor):
    """Refuses calls without the token, except health checks."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MethodHandler | None:
        """Return the method's handler, or a handler that refuses the call."""
        sent = dict(handler_call_details.invocation_metadata or ()).get(TOKEN_KEY, b"")
        if not handler_call_details.method.startswith(FREE_PREFIX) and not hmac.compare_digest(
            sent.encode() if isinstance(sent, str) else sent, self._token
        ):
            return grpc.stream_stream_rpc_method_handler(_refuse)
        return await continuation(handler_call_details)


async def _refuse(_requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"this port requires a token in {TOKEN_KEY}")

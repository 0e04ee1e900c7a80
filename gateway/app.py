"""The ASGI application: endpoints, and the shape of every error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from common.errors import PandoError
from common.types import ErrorCode
from gateway.api import (
    administration,
    chat,
    completions,
    embeddings,
    messages,
    models,
    native,
    operations,
    responses,
    sessions,
    tokenization,
)
from gateway.api.schema import describe
from gateway.body import ClientGoneError
from gateway.errors import HttpError, error_response, http_error_response
from gateway.middleware import CLIENT_GONE_STATUS, REFUSAL, RequestContext, add_headers
from gateway.quotas.quotas import LimitedError
from gateway.schemas.anthropic import MessagesBody
from gateway.schemas.chat import ChatCompletionBody
from gateway.schemas.completions import CompletionBody
from gateway.schemas.embeddings import EmbeddingBody, RerankBody, ScoreBody
from gateway.schemas.native import AbortBody, GenerateBody
from gateway.schemas.responses import ResponseBody
from gateway.schemas.sessions import CloseSessionBody, OpenSessionBody
from gateway.schemas.tokenization import DetokenizeBody, TokenizeChatBody, TokenizeTextBody

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastapi.telemetry import TelemetryConfig

    from gateway.api.context import Context

# Headers that scripts of pages may read, beside those that they may anyway.
SHOWN_TO_PAGES = (
    "retry-after",
    "retry-after-ms",
    "x-request-id",
    "x-should-retry",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)
# What clients of Anthropic's API ask.
ANTHROPIC = "/v1/messages"
# Errors that are refusals, by what metrics call them.
REFUSALS = {
    ErrorCode.QUEUE_FULL: "queue_full",
    ErrorCode.UNAVAILABLE: "unavailable",
    ErrorCode.UNAUTHENTICATED: "unauthenticated",
    ErrorCode.PERMISSION_DENIED: "permission_denied",
}
BODIES = (
    ChatCompletionBody,
    CompletionBody,
    ResponseBody,
    MessagesBody,
    EmbeddingBody,
    ScoreBody,
    RerankBody,
    TokenizeTextBody,
    TokenizeChatBody,
    DetokenizeBody,
    GenerateBody,
    AbortBody,
    OpenSessionBody,
    CloseSessionBody,
)


def create_app(context: Context, cors_origins: Sequence[str] = ()) -> FastAPI:
    """Return the application over `context`, which browsers may call for pages of `cors_origins`."""
    # Its own telemetry would ask for providers at every request; metrics and traces are ours.
    silent: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
    # Its own description would be shown to everybody, and its pages load scripts from elsewhere.
    app = FastAPI(title="Pando", redirect_slashes=False, openapi_url=None, telemetry=silent)
    generating = (chat, completions, responses, messages, native)
    for endpoint in (*generating, sessions, embeddings, models, tokenization, administration, operations):
        # Not by `include_router`, whose routers within a router are searched twice for every request.
        app.router.routes.extend(endpoint.create_router(context).routes)
    app.add_exception_handler(PandoError, _on_pando_error)
    app.add_exception_handler(HttpError, _on_http_error)
    app.add_exception_handler(HTTPException, _on_routing_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    describe(app, context, BODIES)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=SHOWN_TO_PAGES,
        )
    app.add_middleware(RequestContext, metrics=context.metrics)
    return app


async def _on_pando_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PandoError)
    if isinstance(error, LimitedError):
        add_headers(request.scope, error.headers)
    cause = "limit" if isinstance(error, LimitedError) else REFUSALS.get(error.code)
    if cause is not None:
        request.scope[REFUSAL] = cause
    return _shaped(request, error_response(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return _shaped(request, http_error_response(error))


async def _on_routing_error(request: Request, error: Exception) -> Response:
    """Answer for paths and methods that do not exist."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    message = {404: f"Unknown URL: {method} {path}", 405: f"Method {method} is not allowed for {path}."}
    text = message.get(error.status_code, str(error.detail))
    return http_error_response(HttpError(error.status_code, text), error.headers)


async def _on_validation_error(_request: Request, error: Exception) -> Response:
    """Answer for what FastAPI itself rejects, in our shape and with our status."""
    return http_error_response(HttpError(400, str(error)))


def _shaped(request: Request, response: Response) -> Response:
    """Return the answer of an error as its endpoint's clients know it: Anthropic's look for a type."""
    if request.url.path.startswith(ANTHROPIC):
        response.body = b'{"type":"error",' + bytes(response.body)[1:]
        response.headers["content-length"] = str(len(response.body))
    return response


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    """Return something for nobody."""
    return Response(status_code=CLIENT_GONE_STATUS)

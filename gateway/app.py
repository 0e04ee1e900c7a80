"""The ASGI application: routes, middleware and exception handlers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from common.errors import PandoError
from common.types import ErrorCode
from gateway.console import route as console_pages
from gateway.console.console import Console
from gateway.console.self_attack import SelfAttack
from gateway.endpoints import (
    adapters,
    administration,
    batches,
    files,
    health,
    models,
    sleep,
    timelines,
    tokenization,
    usage,
    weights,
)
from gateway.endpoints.chat import route as chat
from gateway.endpoints.classification import route as classification
from gateway.endpoints.classification import tei
from gateway.endpoints.completions import route as completions
from gateway.endpoints.embeddings import route as embeddings
from gateway.endpoints.messages import route as messages
from gateway.endpoints.native import route as native
from gateway.endpoints.responses import route as responses
from gateway.endpoints.routing import ERROR_STYLE, ClientGoneError, body_route
from gateway.endpoints.scoring import route as scoring
from gateway.quotas.quotas import LimitedError
from gateway.server.errors import ERROR_SCHEMA, HttpError, error_response, http_error_response, style_of, styled
from gateway.server.middleware import CLIENT_GONE_STATUS, REFUSAL, RequestContext, add_headers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastapi.telemetry import TelemetryConfig

    from common.settings import ConsoleSettings
    from gateway.endpoints.context import Context

# Response headers that browser scripts may read in addition to the CORS-safelisted ones.
SHOWN_TO_PAGES = (
    "retry-after",
    "retry-after-ms",
    "x-request-id",
    "x-should-retry",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)
# Error codes that count as refusals, with their value of the metric's label `cause`.
REFUSALS = {
    ErrorCode.QUEUE_FULL: "queue_full",
    ErrorCode.UNAVAILABLE: "unavailable",
    ErrorCode.UNAUTHENTICATED: "unauthenticated",
    ErrorCode.PERMISSION_DENIED: "permission_denied",
}
# A response that any endpoint can have, in the OpenAPI description. A model in place of the schema would take FastAPI a
# third of the time to build an application, because it would be compiled twice for each route.
FAILURE: dict[str, Any] = {
    "description": "What was wrong, and what would be right",
    "content": {"application/json": {"schema": ERROR_SCHEMA}},
}


def create_app(context: Context, cors_origins: Sequence[str] = (), console: ConsoleSettings | None = None) -> FastAPI:
    """Build the application over `context`.

    Args:
        context: The objects that endpoints use.
        cors_origins: The origins whose pages may call it from a browser.
        console: Settings of the web console; None: it is not served.
    """
    # FastAPI's own telemetry would look up its providers on every request; Pando has its own metrics and traces.
    silent: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
    # FastAPI's own OpenAPI route needs no credentials, and its documentation pages load scripts from other hosts.
    app = FastAPI(
        title="Pando",
        redirect_slashes=False,
        openapi_url=None,
        telemetry=silent,
        responses={"4XX": FAILURE, 503: FAILURE},
    )
    app.router.route_class = body_route(context.limits.body_bytes, context.room_with_images)
    # All routes are added to one router: FastAPI searches the routes of included routers twice, some 45 µs per request.
    generating = (chat, completions, responses, messages, native)
    pooling = (embeddings, scoring, classification, tei)
    others = (files, batches, models, tokenization, usage, adapters, administration, weights, sleep, timelines, health)
    for endpoint in (*generating, *pooling, *others):
        endpoint.add_routes(app.router, context)
    if console is not None and console.enabled:
        pages = Console(context, SelfAttack(console.attack_report), console.prices)
        console_pages.add_routes(app.router, context, pages)

    @app.get("/openapi.json", include_in_schema=False, dependencies=[Depends(context.caller)])
    def description() -> Response:
        # Not a coroutine, so that FastAPI calls it in a thread: the first description takes a few hundred milliseconds.
        return Response(orjson.dumps(app.openapi()), media_type="application/json")

    app.add_exception_handler(PandoError, _on_pando_error)
    app.add_exception_handler(HttpError, _on_http_error)
    app.add_exception_handler(HTTPException, _on_routing_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
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


def create_probe_app(context: Context) -> FastAPI:
    """Build an application with only the endpoints that need no credentials."""
    app = FastAPI(openapi_url=None)
    health.add_routes(app.router, context)
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
    return _shaped(request, http_error_response(error, error.headers))


async def _on_routing_error(request: Request, error: Exception) -> Response:
    """Handle unknown paths and methods that a path does not support."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    message = {404: f"Unknown URL: {method} {path}", 405: f"Method {method} is not allowed for {path}."}
    text = message.get(error.status_code, str(error.detail))
    return http_error_response(HttpError(error.status_code, text), error.headers)


async def _on_validation_error(_request: Request, error: Exception) -> Response:
    """Return FastAPI's own validation errors in the gateway's error shape, with status 400."""
    return http_error_response(HttpError(400, str(error)))


def _shaped(request: Request, response: Response) -> Response:
    """Adapt an error response to the API whose endpoint it comes from."""
    style = request.scope.get(ERROR_STYLE) or style_of(request.url.path)
    response.body = styled(response.status_code, bytes(response.body), style)
    response.headers["content-length"] = str(len(response.body))
    return response


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    """Return a response that is never delivered, because the connection is closed."""
    return Response(status_code=CLIENT_GONE_STATUS)

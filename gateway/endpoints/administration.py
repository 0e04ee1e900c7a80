"""Endpoints for administration (metrics, cache flush, statistics), aborting requests and model information."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

import orjson
from fastapi import APIRouter, Request, Response

from common.errors import InvalidRequestError, UnavailableError
from common.names import check_name
from common.version import version
from gateway.endpoints.health import readiness
from gateway.endpoints.native.schema import AbortBody
from gateway.endpoints.openapi import documented
from gateway.endpoints.schema import parse
from gateway.identity.caller import identify

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from gateway.endpoints.context import Context

    Endpoint = Callable[[Request], Awaitable[Response]]

T = TypeVar("T")
EXPOSITION_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_router(context: Context) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Return all metrics in the Prometheus text format; at low traffic they reveal a request's token counts."""
        await context.admin(request)
        return Response(context.metrics.exposition(), headers={"content-type": EXPOSITION_TYPE})

    @router.get("/flush_cache", operation_id="flush_cache_by_get")
    @router.post("/flush_cache", operation_id="flush_cache")
    async def flush_cache(request: Request, model: str | None = None) -> Response:
        """Drop cached prefixes that no running request needs, of all models or of one."""
        await context.admin(request)
        chosen = (await context.models.find(model),) if model else context.models.all
        # Every model is flushed, even if another one fails.
        flushed = await asyncio.gather(
            *(backend.administration.flush_cache() for backend in chosen), return_exceptions=True
        )
        pages = sum(_raised(flushed))
        return Response(f"Cache flushed: {pages} pages.\n", media_type="text/plain")

    @router.post("/abort_request", openapi_extra=documented(AbortBody))
    async def abort_request(request: Request) -> Response:
        """Abort a request at any gateway: the caller's own, or any with an administrator's credential."""
        caller = await context.caller(request)
        body = parse(AbortBody, await context.body(request))
        if body.abort_all:
            await context.admin(request)
        elif not body.rid:
            raise InvalidRequestError("'rid' should name a request.", param="rid")
        else:
            check_name("rid", body.rid)
        await context.charge_for_ending(request, identify(caller).subject)
        rid = None if body.abort_all else body.rid
        count = await context.aborts.abort(rid, caller)
        return Response(orjson.dumps({"aborted": count}), media_type="application/json")

    @router.get("/health_generate")
    async def health_generate() -> Response:
        """Report whether a request would be served now, without generating, so that a long prefill is not a failure."""
        state = await readiness(context)
        if not state.serves:
            raise UnavailableError("; ".join(map(str, state.missing)))
        return Response(b'{"status":"ready"}', media_type="application/json")

    for path in ("/get_model_info", "/model_info"):
        router.add_api_route(path, _model_info(context), methods=["GET"])
    for path in ("/get_server_info", "/server_info"):
        router.add_api_route(path, _server_info(context), methods=["GET"])
    return router


def _model_info(context: Context) -> Endpoint:
    async def model_info(request: Request, model: str | None = None) -> Response:
        """Return the model's name and capabilities."""
        await context.caller(request)
        card = await context.models.require(model)
        info = {
            "model_path": card.name,
            "tokenizer_path": card.name,
            "is_generation": not card.is_encoder,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "max_model_len": card.max_context_tokens,
        }
        return Response(orjson.dumps(info), media_type="application/json")

    return model_info


def _server_info(context: Context) -> Endpoint:
    async def server_info(request: Request, model: str | None = None) -> Response:
        """Return the statistics of each scheduler group of a model."""
        await context.admin(request)
        backend = await context.models.find(model)
        card = await backend.served.card()
        info = {
            "version": version(),
            "served_model_name": card.name,
            "model_path": card.name,
            "max_model_len": card.max_context_tokens,
            "open_requests": context.generations.open_requests,
            "internal_states": await backend.administration.states(),
        }
        return Response(orjson.dumps(info), media_type="application/json")

    return server_info


def _raised(results: Iterable[T | BaseException]) -> Iterator[T]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
        yield result

"""Endpoints for administration (metrics, cache flush, statistics), aborting requests and model information."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

import orjson
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import PlainTextResponse

from common.errors import InvalidRequestError, UnavailableError
from common.heads import Task
from common.names import check_name
from common.version import version
from gateway.endpoints.health import readiness
from gateway.endpoints.schema import Schema
from gateway.endpoints.weights import weight_version
from gateway.identity.caller import Caller, identify

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gateway.backends import Backend
    from gateway.endpoints.context import Context

T = TypeVar("T")


class AbortBody(Schema):
    """The exact id of the request to abort, or all."""

    rid: str | None = None
    abort_all: bool | None = None


def add_routes(router: APIRouter, context: Context) -> None:
    """Add the routes."""
    is_caller, is_admin = [Depends(context.caller)], [Depends(context.admin)]

    @router.get("/metrics", dependencies=is_admin, response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Return all metrics in the Prometheus text format; at low traffic they reveal a request's token counts."""
        content, media_type = context.metrics.exposition(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": media_type})

    @router.get("/flush_cache", operation_id="flush_cache_by_get", response_class=PlainTextResponse)
    @router.post("/flush_cache", operation_id="flush_cache", response_class=PlainTextResponse)
    async def flush_cache(model: str | None = None, caller: Caller = Depends(context.admin)) -> Response:
        """Drop cached prefixes that no running request needs, of all models or of one."""
        chosen = (await context.models.find(model),) if model else context.models.all
        async with context.act(caller, "cache.flush", model=model) as results:
            pages = results["freed_pages"] = await _flush(chosen)
        return Response(f"Cache flushed: {pages} pages.\n", media_type="text/plain")

    @router.post("/abort_request")
    async def abort_request(request: Request, body: AbortBody, caller: Caller = Depends(context.caller)) -> Response:
        """Abort a request at any gateway: the caller's own, or any with an administrator's credential."""
        if body.abort_all:
            await context.admin(request)
        elif not body.rid:
            raise InvalidRequestError("'rid' should name a request.", param="rid")
        else:
            check_name("rid", body.rid)
        await context.charge_for_ending(request, identify(caller).subject)
        rid = None if body.abort_all else body.rid
        count = await _abort(context, rid, caller)
        return Response(orjson.dumps({"aborted": count}), media_type="application/json")

    @router.get("/health_generate")
    async def health_generate() -> Response:
        """Report whether a request would be served now, without generating, so that a long prefill is not a failure."""
        state = await readiness(context)
        if not state.serves:
            raise UnavailableError("; ".join(map(str, state.missing)))
        return Response(b'{"status":"ready"}', media_type="application/json")

    @router.get("/model_info", operation_id="model_info", dependencies=is_caller)
    @router.get("/get_model_info", operation_id="get_model_info", dependencies=is_caller)
    async def model_info(model: str | None = None) -> Response:
        """Return the model's name and capabilities."""
        card = await context.models.require(model)
        backend = await context.models.find(model)
        info = {
            "model_path": card.name,
            "tokenizer_path": card.name,
            "is_generation": Task.GENERATE in card.tasks,
            "preferred_sampling_params": None,
            "weight_version": await weight_version(backend),
            "has_image_understanding": card.images is not None,
            "has_audio_understanding": False,
            "max_model_len": card.max_context_tokens,
        }
        return Response(orjson.dumps(info), media_type="application/json")

    @router.get("/server_info", operation_id="server_info", dependencies=is_admin)
    @router.get("/get_server_info", operation_id="get_server_info", dependencies=is_admin)
    async def server_info(model: str | None = None) -> Response:
        """Return the statistics of each scheduler group of a model."""
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


async def _flush(backends: Sequence[Backend]) -> int:
    """Flush the caches of all models, even if one fails; return the number of freed pages."""
    flushed = await asyncio.gather(
        *(backend.administration.flush_cache() for backend in backends), return_exceptions=True
    )
    return sum(_raised(flushed))


async def _abort(context: Context, rid: str | None, caller: Caller) -> int:
    """Abort requests; an administrator's act is recorded."""
    if not caller.is_admin:
        return await context.aborts.abort(rid, caller)
    async with context.act(caller, "requests.abort", rid=rid) as results:
        results["aborted"] = count = await context.aborts.abort(rid, caller)
    return count


def _raised(results: Iterable[T | BaseException]) -> Iterator[T]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
        yield result

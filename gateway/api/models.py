"""/v1/models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from fastapi import APIRouter, Request, Response

if TYPE_CHECKING:
    from gateway.api.context import Context
    from gateway.ring.messages import ModelInfo


def create_router(context: Context) -> APIRouter:
    """Return the endpoints."""
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models(request: Request) -> Response:
        """Return what is served."""
        await context.caller(request)
        card = await context.served.card()
        return _json({"object": "list", "data": [model_object(card)]})

    @router.get("/v1/models/{name:path}")
    async def get_model(request: Request, name: str) -> Response:
        """Return one model."""
        await context.caller(request)
        return _json(model_object(await context.served.require(name)))

    return router


def model_object(card: ModelInfo) -> dict[str, object]:
    """Return a model card in OpenAI's shape."""
    return {
        "id": card.name,
        "object": "model",
        "created": card.created_unix_s,
        "owned_by": "pando",
        "root": card.name,
        "max_model_len": card.max_context_tokens,
    }


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")

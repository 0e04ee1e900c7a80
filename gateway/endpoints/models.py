"""/v1/models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from fastapi import APIRouter, Depends, Response

if TYPE_CHECKING:
    from gateway.backends import Backend
    from gateway.endpoints.context import Context
    from gateway.pipeline.port import ModelInfo


def add_routes(router: APIRouter, context: Context) -> None:
    """Add the routes."""

    @router.get("/v1/models", dependencies=[Depends(context.caller)])
    async def list_models() -> Response:
        """Return all served models."""
        known = await context.models.known()
        if len(known) == 1 and known[0][1] is None:
            # The only model's name is unknown; this raises the error that explains why.
            await context.models.require(None)
        return _json({"object": "list", "data": [model_object(backend, card) for backend, card in known]})

    @router.get("/v1/models/{name:path}", dependencies=[Depends(context.caller)])
    async def get_model(name: str) -> Response:
        """Return one model."""
        backend = await context.models.find(name)
        return _json(model_object(backend, await backend.served.card()))


def model_object(backend: Backend, card: ModelInfo | None) -> dict[str, object]:
    """Return a model in OpenAI's shape with Pando's additional fields, most of which are null without a card."""
    name = card.name if card else backend.name
    tasks = [task.value for task in card.tasks] if card else None
    return {
        "id": name,
        "object": "model",
        "created": card.created_unix_s if card else 0,
        "owned_by": "pando",
        "root": name,
        "max_model_len": card.max_context_tokens if card else None,
        "kind": tasks and tasks[0],
        "tasks": tasks,
        "labels": list(card.head.labels) if card and card.head else None,
        "aliases": list(backend.aliases),
    }


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")

"""/v1/models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from fastapi import APIRouter, Depends, Response

from common.adapters import SEPARATOR
from common.errors import ModelNotFoundError, PandoError
from gateway.identity.caller import Caller

if TYPE_CHECKING:
    from gateway.backends import Backend
    from gateway.endpoints.context import Context
    from gateway.pipeline.port import ModelInfo


IMAGE_LIMITS = ("max_images", "max_file_bytes", "max_pixels", "max_frames", "video_files")


def add_routes(router: APIRouter, context: Context) -> None:
    """Add the routes."""

    @router.get("/v1/models")
    async def list_models(caller: Caller = Depends(context.caller)) -> Response:
        """Return all served models, and those with adapters that the caller may use."""
        known = await context.models.known()
        if len(known) == 1 and known[0][1] is None:
            # The only model's name is unknown; this raises the error that explains why.
            await context.models.require(None)
        listed = []
        for backend, card in known:
            own = model_object(backend, card)
            listed += [own, *(adapted_model(own, each) for each in await usable_adapters(context, caller, backend))]
        return _json({"object": "list", "data": listed})

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str, caller: Caller = Depends(context.caller)) -> Response:
        """Return one model."""
        chosen = await context.choose(caller, name)
        backend = await context.models.find(chosen.card.name)
        own = model_object(backend, chosen.card)
        if not chosen.adapter:
            return _json(own)
        for each in await usable_adapters(context, caller, backend):
            if each == chosen.adapter:
                return _json(adapted_model(own, each))
        raise ModelNotFoundError(f"The model '{chosen.name}' does not exist here.", param="model")


async def usable_adapters(context: Context, caller: Caller, backend: Backend) -> list[str]:
    """Return the names of a model's adapters that the caller may use; schedulers are asked only if it may use any."""
    if not (caller.is_admin or caller.adapters or (caller.adapters is None and context.quotas.adapters(caller.tenant))):
        return []
    try:
        adapters = await backend.administration.adapters()
    except PandoError:
        return []
    return [each.info.name for each in adapters if context.may_use(caller, each.info.name)]


def adapted_model(base: dict[str, object], adapter: str) -> dict[str, object]:
    """Return a model with an adapter in OpenAI's shape, from that of its base model."""
    name = f"{base['id']}{SEPARATOR}{adapter}"
    return {**base, "id": name, "root": name, "parent": base["id"], "aliases": []}


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
        "images": {name: getattr(card.images, name) for name in IMAGE_LIMITS} if card and card.images else None,
        "aliases": list(backend.aliases),
    }


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")

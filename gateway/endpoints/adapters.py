"""Endpoints that load, unload and list adapters (LoRA), as vLLM and SGLang have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from fastapi import APIRouter, Depends, Response

from common.adapters import check_adapter_name
from common.errors import InvalidRequestError
from gateway.endpoints.schema import Schema
from gateway.identity.caller import Caller
from gateway.server.errors import HttpError

if TYPE_CHECKING:
    from common.adapters import AdapterInfo
    from gateway.endpoints.context import Context


class LoadAdapterBody(Schema):
    """The adapter to load: its name, and its directory on the workers' hosts or its name on a hub."""

    lora_name: str
    lora_path: str | None = None
    # The served model, if there are several.
    model: str | None = None
    pinned: bool | None = None


class UnloadAdapterBody(Schema):
    """The name of the adapter to unload."""

    lora_name: str
    model: str | None = None


def add_routes(router: APIRouter, context: Context) -> None:
    """Add the routes."""

    @router.post("/v1/load_lora_adapter", operation_id="load_lora_adapter")
    @router.post("/load_lora_adapter", operation_id="load_lora_adapter_natively")
    async def load_adapter(body: LoadAdapterBody, caller: Caller = Depends(context.admin)) -> Response:
        """Make an adapter available to the callers that may use it, in place of the one with its name if there is one.

        Without a path, only its pin changes.
        """
        name = check_adapter_name(body.lora_name)
        if not body.lora_path and body.pinned is None:
            raise InvalidRequestError("'lora_path' should name a directory or a repository.", param="lora_path")
        backend = await context.models.find(body.model)
        source, pinned = body.lora_path or "", bool(body.pinned)
        async with context.act(
            caller, "adapter.load", model=body.model, name=name, source=source, pinned=pinned
        ) as results:
            made = await backend.administration.load_adapter(name, source, pinned=pinned)
            results["digest"] = made.digest
        return _json({"success": True, "adapter": _shape(made)})

    @router.post("/v1/unload_lora_adapter", operation_id="unload_lora_adapter")
    @router.post("/unload_lora_adapter", operation_id="unload_lora_adapter_natively")
    async def unload_adapter(body: UnloadAdapterBody, caller: Caller = Depends(context.admin)) -> Response:
        """Make an adapter unavailable; requests that use it continue."""
        name = check_adapter_name(body.lora_name)
        backend = await context.models.find(body.model)
        async with context.act(caller, "adapter.unload", model=body.model, name=name) as results:
            was_loaded = results["was_loaded"] = await backend.administration.unload_adapter(name)
        if not was_loaded:
            raise HttpError(404, f"The adapter '{name}' is not loaded.")
        return _json({"success": True})

    @router.get("/v1/lora_adapters", dependencies=[Depends(context.admin)])
    async def list_adapters(model: str | None = None) -> Response:
        """Return all adapters of a model, with their places and use."""
        backend = await context.models.find(model)
        adapters = [
            {**_shape(each.info), "resident_groups": each.resident, "running_rows": each.running_rows}
            for each in await backend.administration.adapters()
        ]
        return _json({"object": "list", "data": adapters})


def _shape(adapter: AdapterInfo) -> dict[str, object]:
    return {
        "lora_name": adapter.name,
        "lora_path": adapter.source,
        "digest": adapter.digest,
        "rank": adapter.rank,
        "bytes": adapter.bytes,
        "pinned": adapter.pinned,
    }


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")

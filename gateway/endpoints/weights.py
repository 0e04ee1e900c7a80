"""The endpoint that replaces a model's weights while it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import orjson
from fastapi import APIRouter, Depends, Response

from common.errors import HTTP_STATUS, PandoError
from gateway.endpoints.schema import Schema
from gateway.identity.caller import Caller
from gateway.pipeline.port import WeightsUpdate

if TYPE_CHECKING:
    from gateway.backends import Backend
    from gateway.endpoints.context import Context


class UpdateWeightsBody(Schema):
    """The weights to load in place of the ones that serve."""

    model_path: str
    # Whose weights are replaced; absent: the default model's.
    model: str | None = None
    load_format: str | None = None
    weight_version: str | None = None
    # As the mode abort.
    abort_all_requests: bool = False
    mode: Literal["drain", "recompute", "abort"] = "drain"


def add_routes(router: APIRouter, context: Context) -> None:
    """Add the route."""

    @router.post("/update_weights_from_disk")
    async def update_weights(body: UpdateWeightsBody, caller: Caller = Depends(context.admin)) -> Response:
        """Replace the weights of a model by others of the same shape, which all workers can read at `model_path`.

        Requests that run finish with the old weights first (`mode` drain, the default), continue with the new ones
        (recompute), or are aborted (abort). If anything does not fit, the old weights serve on.
        """
        backend = await context.models.find(body.model)
        update = WeightsUpdate(
            body.model_path,
            body.load_format or "",
            "abort" if body.abort_all_requests else body.mode,
            body.weight_version or "",
        )
        try:
            what = {"served": body.model, "model": update.model, "mode": update.mode, "version": update.version}
            async with context.act(caller, "weights.update", **what) as results:
                groups = await backend.administration.update_weights(update)
                results["version"] = groups[0].version
        except PandoError as error:
            answer = {"success": False, "message": str(error), "num_paused_requests": 0}
            return Response(orjson.dumps(answer), HTTP_STATUS[error.code], media_type="application/json")
        answer = {
            "success": True,
            "message": f"the weights of {len(groups)} scheduler groups are replaced",
            "num_paused_requests": sum(group.running for group in groups),
            "weight_version": groups[0].version,
            "paused_seconds": max(group.paused_s for group in groups),
            "loaded_beside": all(group.beside for group in groups),
        }
        return Response(orjson.dumps(answer), media_type="application/json")


async def weight_version(backend: Backend) -> str:
    """Return the version of the weights that a model's first group serves; empty while no group can say."""
    try:
        states = await backend.administration.states()
    except PandoError:
        return ""
    return str(states[0].get("weight_version", ""))

"""The endpoints that put a model to sleep and wake it, in the shapes of vLLM's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import orjson
from fastapi import APIRouter, Depends, Query, Response

from gateway.identity.caller import Caller
from gateway.pipeline.port import SleepWish

if TYPE_CHECKING:
    from gateway.endpoints.context import Context

# vLLM's names of what becomes of the requests that run.
_MODES = {"wait": "drain", "keep": "requeue"}


def add_routes(router: APIRouter, context: Context) -> None:
    """Add the routes."""

    @router.post("/sleep")
    async def sleep(
        level: Annotated[int, Query(ge=1, le=2)] = 1,
        mode: Literal["drain", "requeue", "abort", "wait", "keep"] = "drain",
        keep_cache: bool = False,
        model: str | None = None,
        caller: Caller = Depends(context.admin),
    ) -> Response:
        """Give back a model's memory: weights move to host memory (`level` 1) or are dropped (2).

        Requests that run finish first (`mode` drain, the default, or vLLM's name wait), continue after the model has
        woken (requeue, keep), or are aborted (abort). With `keep_cache`, the host tier keeps the cache.
        """
        backend = await context.models.find(model)
        wish = SleepWish(level, _MODES.get(mode, mode), keep_cache)
        async with context.act(
            caller, "model.sleep", model=model, level=level, mode=wish.mode, keep_cache=keep_cache
        ) as results:
            groups = await backend.administration.sleep(wish)
            results["groups"] = len(groups)
        answer = {
            "level": level,
            "num_paused_requests": sum(group.running for group in groups),
            "freed_bytes": sum(group.freed_bytes for group in groups),
            "seconds": max(group.seconds for group in groups),
        }
        return Response(orjson.dumps(answer), media_type="application/json")

    @router.post("/wake_up")
    async def wake_up(
        tags: Annotated[list[str], Query()] = [],  # noqa: B006
        model: str | None = None,
        caller: Caller = Depends(context.admin),
    ) -> Response:
        """Restore what `/sleep` has given back, or only the parts `tags` (weights, kv_cache); return when that is done.

        Requests run once all parts are restored.
        """
        backend = await context.models.find(model)
        async with context.act(caller, "model.wake_up", model=model, parts=tags) as results:
            is_awake = results["is_awake"] = await backend.administration.wake_up(tags)
        return Response(orjson.dumps({"is_sleeping": not is_awake}), media_type="application/json")

    @router.get("/is_sleeping", dependencies=[Depends(context.admin)])
    async def is_sleeping(model: str | None = None) -> Response:
        """Report whether a model sleeps."""
        backend = await context.models.find(model)
        states = await backend.administration.sleep_states()
        answer = {"is_sleeping": all(state.level > 0 for state in states)}
        return Response(orjson.dumps(answer), media_type="application/json")

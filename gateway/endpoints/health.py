"""/health and /ready, which need no credentials: they reveal nothing about users."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson
from fastapi import APIRouter, Response

if TYPE_CHECKING:
    from gateway.endpoints.context import Context


@dataclass(frozen=True, slots=True)
class ReadyState:
    """Whether any of the selected models would be served, and the services that are missing."""

    serves: bool
    missing: list[str]

    @property
    def answer(self) -> dict[str, object]:
        """The body of /ready."""
        status = ("partial" if self.missing else "ready") if self.serves else "unavailable"
        return {"status": status, "missing": self.missing}


async def readiness(context: Context, model: str | None = None) -> ReadyState:
    """Return the state of `model`, or of all models; requests count as served if at least one model is available.

    Raises:
        ModelNotFoundError: no served model has this name.
    """
    chosen = (await context.models.find(model),) if model else context.models.all
    if context.generations.draining:
        return ReadyState(serves=False, missing=["this server is shutting down"])
    lacks = await asyncio.gather(*(backend.readiness.missing() for backend in chosen))
    missing = [
        f"{backend.name}: {lack}" if backend.name else lack
        for backend, lacking in zip(chosen, lacks, strict=True)
        for lack in lacking
    ]
    return ReadyState(not all(lacks), missing)


def add_routes(router: APIRouter, context: Context) -> None:
    """Add the routes; none requires a credential."""

    @router.get("/health")
    async def health() -> Response:
        """Report that this process is alive and its event loop runs."""
        return Response(b'{"status":"alive"}', media_type="application/json")

    @router.get("/ready")
    async def ready(model: str | None = None) -> Response:
        """Report whether requests would be served now, of one model or any, and the services that are missing."""
        state = await readiness(context, model)
        return Response(orjson.dumps(state.answer), 200 if state.serves else 503, media_type="application/json")

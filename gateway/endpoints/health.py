"""/health and /ready, which need no credentials: they reveal nothing about users."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import orjson
from fastapi import APIRouter, Response

from common.errors import PandoError

if TYPE_CHECKING:
    from gateway.backends import Backend
    from gateway.endpoints.context import Context


@dataclass(frozen=True, slots=True)
class ReadyState:
    """Whether any of the selected models would be served, the services that are missing, and the models that sleep.

    Requests to a model that sleeps are accepted, and wait until it is woken.
    """

    serves: bool
    missing: list[str]
    sleeping: list[str] = field(default_factory=list)
    all_sleep: bool = False

    @property
    def answer(self) -> dict[str, object]:
        """The body of /ready."""
        status = ("partial" if self.missing else "ready") if self.serves else "unavailable"
        answer: dict[str, object] = {"status": status, "missing": self.missing}
        if self.sleeping:
            answer["sleeping"] = self.sleeping
        if status == "ready" and self.all_sleep:
            answer["status"] = "sleeping"
        return answer


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
    sleeps = await asyncio.gather(*(_reason_of_sleep(backend) for backend in chosen))
    sleeping = [reason for reason in sleeps if reason is not None]
    return ReadyState(not all(lacks), missing, sleeping, all_sleep=len(sleeping) == len(chosen))


async def _reason_of_sleep(backend: Backend) -> str | None:
    """Return why a model sleeps and what wakes it; None if any of its groups is awake, or none can say."""
    try:
        states = await backend.administration.sleep_states()
    except PandoError:
        return None
    if not states or not all(state.level for state in states):
        return None
    waker = "a request or /wake_up wakes it" if states[0].wakes_on_request else "/wake_up wakes it"
    name = f"{backend.name}: " if backend.name else ""
    return f"{name}put to sleep at level {max(state.level for state in states)}; {waker}"


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

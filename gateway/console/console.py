"""The data of the console's pages: who is looking, the fleet, and the changes of the caches."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING

import orjson

from common.adapters import SEPARATOR
from common.errors import PandoError, QueueFullError
from common.heads import Task
from common.version import version
from gateway.console.alerts import alerts
from gateway.endpoints.models import usable_adapters

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Mapping

    from common.settings.gateway import PriceSettings
    from gateway.backends import Backend
    from gateway.console.self_attack import SelfAttack
    from gateway.endpoints.context import Context
    from gateway.identity.caller import Caller
    from gateway.pipeline.port import CacheChanges, JsonObject

MAX_OWNERS = 200
# Each viewer costs every scheduler a snapshot of its tree and a queue of events.
MAX_WATCHERS = 8


class Console:
    """Answers the console's requests; callers have been authorised."""

    def __init__(self, context: Context, attack: SelfAttack, prices: Mapping[str, PriceSettings]) -> None:
        """`attack` has the report of the last self-attack; `prices` are those of models, by name."""
        self._context = context
        self._prices = prices
        self._attack = attack
        self._watchers = 0

    async def about(self, caller: Caller) -> JsonObject:
        """Return the caller's identity and the models and adapters that it may choose from."""
        known = await self._context.models.known()
        return {
            "tenant": caller.tenant,
            "subject": caller.subject,
            "is_admin": caller.is_admin,
            "version": version(),
            "models": [
                {
                    "name": card.name,
                    "max_context_tokens": card.max_context_tokens,
                    "generates": Task.GENERATE in card.tasks,
                    "has_tools": card.tool_style is not None,
                    "has_reasoning": card.reasoning_style is not None,
                    # None: it is not known.
                    "price": self._prices[card.name].model_dump() if card.name in self._prices else None,
                    # None: it takes no images.
                    "images": asdict(card.images) if card.images else None,
                    # Names of the model with each of them, as requests give them.
                    "adapters": [
                        f"{card.name}{SEPARATOR}{adapter}"
                        for adapter in await usable_adapters(self._context, caller, backend)
                    ],
                }
                for backend, card in known
                if card is not None
            ],
        }

    async def fleet(self) -> JsonObject:
        """Return the state of every service and group, the tenants' weights, alerts and the last self-attack."""
        backends = self._context.models.all
        known = await self._context.models.known()
        missing = await asyncio.gather(*(backend.readiness.missing() for backend in backends))
        models: list[JsonObject] = []
        for (backend, card), lacking in zip(known, missing, strict=True):
            groups, error = await _groups(backend.administration.detailed_states(MAX_OWNERS))
            name = card.name if card is not None else backend.name or "model"
            models.append({"name": name, "missing": lacking, "groups": groups, "error": error})
        report = await asyncio.to_thread(self._attack.read)
        return {
            "models": models,
            "open_requests": self._context.generations.open_requests,
            "draining": self._context.generations.draining,
            "weights": {tenant: self._context.quotas.weight(tenant) for tenant in sorted(_tenants(models))},
            "alerts": [asdict(alert) for alert in alerts(models, report)],
            "attack": report,
        }

    async def watchable(self, model: str | None) -> Backend:
        """Return the model whose caches `changes` can report.

        Raises:
            ModelNotFoundError: no served model has this name.
            QueueFullError: as many viewers as allowed are watching.
        """
        if self._watchers >= MAX_WATCHERS:
            raise QueueFullError(f"{MAX_WATCHERS} consoles are watching the cache already.", retry_after_ms=5000)
        return await self._context.models.find(model)

    async def changes(self, backend: Backend) -> AsyncIterator[bytes]:
        """Yield server-sent events with the changes of a model's caches, after a snapshot of each."""
        self._watchers += 1
        try:
            async with aclosing(backend.administration.watch_caches()) as changes:
                async for change in changes:
                    yield _event(change)
                    # Counters arrive every few seconds, so that this is noticed soon.
                    if self._context.generations.draining:
                        return
        except PandoError as error:
            yield b"data: " + orjson.dumps({"error": error.message}) + b"\n\n"
        finally:
            self._watchers -= 1


def _event(change: CacheChanges) -> bytes:
    # Not `asdict`, which would copy every node.
    fields = {
        "group": change.group,
        "reset": change.reset,
        "past": change.past,
        "events": change.events,
        "counters": change.counters,
        "error": change.error,
    }
    return b"data: " + orjson.dumps(fields) + b"\n\n"


async def _groups(states: Awaitable[list[JsonObject]]) -> tuple[list[JsonObject], str | None]:
    try:
        return await states, None
    except PandoError as error:
        return [], error.message


def _tenants(models: list[JsonObject]) -> set[str]:
    """Return the tenants that own pages or have open requests."""
    found: set[str] = set()
    for model in models:
        for group in model["groups"]:  # type: ignore[attr-defined]  # the list made above
            for entry in (*group.get("owners", ()), *group.get("requests", ())):
                view = entry.get("view")
                tenant = view["subject"]["tenant"] if view else entry.get("tenant")
                if tenant:
                    found.add(tenant)
    return found

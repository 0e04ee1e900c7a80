"""Where the time of a request went, for its owner or an administrator."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import APIRouter, Depends, Request, Response

from common.errors import UnavailableError
from common.names import check_name
from gateway.identity.caller import Caller, identify, owns
from gateway.server.errors import HttpError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gateway.endpoints.context import Context
    from gateway.generation.recent import RecentRequest
    from gateway.pipeline.port import ScheduledMilestone, ScheduledRequest

Json = dict[str, Any]
# The phase that begins with a milestone; PREFILLED is also the choice's first token.
PHASES = {"arrived": "queue", "started": "prefill", "prefilled": "decode", "retracted": "queue"}
ENDED = "ended"
UNKNOWN = "There is no such request: its id is wrong, it is not yours, or this gateway no longer remembers it."


def add_routes(router: APIRouter, context: Context) -> None:
    """Add the route."""

    @router.get("/v1/requests/{request_id}/timeline")
    async def timeline(request: Request, request_id: str, caller: Caller = Depends(context.caller)) -> Response:
        """Return the phases of a recent request at this gateway, by the id in its response.

        Times are in seconds since 1970, of the clock of the service that a phase is in.
        """
        check_name("request_id", request_id)
        await context.charge_for_ending(request, identify(caller).subject)
        may_see = (lambda _view: True) if caller.is_admin else partial(owns, caller)
        found = context.generations.recent.find(request_id, may_see)
        if found is None:
            raise HttpError(404, UNKNOWN)
        backend = await context.models.find(found.model)
        missing: str | None = None
        scheduled: list[ScheduledRequest] = []
        try:
            scheduled = await backend.administration.timelines(found.request_ids, found.view.subject)
        except UnavailableError as error:
            missing = str(error)
        content = describe(request_id, found, scheduled)
        if missing is not None:
            content["incomplete"] = missing
        return Response(orjson.dumps(content), media_type="application/json")


def describe(name: str, request: RecentRequest, scheduled: Iterable[ScheduledRequest]) -> Json:
    """Return the phases and the outcome of a request, as JSON."""
    phases = sorted(_phases(request, tuple(scheduled)), key=lambda phase: phase["start"])
    usage = None
    if request.usage is not None:
        usage = request.usage.counts()
        usage["charged_tokens"] = sum(phase.get("charged_tokens", 0) for phase in phases)
    return {
        "object": "request.timeline",
        "id": name,
        "model": request.model,
        "trace_id": request.trace.traceparent.split("-")[1] if request.trace else None,
        "status": request.status,
        "error": None if request.failure is None else request.failure.value,
        "received_at": request.received_at,
        "first_token_at": request.first_token_at,
        "ended_at": request.ended_at,
        "resubmissions": request.resubmissions,
        "usage": usage,
        "phases": phases,
    }


def _phases(request: RecentRequest, scheduled: tuple[ScheduledRequest, ...]) -> Iterator[Json]:
    starts, ends = [], []
    for each in scheduled:
        starts += [milestone.unix_s for milestone in each.milestones if milestone.kind == "arrived"]
        ends += [milestone.unix_s for milestone in each.milestones if milestone.kind == ENDED]
        for choice in sorted({milestone.choice for milestone in each.milestones}):
            own = tuple(milestone for milestone in each.milestones if milestone.choice == choice)
            yield from _of_choice(each.request_id, own)
    if starts:
        # From the parsed request to the scheduler: waiting for the tokenizer, and encoding.
        yield {"name": "tokenize", "start": request.received_at, "end": max(min(starts), request.received_at)}
    if ends and request.ended_at is not None:
        # From the scheduler's last token to the end of the response: decoding into text, and the client's reading.
        yield {"name": "deliver", "start": max(ends), "end": max(max(ends), request.ended_at)}


def _of_choice(request_id: str, milestones: tuple[ScheduledMilestone, ...]) -> Iterator[Json]:
    """Yield the phases of one choice; the last one has no end while it lasts."""
    for milestone, following in zip(milestones, (*milestones[1:], None), strict=True):
        if milestone.kind == ENDED:
            continue
        phase: Json = {
            "name": PHASES[milestone.kind],
            "request_id": request_id,
            "choice": milestone.choice,
            "start": milestone.unix_s,
            "end": None if following is None else following.unix_s,
        }
        if milestone.kind == "retracted":
            phase["after_retraction"] = True
        if milestone.found is not None:
            phase["cached"] = dict(milestone.found)
        if following is not None and following.wait is not None:
            phase["waited_for"] = following.wait
        if following is not None and following.kind == ENDED:
            phase |= {
                "finish_reason": following.finish_reason,
                "output_tokens": following.output_tokens,
                "charged_tokens": following.charged_tokens,
            }
        yield phase

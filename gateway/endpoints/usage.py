"""The use of tokens as the ledger has it: /v1/usage, and OpenAI's usage of completions."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson
from fastapi import APIRouter, Depends, Request, Response

from common.errors import InvalidRequestError
from common.types import View
from gateway.identity.caller import ANONYMOUS, Caller, owns
from gateway.ledger.entries import DAY_S, HOUR_S, HourOfUse, Tokens, UsageQuery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gateway.endpoints.context import Context

WIDTHS = {"1h": HOUR_S, "1d": DAY_S}
# The default and the greatest number of buckets, as OpenAI has them.
BUCKETS = {"1h": (24, 168), "1d": (7, 31)}
# Fields by which OpenAI's clients group, and their values here; other fields have none.
GROUPS: dict[str, Callable[[HourOfUse], str]] = {
    "project_id": lambda use: use.subject.tenant,
    "user_id": lambda use: use.subject.name,
    "model": lambda use: use.model,
}
FILTERS = {"project_ids": "project_id", "user_ids": "user_id", "models": "model"}
OWN_GROUPS = {"tenant": "project_id", "subject": "user_id", "model": "model"}
LATEST = 2**40


@dataclass(frozen=True, slots=True)
class UsageWindow:
    """Consecutive buckets of `width` seconds; `more` is the start of the next one, if the query asks for more."""

    starts: range
    width: int
    end: int
    more: int | None


def add_routes(router: APIRouter, context: Context) -> None:
    """Add the routes."""

    @router.get("/v1/usage")
    async def usage(request: Request, caller: Caller = Depends(context.caller)) -> Response:
        """Return the use of tokens by tenant, subject and model: the caller's own, or all of it for administrators."""
        _check_names(request, {"start_time", "end_time", "bucket_width", "limit", "page", "group_by"})
        window, groups = _window(request), [OWN_GROUPS[name] for name in _groups(request, OWN_GROUPS)]
        data = [
            {"start_time": start, "end_time": end}
            | {own: group[theirs] for own, theirs in OWN_GROUPS.items() if theirs in groups}
            | tokens._asdict()
            for start, end, results in _summed(await _uses(context, caller, window), window, groups)
            for group, tokens in results
        ]
        return _page("usage", data, window)

    @router.get("/v1/organization/usage/completions")
    async def usage_of_completions(request: Request, caller: Caller = Depends(context.caller)) -> Response:
        """Return the use of tokens in the shape of OpenAI's usage API; projects are tenants, users are subjects."""
        _check_names(request, {"start_time", "end_time", "bucket_width", "limit", "page", "group_by", *FILTERS})
        if "start_time" not in request.query_params:
            raise InvalidRequestError("'start_time' is missing.", param="start_time")
        window, groups = _window(request), _groups(request, GROUPS)
        wanted = {GROUPS[field]: _values(request, name) for name, field in FILTERS.items() if _values(request, name)}
        uses = [
            use
            for use in await _uses(context, caller, window)
            if all(value(use) in values for value, values in wanted.items())
        ]
        data = [
            {
                "object": "bucket",
                "start_time": start,
                "end_time": end,
                "results": [_result(group, tokens) for group, tokens in results],
            }
            for start, end, results in _summed(uses, window, groups)
        ]
        return _page("page", data, window)


async def _uses(context: Context, caller: Caller, window: UsageWindow) -> Sequence[HourOfUse]:
    """Return the use that the caller may see: all for administrators, else its own and that of users it vouches for."""
    starts, end = window.starts, min(window.starts.stop, window.end)
    if not starts:
        return ()
    if caller.is_admin:
        return await context.ledger.hours(UsageQuery(starts.start, end))
    if caller.subject == ANONYMOUS:
        return ()
    subjects = None if caller.vouches else (caller.subject,)
    uses = await context.ledger.hours(UsageQuery(starts.start, end, caller.tenant, subjects))
    return [use for use in uses if owns(caller, View(use.subject))]


def _summed(
    uses: Iterable[HourOfUse], window: UsageWindow, groups: Sequence[str]
) -> list[tuple[int, int, list[tuple[dict[str, str], Tokens]]]]:
    """Return for each bucket its start, its end, and the sums of each group."""
    buckets: dict[int, defaultdict[tuple[str, ...], list[Tokens]]] = {
        start: defaultdict(list) for start in window.starts
    }
    for use in uses:
        key = tuple(GROUPS[name](use) for name in groups)
        buckets[window.starts[(use.hour - window.starts.start) // window.width]][key].append(use.tokens)
    return [
        (
            start,
            min(start + window.width, window.end),
            [
                (dict(zip(groups, key, strict=True)), Tokens(*map(sum, zip(*amounts, strict=True))))
                for key, amounts in sorted(sums.items())
            ],
        )
        for start, sums in buckets.items()
    ]


def _window(request: Request) -> UsageWindow:
    width_name = request.query_params.get("bucket_width", "1d")
    if width_name not in WIDTHS:
        raise InvalidRequestError("'bucket_width' should be '1h' or '1d'.", param="bucket_width")
    width, (default, most) = WIDTHS[width_name], BUCKETS[width_name]
    now = int(time.time())
    end = _number(request, "end_time", now - now % HOUR_S + HOUR_S, 1, LATEST)
    # An hour is counted as a whole.
    end += -end % HOUR_S
    limit = _number(request, "limit", default, 1, most)
    first = _number(request, "start_time", max(end + -end % width - limit * width, 0), 0, LATEST)
    start = _number(request, "page", first, 0, LATEST)
    start -= start % width
    stop = min(start + limit * width, end + -end % width)
    return UsageWindow(range(start, max(stop, start), width), width, end, stop if start < stop < end else None)


def _groups(request: Request, known: Iterable[str]) -> list[str]:
    groups = _values(request, "group_by")
    for name in groups:
        if name not in known:
            message = f"'group_by' should be {' or '.join(map(repr, known))}, not {name[:64]!r}."
            raise InvalidRequestError(message, param="group_by")
    return list(dict.fromkeys(groups))


def _values(request: Request, name: str) -> list[str]:
    """Return the values of a list: repeated, with or without brackets after the name, or separated by commas."""
    params = request.query_params
    return [value for given in (*params.getlist(name), *params.getlist(f"{name}[]")) for value in given.split(",")]


def _number(request: Request, name: str, default: int, least: int, most: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 16 and least <= int(text) <= most):
        raise InvalidRequestError(f"'{name}' should be a number from {least} to {most}.", param=name)
    return int(text)


def _check_names(request: Request, known: set[str]) -> None:
    """Refuse unknown parameters: a filter that is ignored would give the wrong sums."""
    for name in request.query_params:
        if name.removesuffix("[]") not in known:
            shown = name[:64]
            raise InvalidRequestError(
                f"Unknown parameter: '{shown}'; known are {', '.join(sorted(known))}.", param=shown
            )


def _result(group: dict[str, str], tokens: Tokens) -> dict[str, object]:
    return {
        "object": "organization.usage.completions.result",
        "input_tokens": tokens.prompt_tokens,
        "output_tokens": tokens.output_tokens,
        "input_cached_tokens": tokens.cached_tokens,
        "input_audio_tokens": 0,
        "output_audio_tokens": 0,
        "num_model_requests": tokens.requests,
        "project_id": group.get("project_id"),
        "user_id": group.get("user_id"),
        "api_key_id": None,
        "model": group.get("model"),
        "batch": None,
        "service_tier": None,
    }


def _page(kind: str, data: Sequence[object], window: UsageWindow) -> Response:
    more = None if window.more is None else str(window.more)
    body = {"object": kind, "data": data, "has_more": more is not None, "next_page": more}
    return Response(orjson.dumps(body), media_type="application/json")

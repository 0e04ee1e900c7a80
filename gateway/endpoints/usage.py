"""The use of tokens as the ledger has it: /v1/usage, and OpenAI's usage of completions and embeddings."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import orjson
from fastapi import APIRouter, Depends, Request, Response

from common.errors import InvalidRequestError
from common.types import View
from gateway.endpoints.context import OPERATIONS
from gateway.identity.caller import ANONYMOUS, Caller, owns
from gateway.ledger.entries import CACHE_AMOUNTS, DAY_S, HOUR_S, HourOfUse, Tokens, UsageQuery

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from gateway.endpoints.context import Context

WIDTHS = {"1h": HOUR_S, "1d": DAY_S}
# The default and the greatest number of buckets, as OpenAI has them.
BUCKETS = {"1h": (24, 168), "1d": (7, 31)}
GroupValue: TypeAlias = str | bool | None
# Fields by which OpenAI's clients group, and their values here; other fields have none.
GROUPS: dict[str, Callable[[HourOfUse], GroupValue]] = {
    "project_id": lambda use: use.subject.tenant,
    "user_id": lambda use: use.subject.name,
    "model": lambda use: use.work.model,
    "batch": lambda use: use.work.is_batch,
}
OWN_GROUPS: dict[str, Callable[[HourOfUse], GroupValue]] = {
    "tenant": GROUPS["project_id"],
    "subject": GROUPS["user_id"],
    "model": GROUPS["model"],
    "adapter": lambda use: use.work.adapter or None,
    "operation": lambda use: use.work.operation or None,
    "batch": GROUPS["batch"],
}
FILTERS = {"project_ids": "project_id", "user_ids": "user_id", "models": "model"}
# Kinds of OpenAI's usage, their operations, and the fields of tokens that their results have. Entries of older gateways
# name no operation.
GENERATING = ("", *OPERATIONS.values())
KINDS = {"completions": GENERATING, "embeddings": ("embeddings",)}
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
        """Return the use of tokens: the caller's own, or all of it for administrators."""
        _check_names(request, {"start_time", "end_time", "bucket_width", "limit", "page", "group_by"})
        window, groups = _window(request), _groups(request, OWN_GROUPS)
        data = [
            {"start_time": start, "end_time": end} | group | _amounts(tokens)
            for start, end, results in _summed(await _uses(context, caller, window), window, groups, OWN_GROUPS)
            for group, tokens in results
        ]
        return _page("usage", data, window)

    for kind in KINDS:
        router.add_api_route(
            f"/v1/organization/usage/{kind}", _usage_of(context, kind), operation_id=f"usage_of_{kind}"
        )


def _usage_of(context: Context, kind: str) -> Callable[..., Awaitable[Response]]:
    async def usage_of_kind(request: Request, caller: Caller = Depends(context.caller)) -> Response:
        """Return the use of tokens in the shape of OpenAI's usage API; projects are tenants, users are subjects."""
        known = {"start_time", "end_time", "bucket_width", "limit", "page", "group_by", *FILTERS}
        _check_names(request, known | {"batch"} if kind == "completions" else known)
        if "start_time" not in request.query_params:
            raise InvalidRequestError("'start_time' is missing.", param="start_time")
        names = {name: value for name, value in GROUPS.items() if name != "batch" or kind == "completions"}
        window, groups = _window(request), _groups(request, names)
        wanted = {GROUPS[field]: _values(request, name) for name, field in FILTERS.items() if _values(request, name)}
        batch = _flag(request, "batch")
        uses = [
            use
            for use in await _uses(context, caller, window)
            if use.work.operation in KINDS[kind]
            and batch in (None, use.work.is_batch)
            and all(value(use) in values for value, values in wanted.items())
        ]
        data = [
            {
                "object": "bucket",
                "start_time": start,
                "end_time": end,
                "results": [_result(kind, group, tokens) for group, tokens in results],
            }
            for start, end, results in _summed(uses, window, groups, GROUPS)
        ]
        return _page("page", data, window)

    return usage_of_kind


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
    uses: Iterable[HourOfUse],
    window: UsageWindow,
    groups: Sequence[str],
    values: Mapping[str, Callable[[HourOfUse], GroupValue]],
) -> list[tuple[int, int, list[tuple[dict[str, GroupValue], Tokens]]]]:
    """Return for each bucket its start, its end, and the sums of each group."""
    buckets: dict[int, defaultdict[tuple[GroupValue, ...], list[Tokens]]] = {
        start: defaultdict(list) for start in window.starts
    }
    for use in uses:
        key = tuple(values[name](use) for name in groups)
        buckets[window.starts[(use.hour - window.starts.start) // window.width]][key].append(use.tokens)
    return [
        (
            start,
            min(start + window.width, window.end),
            [
                (dict(zip(groups, key, strict=True)), Tokens(*map(sum, zip(*sums[key], strict=True))))
                for key in sorted(sums, key=lambda key: [(value is None, str(value)) for value in key])
            ],
        )
        for start, sums in buckets.items()
    ]


def _amounts(tokens: Tokens) -> dict[str, object]:
    """Return the amounts as JSON, cached tokens also by tier and level."""
    flat = {name: amount for name, amount in tokens._asdict().items() if name not in CACHE_AMOUNTS}
    return {**flat, "cached_tokens_by_tier": tokens.cached_by_tier()}


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


def _result(kind: str, group: Mapping[str, GroupValue], tokens: Tokens) -> dict[str, object]:
    result: dict[str, object] = {
        "object": f"organization.usage.{kind}.result",
        "input_tokens": tokens.prompt_tokens,
        "num_model_requests": tokens.requests,
        "project_id": group.get("project_id"),
        "user_id": group.get("user_id"),
        "api_key_id": None,
        "model": group.get("model"),
    }
    if kind != "completions":
        return result
    return result | {
        "output_tokens": tokens.output_tokens,
        "input_cached_tokens": tokens.cached_tokens,
        "input_audio_tokens": 0,
        "output_audio_tokens": 0,
        "batch": group.get("batch"),
        "service_tier": None,
    }


def _flag(request: Request, name: str) -> bool | None:
    text = request.query_params.get(name)
    if text not in (None, "true", "false"):
        raise InvalidRequestError(f"'{name}' should be true or false.", param=name)
    return None if text is None else text == "true"


def _page(kind: str, data: Sequence[object], window: UsageWindow) -> Response:
    more = None if window.more is None else str(window.more)
    body = {"object": kind, "data": data, "has_more": more is not None, "next_page": more}
    return Response(orjson.dumps(body), media_type="application/json")

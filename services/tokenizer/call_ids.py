"""Ids of earlier calls in the form that a notation's templates accept, whatever API they came by."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from common.types import ToolStyle

if TYPE_CHECKING:
    from collections.abc import Sequence

# A message as templates read it.
Json: TypeAlias = dict[str, Any]  # Any: free JSON

# Mistral's templates accept nine letters and digits; Kimi's write the id in place of the tool's name.
_ACCEPTED: Final = {
    ToolStyle.MISTRAL: re.compile(r"[A-Za-z0-9]{9}"),
    ToolStyle.MISTRAL_ARGS: re.compile(r"[A-Za-z0-9]{9}"),
    ToolStyle.KIMI_K2: re.compile(r"functions\.\S+:[0-9]+"),
}


def with_accepted_ids(messages: Sequence[Json], style: ToolStyle | None) -> list[Json]:
    """Return `messages` with ids of calls, and of their results, that the templates of `style` accept."""
    accepted = _ACCEPTED.get(style) if style is not None else None
    if style is None or accepted is None:
        return list(messages)
    ids: dict[object, str] = {}
    changed = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            message = message | {"tool_calls": [_with_id(call, style, accepted, ids) for call in calls]}
        if message.get("tool_call_id") in ids:
            message = message | {"tool_call_id": ids[message["tool_call_id"]]}
        changed.append(message)
    return changed


def _with_id(call: object, style: ToolStyle, accepted: re.Pattern[str], ids: dict[object, str]) -> object:
    if not isinstance(call, dict) or not isinstance(id_ := call.get("id"), str):
        return call
    if accepted.fullmatch(id_):
        ids[id_] = id_
        return call
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if style is ToolStyle.KIMI_K2:
        ids[id_] = f"functions.{name}:{len(ids)}"
    else:
        ids[id_] = hashlib.sha256(id_.encode()).hexdigest()[:9]
    return call | {"id": ids[id_]}

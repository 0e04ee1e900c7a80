"""W3C trace context: continues the caller's trace or starts a new one."""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING

from common.types import TraceContext

if TYPE_CHECKING:
    from collections.abc import Mapping

TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
MAX_TRACESTATE_CHARACTERS = 512


def trace_of(headers: Mapping[str, str]) -> TraceContext:
    """Return the trace context of this request's span.

    A valid `traceparent` header names the trace to continue (https://www.w3.org/TR/trace-context/); without one, a new,
    unsampled trace starts, and a `tracestate` is dropped, as the standard requires.
    """
    match = TRACEPARENT.fullmatch(headers.get("traceparent", "").strip())
    span = _nonzero_hex(8)
    if match is None or not _is_valid(match):
        return TraceContext(f"00-{_nonzero_hex(16)}-{span}-00")
    state = headers.get("tracestate", "").strip()
    keep = bool(state) and len(state) <= MAX_TRACESTATE_CHARACTERS and state.isascii() and state.isprintable()
    return TraceContext(f"00-{match[2]}-{span}-{match[4]}", state if keep else None)


def _is_valid(match: re.Match[str]) -> bool:
    version, trace, parent, _, rest = match.groups()
    if version == "ff" or (version == "00" and rest):
        return False
    return int(trace, 16) != 0 and int(parent, 16) != 0


def _nonzero_hex(size: int) -> str:
    value = secrets.token_hex(size)
    return value if int(value, 16) else _nonzero_hex(size)

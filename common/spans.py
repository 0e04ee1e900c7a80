"""Parts of a request's way through the services, as traces show them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.types import TraceContext

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened within a span, at `at` seconds since 1970."""

    name: str
    at: float
    attributes: Mapping[str, Value] | None = None


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A part of a request's way, from `start` to `end` in seconds since 1970.

    It is a child of the span that `trace` names; with `is_root`, it is that span itself, and `parent_id` its parent.
    """

    name: str
    trace: TraceContext
    start: float
    end: float
    attributes: Mapping[str, Value]
    events: Sequence[SpanEvent] = ()
    error: str | None = None
    is_root: bool = False
    parent_id: str | None = None

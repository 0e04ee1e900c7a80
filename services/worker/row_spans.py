"""Spans of traced rows, from the plans and results that pass by."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.spans import SpanEvent
from common.tracing import is_recorded, record

if TYPE_CHECKING:
    from common.steps import RowOpen, StepPlan, StepResult

# Of one row; a long prompt has many chunks.
MOST_EVENTS = 128


@dataclass(slots=True)
class _TracedRow:
    opened: RowOpen
    opened_at: float
    passes: int = 0
    events: list[SpanEvent] = field(default_factory=list)


class RowSpans:
    """Reports one span for each time that a traced choice has a row; costs nothing while no row is traced."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._rows: dict[int, _TracedRow] = {}
        # Prefill chunks of traced rows by their plan, until its first result.
        self._chunks: dict[int, list[tuple[int, int]]] = {}

    def note_plan(self, plan: StepPlan) -> None:
        """Follow a plan that the engine gets."""
        for row in plan.closes:
            self._end(row)
        for opened in plan.opens:
            self._end(opened.row)
            if is_recorded(opened.trace):
                self._rows[opened.row] = _TracedRow(opened, time.time())
        if self._rows:
            chunks = [(int(chunk.row), chunk.length) for chunk in plan.prefills if chunk.row in self._rows]
            if chunks:
                self._chunks[plan.step_id] = chunks

    def note_result(self, result: StepResult) -> None:
        """Follow the result of a pass."""
        if not self._rows or result.partial:
            return
        now = time.time()
        for row, tokens in self._chunks.pop(result.step_id, ()):
            traced = self._rows.get(row)
            if traced is not None and len(traced.events) < MOST_EVENTS:
                traced.events.append(SpanEvent("prefill_chunk", now, {"tokens": tokens}))
        for row in result.rows.tolist():
            if row in self._rows:
                self._rows[row].passes += 1
        for stop in result.stops:
            self._end(stop.row)

    def close(self) -> None:
        """End the spans of all rows, as their session ends."""
        for row in list(self._rows):
            self._end(row)
        self._chunks.clear()

    def _end(self, row: int) -> None:
        traced = self._rows.pop(row, None)
        if traced is None:
            return
        opened = traced.opened
        attributes = {
            "pando.rank": self._rank,
            "pando.row.known_tokens": len(opened.token_ids),
            "pando.row.cached_tokens": opened.computed_tokens,
            "pando.row.passes": traced.passes,
        }
        record("execute", opened.trace, traced.opened_at, time.time(), attributes, traced.events)

"""Preemption of running rows for a waiting sequence of higher priority."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from services.scheduler.core.in_flight_prefixes import InFlightPrefixes
    from services.scheduler.core.memory import KvMemory
    from services.scheduler.core.queue import ClassQueues
    from services.scheduler.core.reservations import Reservations
    from services.scheduler.core.rows import RowSlots
    from services.scheduler.core.sequence import Sequence


class Preemption:
    """Preempts rows of strictly lower priority for the next waiting sequence, if they suffice.

    Churn is bounded: a sequence is preempted at most `limit` times, only for a higher priority, and none is preempted
    if all candidates together would not suffice. Computed pages stay in the cache while there is room for them, and a
    preempted sequence continues later with the same tokens.
    """

    def __init__(
        self, rows: RowSlots, queue: ClassQueues, memory: KvMemory, reservations: Reservations, limit: int
    ) -> None:
        """Read state that the core owns; a `limit` of 0 disables preemption."""
        self.count = 0
        self._rows = rows
        self._queue = queue
        self._memory = memory
        self._reservations = reservations
        self._limit = limit
        # Handle of the sequence that did not fit as expected: the pages it matched in the cache were not evictable.
        self._misjudged: int | None = None

    def victim(self, candidates: Iterable[Sequence]) -> Sequence:
        """Return the youngest row of the lowest priority."""
        return min(candidates, key=lambda sequence: (sequence.request.options.priority, -sequence.handle))

    def reserved_victims(self, sequence: Sequence | None = None) -> list[Sequence]:
        """Return those that would start last first; for a waiting sequence, those that would start after it."""
        holders = self._reservations.holders
        if sequence is None or not holders:
            return self._queue.ordered(holders, self._memory.match)[::-1]
        order = self._queue.ordered([*holders, sequence], self._memory.match)
        return order[: order.index(sequence) : -1]

    def note_refusal(self, sequence: Sequence) -> None:
        """Record that memory did not suffice to admit a sequence."""
        self._misjudged = sequence.handle

    def make_room(
        self, most_rows: int, in_flight: Callable[[], InFlightPrefixes], retract: Callable[[Sequence], None]
    ) -> None:
        """Retract rows of lower priority until the next waiting sequence fits."""
        highest = self._queue.highest_priority
        if not self._limit or highest is None:
            return
        movable = [
            sequence
            for sequence in self._rows.occupants()
            if sequence.request.options.priority < highest and sequence.preemptions < self._limit
        ]
        if not movable:
            return
        candidates = self._queue.candidates(self._memory.match)
        first = next((sequence for sequence in candidates if not sequence.awaits_arrival), None)
        if first is None or in_flight().is_awaited(first):
            return
        lower = [sequence for sequence in movable if sequence.request.options.priority < first.request.options.priority]
        lower.sort(key=lambda sequence: (sequence.request.options.priority, -sequence.handle))
        if not lower:
            return
        # Nothing has to be computed again for these.
        while self._missing_pages(first, self._rows.running) > 0:
            if not self._reservations.take(self.reserved_victims(first)):
                break
        if not self._can_suffice(first, lower):
            return
        for victim in lower:
            if self._fits(first):
                return
            victim.preemptions += 1
            self.count += 1
            retract(victim)

    def _fits(self, sequence: Sequence) -> bool:
        return bool(self._rows.free_slots) and self._missing_pages(sequence, self._rows.running) <= 0

    def _can_suffice(self, sequence: Sequence, victims: list[Sequence]) -> bool:
        pages = sum(int(self._rows.page_count[victim.row]) for victim in victims if victim.row is not None)
        return self._missing_pages(sequence, self._rows.running - len(victims)) <= pages

    def _missing_pages(self, sequence: Sequence, spare_pages: int) -> int:
        page_size = self._rows.page_size
        found = 0 if sequence.handle == self._misjudged else self._memory.match(sequence) // page_size
        return -(-len(sequence.token_ids) // page_size) - found + spare_pages - self._memory.available_pages

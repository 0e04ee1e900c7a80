"""Which running rows make way for a waiting sequence of higher priority."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from services.scheduler.core.memory import KvMemory
    from services.scheduler.core.queue import WaitingQueue
    from services.scheduler.core.rows import RowTable
    from services.scheduler.core.sequence import Sequence
    from services.scheduler.core.twins import Twins


class Preemption:
    """Makes room for the sequence that goes next, if rows of strictly lower priority can give it.

    Nobody can make the rows churn: a row makes way `limit` times at most, only for a higher class, and nobody makes
    way if all who may would not suffice. What was computed stays in the cache while there is room for it, and a row
    goes on later with the same tokens.
    """

    def __init__(self, rows: RowTable, queue: WaitingQueue, memory: KvMemory, limit: int) -> None:
        """Look at state that the core owns; with a `limit` of 0 nobody makes way."""
        self.count = 0
        self._rows = rows
        self._queue = queue
        self._memory = memory
        self._limit = limit
        # The sequence that did not fit though it seemed to: what it found in the cache was not spare.
        self._misjudged: int | None = None

    def victim(self, candidates: Iterable[Sequence]) -> Sequence:
        """Return the youngest row of the lowest priority."""
        return min(candidates, key=lambda sequence: (sequence.request.priority, -sequence.handle))

    def note_refusal(self, sequence: Sequence) -> None:
        """Learn that there was no memory for a sequence."""
        self._misjudged = sequence.handle

    def make_room(self, most_rows: int, twins: Callable[[], Twins], retract: Callable[[Sequence], None]) -> None:
        """Retract rows of lower priority that stand in the way of the sequence that goes next."""
        highest = self._queue.highest_priority
        if not self._limit or highest is None:
            return
        movable = [
            sequence
            for sequence in self._rows.occupants()
            if sequence.request.priority < highest and sequence.preemptions < self._limit
        ]
        if not movable:
            return
        first = next(iter(self._queue.candidates(self._memory.match)), None)
        if first is None or twins().is_awaited(first):
            return
        lower = [sequence for sequence in movable if sequence.request.priority < first.request.priority]
        lower.sort(key=lambda sequence: (sequence.request.priority, -sequence.handle))
        if not lower or not self._can_suffice(first, lower):
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

"""In-flight prefix deduplication: prompts being computed that waiting sequences of the same view share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.types import CacheMode

if TYPE_CHECKING:
    from collections.abc import Hashable

    from common.types import TokenIds
    from services.scheduler.core.memory import KvMemory
    from services.scheduler.core.rows import RowSlots
    from services.scheduler.core.sequence import Sequence


class InFlightPrefixes:
    """Decides which sequences wait for a running row instead of computing the same pages at the same time.

    Only rows in the requester's own view count: a wait is visible in the time to first token, as a hit is. It ends when
    the common prefix is computed, or when the row ends or is retracted.
    """

    def __init__(self, rows: RowSlots, memory: KvMemory) -> None:
        """Index the rows that run now."""
        self._rows = rows
        self._memory = memory
        self._by_view: dict[Hashable, list[Sequence]] = {}
        for sequence in rows.occupants():
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """Add a row that has just been opened."""
        if sequence.is_prefilled or sequence.request.options.cache_mode is CacheMode.NONE:
            return
        view = self._memory.cache.view_of(sequence.request.view)
        if view is not None:
            self._by_view.setdefault(view, []).append(sequence)

    def is_awaited(self, sequence: Sequence) -> bool:
        """Return whether pages that the sequence could soon match are being computed now."""
        if not self._by_view or sequence.request.options.cache_mode is CacheMode.NONE:
            return False
        view = self._memory.cache.view_of(sequence.request.view)
        found: int | None = None
        for other in self._by_view.get(view, ()):
            if other.row is None or other.is_prefilled:
                continue
            common = self._common_tokens(sequence.cacheable_ids, other.key_of(self._rows.tokens(other.row)))
            if self._memory.states is not None:
                common = self._memory.states.wanted_within(other.row, common)
            if common <= int(self._rows.computed[other.row]):
                continue
            found = self._memory.match(sequence) if found is None else found
            if common > found:
                return True
        return False

    def _common_tokens(self, ours: TokenIds, theirs: TokenIds) -> int:
        """Return the number of leading tokens of `ours` that the cache could match with `theirs`, in whole pages."""
        length = min(len(ours) - 1, len(theirs))
        differs = ours[:length] != theirs[:length]
        common = int(differs.argmax()) if differs.any() else length
        return common // self._rows.page_size * self._rows.page_size

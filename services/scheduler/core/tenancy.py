"""Removal of sequences from their rows: pages kept in the cache, pages freed, changes sent to the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.steps import PageReplacement
    from common.types import RowSlot
    from services.scheduler.core.memory import KvMemory
    from services.scheduler.core.rows import RowTable
    from services.scheduler.core.sequence import Sequence


class Tenancy:
    """Owns the row changes that the next plan has to carry.

    Pages can be granted again as soon as a row is vacated: plans run in order and closes come first in them, so the new
    owner of the pages writes to them after the old row's last step.
    """

    def __init__(self, rows: RowTable, memory: KvMemory) -> None:
        self._rows = rows
        self._memory = memory
        self._closes: list[RowSlot] = []
        self._replacements: list[PageReplacement] = []

    @property
    def has_changes(self) -> bool:
        """Whether there are changes that the workers have not received."""
        return bool(self._closes or self._replacements)

    def take_changes(self) -> tuple[tuple[RowSlot, ...], tuple[PageReplacement, ...]]:
        """Return closes and replacements for a plan, and clear them."""
        closes = tuple(self._closes)
        replacements = tuple(change for change in self._replacements if change.row not in self._closes)
        self._closes, self._replacements = [], []
        return closes, replacements

    def keep_computed(self, sequence: Sequence) -> None:
        """Insert the row's confirmed whole pages into the cache; the row switches to the cache's copy."""
        row = sequence.row
        assert row is not None, "only a running sequence has computed anything"
        self._replacements.extend(self._memory.keep(sequence, self._rows))

    def vacate(self, sequence: Sequence) -> None:
        """Insert the computed pages into the cache, free the rest, and close the row."""
        row = sequence.row
        assert row is not None, "only a running sequence has a row"
        self._memory.keep(sequence, self._rows)
        self._memory.free(sequence, self._rows)
        self._rows.close(row)
        self._closes.append(row)

    def forget_all(self) -> None:
        """Drop the pending changes, as the workers' rows are gone."""
        self._closes, self._replacements = [], []

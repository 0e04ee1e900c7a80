"""Changes of rows that plans carry to the workers: page grants, replaced pages, closed rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.steps import PageGrants
from services.scheduler.core.adapter_slots import AdapterSlots

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from common.steps import PageIds, PageReplacement
    from common.types import RowSlot
    from services.scheduler.core.memory import KvMemory
    from services.scheduler.core.rows import RowSlots
    from services.scheduler.core.sequence import Sequence


class Granting:
    """Appends pages to rows' page tables, and collects the grants for the workers."""

    def __init__(self, rows: RowSlots, memory: KvMemory) -> None:
        """Start without grants; `memory` maps pages to their pages in a sliding-window pool."""
        self._rows = rows
        self._memory = memory
        self._given: list[PageGrants] = []

    def add(self, rows: NDArray[np.int64], counts: NDArray[np.int64], pages: PageIds) -> None:
        """Give each of `rows` the next counts[i] > 0 of `pages`; a row may occur only once."""
        self._rows.grant_pages(rows, counts, pages)
        owners = rows if len(rows) == len(pages) else np.repeat(rows, counts)
        self._given.append(PageGrants(owners.astype(np.int32), pages, self._memory.window_pages_of(pages)))

    def grants(self) -> PageGrants:
        """Return all grants, in order."""
        if len(self._given) <= 1:
            return self._given[0] if self._given else PageGrants()
        return PageGrants(
            np.concatenate([grants.rows for grants in self._given]),
            np.concatenate([grants.pages for grants in self._given]),
            np.concatenate([grants.window_pages for grants in self._given]),
        )


class Tenancy:
    """Owns the row changes that the next plan has to carry.

    Pages can be granted again as soon as a row is vacated: plans run in order and closes come first in them, so the new
    owner of the pages writes to them after the old row's last step.
    """

    def __init__(self, rows: RowSlots, memory: KvMemory, adapters: AdapterSlots | None = None) -> None:
        """Change `rows`; `adapters` are the places of those that they use, by default none."""
        self.adapters = adapters or AdapterSlots(0)
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
        if sequence.adapter is not None:
            self.adapters.give_back(sequence.adapter.digest)

    def forget_all(self) -> None:
        """Drop the pending changes, as the workers' rows are gone, and what was in their slots of adapters."""
        self.adapters.forget_all()
        self._closes, self._replacements = [], []

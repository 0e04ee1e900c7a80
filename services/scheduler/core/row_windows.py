"""References of running rows to the page pool of sliding-window layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.steps import NO_PAGES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.steps import PageIds
    from common.types import RowSlot
    from services.scheduler.cache.types import PrefixLock
    from services.scheduler.cache.window_pages import WindowPages
    from services.scheduler.core.rows import RowSlots


class RowWindows:
    """Tracks which pages lie in rows' windows; `RowSlots.window_first` is the index of each row's first one.

    Rows' window pages are released when a plan is made and can be granted again in the same plan: each of its passes
    reads from the first page that its first pass needs, earlier plans are computed before it, and the new owner of a
    page writes to it in this plan at the earliest.
    """

    def __init__(self, pool: WindowPages) -> None:
        """Use a pool from which nothing else allocates."""
        self.pool = pool

    def fits(self, pages: int, spare_pages: int) -> bool:
        """Return whether a row that needs `pages` new pages fits: it needs at most the pages of its window at once."""
        return min(pages, self.pool.row_pages(0)) + spare_pages <= self.pool.available_pages

    def enter(self, lock: PrefixLock) -> None:
        """Reference the window pages that the next token after a lock's pages attends to."""
        self.pool.need(lock.pages[self._first_seen(lock) :])

    def leave(self, lock: PrefixLock) -> None:
        """Undo `enter`."""
        self.pool.release(lock.pages[self._first_seen(lock) :])

    def begin(self, row: RowSlot, lock: PrefixLock, rows: RowSlots) -> PageIds:
        """Transfer the references of `enter` to a row; return the window pages."""
        rows.window_first[row] = first = self._first_seen(lock)
        return self.pool.window_pages_of(lock.pages[first:])

    def slide(self, rows: RowSlots) -> None:
        """Release the window pages that the next passes of running rows no longer need."""
        firsts = np.minimum(self.pool.first_page(rows.planned), rows.page_count)
        for row in np.flatnonzero(rows.occupied & (firsts > rows.window_first)).tolist():
            self.pool.release(rows.pages[row, rows.window_first[row] : firsts[row]])
            rows.window_first[row] = firsts[row]

    def end(self, row: RowSlot, rows: RowSlots) -> None:
        """Release all window pages of a row."""
        self.pool.release(self._needed(row, rows))
        rows.window_first[row] = rows.page_count[row]

    def before_repointing(self, row: RowSlot, first: int, rows: RowSlots) -> None:
        """Release the window pages of a row from page index `first` on, before its pages are replaced by duplicates."""
        self.pool.release(self._needed(row, rows, first))

    def after_repointing(self, row: RowSlot, first: int, count: int, rows: RowSlots) -> PageIds:
        """Reference the window pages of the new pages; return those the row needs of the `count` from `first` on."""
        self.pool.need(self._needed(row, rows, first))
        return self.pool.window_pages_of(rows.pages[row, max(first, int(rows.window_first[row])) : first + count])

    def faults(self, rows: RowSlots, locks: Iterable[PrefixLock], device_pages: int) -> list[str]:
        """Return inconsistencies of the pool; besides rows, `locks` hold the pages that their next token attends to."""
        tables = [self._needed(sequence.row, rows) for sequence in rows.occupants() if sequence.row is not None]
        tables += [lock.pages[self._first_seen(lock) :] for lock in locks]
        needed = np.bincount(np.concatenate([NO_PAGES, *tables]), minlength=device_pages)
        return self.pool.faults(needed)

    def _needed(self, row: RowSlot, rows: RowSlots, first: int = 0) -> PageIds:
        return rows.page_table(row)[max(first, int(rows.window_first[row])) :]

    def _first_seen(self, lock: PrefixLock) -> int:
        return self.pool.first_seen(lock.matched_tokens)

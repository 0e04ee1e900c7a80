"""What running rows need of the pool of the layers that attend to a window only."""

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
    from services.scheduler.core.rows import RowTable


class RowWindows:
    """Keeps the pool told of which pages lie in rows' windows; `RowTable.window_first` is where each one's begins.

    Rows' pages are given back when a plan is made, for that plan already: its passes read from the first page that its
    first pass needs, plans before it are computed before it, and whoever is granted a page writes to it in it.
    """

    def __init__(self, pool: WindowPages) -> None:
        """Work on a pool that nobody else takes from."""
        self.pool = pool

    def fits(self, pages: int, spare_pages: int) -> bool:
        """Whether a row that needs so many new pages could go on: it needs no more at once than its window."""
        return min(pages, self.pool.row_pages(0)) + spare_pages <= self.pool.available_pages

    def enter(self, lock: PrefixLock) -> None:
        """Hold the window pages that the next token after a lock's pages attends to."""
        self.pool.need(lock.pages[self._first_seen(lock) :])

    def leave(self, lock: PrefixLock) -> None:
        """Undo `enter`."""
        self.pool.release(lock.pages[self._first_seen(lock) :])

    def begin(self, row: RowSlot, lock: PrefixLock, rows: RowTable) -> PageIds:
        """Take note that what `enter` holds is a row's now; return the twins."""
        rows.window_first[row] = first = self._first_seen(lock)
        return self.pool.twins_of(lock.pages[first:])

    def slide(self, rows: RowTable) -> None:
        """Give back what the next passes of running rows do not need any more."""
        firsts = np.minimum(self.pool.first_page(rows.planned), rows.page_count)
        for row in np.flatnonzero(rows.occupied & (firsts > rows.window_first)).tolist():
            self.pool.release(rows.pages[row, rows.window_first[row] : firsts[row]])
            rows.window_first[row] = firsts[row]

    def end(self, row: RowSlot, rows: RowTable) -> None:
        """Give back all that a row needs."""
        self.pool.release(self._needed(row, rows))
        rows.window_first[row] = rows.page_count[row]

    def before_repointing(self, row: RowSlot, first: int, rows: RowTable) -> None:
        """Let go of a row's pages from index `first` on, which others with the same content take the place of."""
        self.pool.release(self._needed(row, rows, first))

    def after_repointing(self, row: RowSlot, first: int, count: int, rows: RowTable) -> PageIds:
        """Hold them; return the window pages of those of the `count` pages from `first` on that it needs."""
        self.pool.need(self._needed(row, rows, first))
        return self.pool.twins_of(rows.pages[row, max(first, int(rows.window_first[row])) : first + count])

    def faults(self, rows: RowTable, locks: Iterable[PrefixLock], device_pages: int) -> list[str]:
        """Return what is wrong with the pool, where besides rows `locks` hold what the next token sees."""
        tables = [self._needed(sequence.row, rows) for sequence in rows.occupants() if sequence.row is not None]
        tables += [lock.pages[self._first_seen(lock) :] for lock in locks]
        needed = np.bincount(np.concatenate([NO_PAGES, *tables]), minlength=device_pages)
        return self.pool.faults(needed)

    def _needed(self, row: RowSlot, rows: RowTable, first: int = 0) -> PageIds:
        return rows.page_table(row)[max(first, int(rows.window_first[row])) :]

    def _first_seen(self, lock: PrefixLock) -> int:
        return self.pool.first_seen(lock.matched_tokens)

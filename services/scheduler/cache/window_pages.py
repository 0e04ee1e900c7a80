"""Page pool of sliding-window layers: each of its pages is the window page of a page of the other layers.

A window page holds the same tokens as its page, for the sliding-window layers. So a row's second page table follows
from its first, a node needs no second list of pages, and freeing a page frees its window page. Window pages come and go
while their pages stay: a row needs those in its window; the others are kept for later matches until room is needed.
README.md describes the design.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from common.steps import PageIds

_NONE = -1
NO_PAGES: PageIds = np.empty(0, np.int32)
NO_PAGES.flags.writeable = False


class WindowPages:
    """Owns the window pages: their mapping, the number of rows that need them, and their order of eviction.

    `free_pages + evictable_pages + protected_pages = capacity`, all O(1).
    """

    def __init__(
        self, capacity: int, device_pages: int, *, page_size: int, window_tokens: int, keeps: bool = True
    ) -> None:
        """Start with `capacity` free window pages for `device_pages` pages.

        Args:
            capacity: Pages of this pool.
            device_pages: Pages of the other layers' pool.
            page_size: Tokens per page, in both.
            window_tokens: Number of tokens that a query attends to, itself included.
            keeps: Whether pages that no row needs are kept for later matches.
        """
        assert window_tokens >= 1
        self.capacity = capacity
        self.window_tokens = window_tokens
        self._page_size = page_size
        self._keeps = keeps
        self._window_page: NDArray[np.int32] = np.full(device_pages, _NONE, np.int32)
        # Number of rows' windows that each page lies in.
        self._needed: NDArray[np.int32] = np.zeros(device_pages, np.int32)
        self._free = list(range(capacity - 1, -1, -1))
        # Pages whose window page no row needs, in order of eviction.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free_pages(self) -> int:
        """Pages of the pool that are not assigned."""
        return len(self._free)

    @property
    def evictable_pages(self) -> int:
        """Window pages that no row needs."""
        return len(self._idle)

    @property
    def protected_pages(self) -> int:
        """Window pages in the window of some row."""
        return self.capacity - len(self._free) - len(self._idle)

    @property
    def available_pages(self) -> int:
        """Window pages that could be allocated now."""
        return len(self._free) + len(self._idle)

    def first_seen(self, tokens: int) -> int:
        """Return the index of the first page that the token after `tokens` others attends to."""
        return max(tokens - self.window_tokens + 1, 0) // self._page_size

    def first_page(self, tokens: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of the first page that a row with `tokens` computed tokens needs; elementwise.

        That is one page more than its next token attends to: the computed tokens end within a page, and a later match
        of them begins before that page.
        """
        before = np.maximum(np.asarray(tokens, np.int64) - self.window_tokens + 1 - self._page_size, 0)
        first: NDArray[np.int64] = before // self._page_size
        return first

    def row_pages(self, tokens: int) -> int:
        """Return the maximum number of window pages that a row needs while it computes `tokens` tokens at once."""
        return (self.window_tokens + self._page_size + tokens) // self._page_size + 2

    def usable_pages(self, pages: PageIds) -> int:
        """Return the number of a path's leading pages that a row can continue from: their last window is complete."""
        count = len(pages)
        lengths = np.arange(1, count + 1) * self._page_size
        firsts = np.maximum(lengths - self.window_tokens + 1, 0) // self._page_size
        gaps = np.where(self._window_page[pages] >= 0, _NONE, np.arange(count))
        usable = np.flatnonzero(np.maximum.accumulate(gaps) < firsts) if count else gaps
        return int(usable[-1]) + 1 if len(usable) else 0

    def window_pages_of(self, pages: PageIds) -> PageIds:
        """Return the window pages of pages that all have one, [pages] int32."""
        windows = self._window_page[pages]
        assert (windows >= 0).all(), f"pages {pages[windows < 0]} have no window page"
        return windows

    # --- rows ---

    def pair(self, pages: PageIds) -> None:
        """Assign window pages to new pages, which a row needs; there must be room."""
        assert len(pages) <= self.available_pages, "asked before"
        while len(self._free) < len(pages):
            self._drop(next(iter(self._idle)))
        assert (self._window_page[pages] < 0).all(), "new pages have no window page"
        taken = self._free[len(self._free) - len(pages) :]
        del self._free[len(self._free) - len(pages) :]
        self._window_page[pages] = taken[::-1]
        self._needed[pages] = 1

    def need(self, pages: PageIds) -> None:
        """Count one more row that needs the window pages of pages, which must exist."""
        assert (self._window_page[pages] >= 0).all(), "what a row needs is there"
        for page in pages[self._needed[pages] == 0].tolist():
            del self._idle[page]
        self._needed[pages] += 1

    def release(self, pages: PageIds) -> None:
        """Count one row less that needs the window pages of pages; the first of them are evicted first."""
        assert (self._needed[pages] > 0).all(), "only needed pages are given back"
        self._needed[pages] -= 1
        for page in pages[self._needed[pages] == 0].tolist():
            self._idle[page] = None
            if not self._keeps:
                self._drop(page)

    # --- the pages' allocator ---

    def forget(self, pages: PageIds) -> None:
        """Free the window pages of pages that are free."""
        assert not self._needed[pages].any(), "a row's pages are not free"
        for page in pages[self._window_page[pages] >= 0].tolist():
            self._drop(page)

    def adopt(self, old: PageIds, new: PageIds) -> None:
        """Move window pages that no row needs from `old` to those of the equal pages `new` that have none."""
        moves = (self._window_page[new] < 0) & (self._window_page[old] >= 0) & (self._needed[old] == 0)
        for page, heir in zip(old[moves].tolist(), new[moves].tolist(), strict=True):
            self._window_page[heir], self._window_page[page] = self._window_page[page], _NONE
            del self._idle[page]
            self._idle[heir] = None

    def repair(self) -> None:
        """Reset the counts: no row needs any window page."""
        for page in np.flatnonzero(self._needed).tolist():
            self._idle[page] = None
        self._needed[:] = 0

    def faults(self, needed: NDArray[np.int64]) -> list[str]:
        """Return the faults, given that each page lies in `needed` [device pages] rows' windows.

        O(capacity), for audits.
        """
        windows = self._window_page[self._window_page >= 0]
        found = []
        if len(np.unique(np.concatenate([windows, np.array(self._free, np.int32)]))) != self.capacity:
            found.append("assigned and free window pages are not each page of the pool once")
        if len(windows) + len(self._free) != self.capacity:
            found.append(f"{len(windows)} assigned and {len(self._free)} free window pages of {self.capacity}")
        if (self._needed != needed).any():
            found.append(
                f"pages {np.flatnonzero(self._needed != needed).tolist()} are needed by other rows than counted"
            )
        idle = np.flatnonzero((self._window_page >= 0) & (self._needed == 0))
        if sorted(self._idle) != idle.tolist():
            found.append("what no row needs is not what may go")
        return found

    def _drop(self, page: int) -> None:
        del self._idle[page]
        self._free.append(int(self._window_page[page]))
        self._window_page[page] = _NONE

"""Pages of the layers that attend to a window only: each is the twin of a page of the other layers.

A twin holds the same tokens as its page, for the layers with a window. So a row's second page table follows from its
first, a node needs no second list of pages, and whoever frees a page frees its twin. Twins come and go while their
pages stay: a row needs those in its window; the others are kept for prefixes to be found, until room is needed.
README.md tells the design.
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
    """Owns the twins: which page has which, which rows need them, and which go first.

    `free_pages + evictable_pages + protected_pages = capacity`, all O(1).
    """

    def __init__(
        self, capacity: int, device_pages: int, *, page_size: int, window_tokens: int, keeps: bool = True
    ) -> None:
        """Start with `capacity` free twins for `device_pages` pages.

        Args:
            capacity: Pages of the pool.
            device_pages: Pages of the other layers' pool.
            page_size: Tokens per page, in both.
            window_tokens: How many tokens a query sees, itself included.
            keeps: Whether what no row needs is kept for others to find.
        """
        assert window_tokens >= 1
        self.capacity = capacity
        self.window_tokens = window_tokens
        self._page_size = page_size
        self._keeps = keeps
        self._twins: NDArray[np.int32] = np.full(device_pages, _NONE, np.int32)
        # In how many rows' windows each page lies.
        self._needed: NDArray[np.int32] = np.zeros(device_pages, np.int32)
        self._free = list(range(capacity - 1, -1, -1))
        # Pages whose twin no row needs, in the order in which they go.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free_pages(self) -> int:
        """Pages that are nobody's twin."""
        return len(self._free)

    @property
    def evictable_pages(self) -> int:
        """Twins that no row needs."""
        return len(self._idle)

    @property
    def protected_pages(self) -> int:
        """Twins in the window of some row."""
        return self.capacity - len(self._free) - len(self._idle)

    @property
    def available_pages(self) -> int:
        """Twins that could be had now."""
        return len(self._free) + len(self._idle)

    def first_seen(self, tokens: int) -> int:
        """Return the first page that the token behind `tokens` others sees."""
        return max(tokens - self.window_tokens + 1, 0) // self._page_size

    def first_page(self, tokens: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first page of a row's table that it needs, with `tokens` computed; elementwise.

        That is one page more than its next token sees: what it has computed ends within a page, and whoever finds it
        later begins before that page.
        """
        before = np.maximum(np.asarray(tokens, np.int64) - self.window_tokens + 1 - self._page_size, 0)
        first: NDArray[np.int64] = before // self._page_size
        return first

    def row_pages(self, tokens: int) -> int:
        """Return how many twins a row needs at most while it computes `tokens` at once."""
        return (self.window_tokens + self._page_size + tokens) // self._page_size + 2

    def usable_pages(self, pages: PageIds) -> int:
        """Return how many leading pages of a path a row can go on from: what its next token sees must be there."""
        count = len(pages)
        lengths = np.arange(1, count + 1) * self._page_size
        firsts = np.maximum(lengths - self.window_tokens + 1, 0) // self._page_size
        gaps = np.where(self._twins[pages] >= 0, _NONE, np.arange(count))
        usable = np.flatnonzero(np.maximum.accumulate(gaps) < firsts) if count else gaps
        return int(usable[-1]) + 1 if len(usable) else 0

    def twins_of(self, pages: PageIds) -> PageIds:
        """Return the twins of pages that all have one, [pages] int32."""
        twins = self._twins[pages]
        assert (twins >= 0).all(), f"pages {pages[twins < 0]} have no twin"
        return twins

    # --- rows ---

    def pair(self, pages: PageIds) -> None:
        """Give new pages twins, which a row needs; there must be room."""
        assert len(pages) <= self.available_pages, "asked before"
        while len(self._free) < len(pages):
            self._drop(next(iter(self._idle)))
        assert (self._twins[pages] < 0).all(), "new pages have no twin"
        taken = self._free[len(self._free) - len(pages) :]
        del self._free[len(self._free) - len(pages) :]
        self._twins[pages] = taken[::-1]
        self._needed[pages] = 1

    def need(self, pages: PageIds) -> None:
        """Take note that one more row needs the twins of pages, which are there."""
        assert (self._twins[pages] >= 0).all(), "what a row needs is there"
        for page in pages[self._needed[pages] == 0].tolist():
            del self._idle[page]
        self._needed[pages] += 1

    def release(self, pages: PageIds) -> None:
        """Take note that a row needs the twins of pages no more; the first of them go first."""
        assert (self._needed[pages] > 0).all(), "nobody gives back what it does not need"
        self._needed[pages] -= 1
        for page in pages[self._needed[pages] == 0].tolist():
            self._idle[page] = None
            if not self._keeps:
                self._drop(page)

    # --- the pages' allocator ---

    def forget(self, pages: PageIds) -> None:
        """Free the twins of pages that are free."""
        assert not self._needed[pages].any(), "a row's pages are not free"
        for page in pages[self._twins[pages] >= 0].tolist():
            self._drop(page)

    def adopt(self, old: PageIds, new: PageIds) -> None:
        """Let pages take over the twins of others with the same content, where they lack one and no row needs it."""
        moves = (self._twins[new] < 0) & (self._twins[old] >= 0) & (self._needed[old] == 0)
        for page, heir in zip(old[moves].tolist(), new[moves].tolist(), strict=True):
            self._twins[heir], self._twins[page] = self._twins[page], _NONE
            del self._idle[page]
            self._idle[heir] = None

    def repair(self) -> None:
        """Take note that no row needs anything."""
        for page in np.flatnonzero(self._needed).tolist():
            self._idle[page] = None
        self._needed[:] = 0

    def faults(self, needed: NDArray[np.int64]) -> list[str]:
        """Return what is wrong, if pages lie in `needed` [device pages] rows' windows; O(capacity), for audits."""
        twins = self._twins[self._twins >= 0]
        found = []
        if len(np.unique(np.concatenate([twins, np.array(self._free, np.int32)]))) != self.capacity:
            found.append("twins and free pages are not each page of the pool once")
        if len(twins) + len(self._free) != self.capacity:
            found.append(f"{len(twins)} twins and {len(self._free)} free pages of {self.capacity}")
        if (self._needed != needed).any():
            found.append(
                f"pages {np.flatnonzero(self._needed != needed).tolist()} are needed by other rows than counted"
            )
        idle = np.flatnonzero((self._twins >= 0) & (self._needed == 0))
        if sorted(self._idle) != idle.tolist():
            found.append("what no row needs is not what may go")
        return found

    def _drop(self, page: int) -> None:
        del self._idle[page]
        self._free.append(int(self._twins[page]))
        self._twins[page] = _NONE

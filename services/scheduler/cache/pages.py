"""The page allocator of one tier: reference-counted page ids in numpy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from common.steps import PageIds
    from services.scheduler.cache.state_snapshots import StateSnapshots
    from services.scheduler.cache.window_pages import WindowPages

NO_OWNER = -1


class PageObserver(Protocol):
    """Receives each change of page references, after it was made."""

    def allocated(self, count: int, pages: PageIds | None) -> None:
        """`count` pages were requested, and `pages` allocated; None if there were too few."""

    def released(self, pages: PageIds, freed: int) -> None:
        """A holder released its references on `pages`, which freed `freed` of them."""

    def exchanged(self, old: PageIds, new: PageIds, freed: int) -> None:
        """A holder's references were transferred from `old` to `new`."""

    def restored(self, counts: NDArray[np.int32]) -> None:
        """An audit has set all counts, [capacity] int32."""


class PageAllocator:
    """Owns the pages [0, capacity): their reference counts, and the free ones.

    A page is free exactly when its count is 0. Every call takes and returns [pages] int32; the pages of one call are
    distinct. Equal calls in equal order return equal pages, most recently freed first.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity >= 0
        self.capacity = capacity
        self.observer: PageObserver | None = None
        # Set once, before the first allocation, for models with sliding-window layers.
        self.windows: WindowPages | None = None
        # Likewise for models with recurrent layers.
        self.snapshots: StateSnapshots | None = None
        self._counts: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self._owners: NDArray[np.int64] = np.full(capacity, NO_OWNER, np.int64)
        self._allocations: NDArray[np.int64] = np.zeros(capacity, np.int64)
        # A stack: [0, free_pages) are the free pages, the last is allocated first.
        self._free: NDArray[np.int32] = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._free_pages = capacity
        self._references = 0
        # Scratch memory of the check that the pages of one call are distinct.
        self._position: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self._ordinals: NDArray[np.int32] = np.arange(capacity, dtype=np.int32)

    @property
    def free_pages(self) -> int:
        """Number of pages without a reference."""
        return self._free_pages

    @property
    def references(self) -> int:
        """Sum of all pages' reference counts."""
        return self._references

    @property
    def counts(self) -> NDArray[np.int32]:
        """Reference count by page, [capacity] int32; a read-only view."""
        view = self._counts.view()
        view.flags.writeable = False
        return view

    @property
    def allocations(self) -> NDArray[np.int64]:
        """How often each page was allocated, [capacity] int64; a read-only view."""
        view = self._allocations.view()
        view.flags.writeable = False
        return view

    def last_owner(self, page: int) -> int:
        """Return the tag that the page was last allocated with."""
        return int(self._owners[page])

    def try_allocate(self, count: int, owner: int | NDArray[np.int64] = NO_OWNER) -> PageIds | None:
        """Allocate `count` pages with one reference each; None if fewer are free.

        Args:
            count: Number of pages.
            owner: A tag that an audit reports with a leaked page; one for all, or [count] int64.
        """
        assert count >= 0, "cannot allocate a negative number of pages"
        if count > self._free_pages:
            if self.observer is not None:
                self.observer.allocated(count, None)
            return None
        self._free_pages -= count
        pages = self._free[self._free_pages : self._free_pages + count][::-1].copy()
        self._counts[pages] = 1
        self._owners[pages] = owner
        self._allocations[pages] += 1
        self._references += count
        if self.observer is not None:
            self.observer.allocated(count, pages)
        return pages

    def retain(self, pages: PageIds) -> None:
        """Add one reference to each of `pages`, none of which may be free."""
        counts = self._counts[pages]
        assert counts.all(), f"retained free pages {pages[counts == 0]}"
        assert self._are_distinct(pages)
        self._counts[pages] = counts + 1
        self._references += len(pages)

    def release(self, pages: PageIds) -> int:
        """Remove one reference from each of `pages`; return the number of freed pages."""
        freed = self._release(pages)
        if self.observer is not None:
            self.observer.released(pages, freed)
        return freed

    def exchange(self, old: PageIds, new: PageIds) -> int:
        """Transfer a holder's references from `old` to `new`; return the number of pages that became free.

        Call this after the holder's page table refers to `new`.
        """
        assert len(old) == len(new)
        # In this order, the count of a page that is in both never becomes 0.
        self.retain(new)
        if self.windows is not None:
            self.windows.adopt(old, new)
        if self.snapshots is not None:
            is_last = self._counts[old] == 1
            self.snapshots.adopt(old[is_last], new[is_last])
        freed = self._release(old)
        if self.observer is not None:
            self.observer.exchanged(old, new, freed)
        return freed

    def restore(self, counts: NDArray[np.int32]) -> None:
        """Set audited reference counts, [capacity] int32; exactly the pages without a reference become free."""
        assert counts.shape == (self.capacity,)
        assert (counts >= 0).all()
        self._counts[:] = counts
        free = np.flatnonzero(counts == 0)[::-1]
        self._free[: len(free)] = free
        self._free_pages = len(free)
        self._references = int(counts.sum())
        if self.windows is not None:
            self.windows.forget(np.flatnonzero(counts == 0).astype(np.int32))
        if self.snapshots is not None:
            self.snapshots.forget(np.flatnonzero(counts == 0).astype(np.int32))
        if self.observer is not None:
            self.observer.restored(counts)

    def is_consistent(self) -> bool:
        """Whether free list, counts and totals agree. O(capacity), for audits."""
        listed = np.zeros(self.capacity, np.bool_)
        listed[self._free[: self._free_pages]] = True
        return (
            bool((listed == (self._counts == 0)).all())
            and int(listed.sum()) == self._free_pages
            and int(self._counts.sum()) == self._references
        )

    def _release(self, pages: PageIds) -> int:
        counts = self._counts[pages]
        assert counts.all(), f"released free pages {pages[counts == 0]}"
        assert self._are_distinct(pages)
        counts -= 1
        self._counts[pages] = counts
        self._references -= len(pages)
        freed = pages[counts == 0]
        self._free[self._free_pages : self._free_pages + len(freed)] = freed
        self._free_pages += len(freed)
        if self.windows is not None:
            self.windows.forget(freed)
        if self.snapshots is not None:
            self.snapshots.forget(freed)
        return len(freed)

    def _are_distinct(self, pages: PageIds) -> bool:
        """Whether no page occurs twice: only then does each read back the position that it wrote."""
        ordinals = self._ordinals[: len(pages)]
        self._position[pages] = ordinals
        return len(pages) <= self.capacity and bool((self._position[pages] == ordinals).all())

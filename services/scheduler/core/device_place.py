"""Device pages for the part of a waiting request's prompt that another group computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from common.steps import NO_PAGES
from common.types import CacheMode

if TYPE_CHECKING:
    from common.steps import PageIds
    from common.types import SnapshotSlot, TokenIds
    from services.scheduler.cache.interface import PrefixCache
    from services.scheduler.cache.pages import PageAllocator
    from services.scheduler.cache.types import PrefixLock
    from services.scheduler.core.sequence import Sequence


class DeviceMemory(Protocol):
    """The part of `KvMemory` that a place uses."""

    allocator: PageAllocator
    cache: PrefixCache

    @property
    def available_pages(self) -> int:
        """Pages that an allocation could get now."""

    def try_allocate(self, count: int) -> PageIds | None:
        """Allocate pages, evicting as many as needed; None if even eviction does not free enough."""


class DevicePlace:
    """Holds what a row that computed the prompt here would hold; see `ArrivalPlace`.

    That is a lock on what the view has cached of it, and a reference on each page of `table`: of the cached prefix, and
    then of the pages into which the others arrive. With recurrent layers, a slot awaits the states after them.
    """

    def __init__(self, memory: DeviceMemory, sequence: Sequence, prompt: TokenIds) -> None:
        """Have no pages yet, for a waiting sequence, and ids by which the cache knows its prompt."""
        self.table: PageIds = NO_PAGES
        self.snapshot: SnapshotSlot | None = None
        self._memory = memory
        self._sequence = sequence
        self._prompt = prompt
        self._lock: PrefixLock | None = None

    @property
    def is_open(self) -> bool:
        return self._lock is not None

    def open(self, first: int, end: int, spare_pages: int) -> bool:
        memory, options = self._memory, self._sequence.request.options
        slot, snapshots = None, memory.cache.snapshots
        # Storage may yet bring a part of it to the host, where the rest can arrive, too, unless states come with it.
        is_reading = self._sequence.fetch is not None and not self._sequence.fetch.is_done
        if (is_reading and snapshots is None) or end - first + spare_pages > memory.available_pages:
            return False
        if snapshots is not None and (slot := snapshots.try_reserve()) is None:
            return False
        lock = memory.cache.commit_pages(
            self._sequence.request.view,
            # Also where that ends within an image: the pages that follow are of the same one.
            self._prompt[: first * memory.cache.page_size + 1],
            may_promote=options.cache_mode is not CacheMode.PRIVATE,
            priority=options.priority,
            session=options.session,
        )
        # What was evictable before may be locked now.
        pages = None
        if len(lock.pages) == first and end - first + spare_pages <= memory.available_pages:
            pages = memory.try_allocate(end - first)
        if pages is None:
            memory.cache.release(lock)
            memory.allocator.release(lock.pages)
            if snapshots is not None and slot is not None:
                snapshots.cancel(slot)
            return False
        self._lock, self.table, self.snapshot = lock, np.concatenate([lock.pages, pages]), slot
        return True

    def pages(self, first: int, end: int) -> PageIds:
        return self.table[first:end].copy()

    def attach(self, end: int) -> int:
        memory = self._memory
        assert self._lock is not None, "it is open"
        key = self._prompt[: end * memory.cache.page_size]
        insertion = memory.cache.insert(self._lock, key, self.table, self._sequence.prompt_tokens)
        kept = len(insertion.lock.pages) - len(self._lock.pages)
        self._lock = insertion.lock
        if insertion.first_duplicate is not None:
            first = insertion.first_duplicate
            self.table[first : len(insertion.pages)] = insertion.pages[first:]
            memory.allocator.exchange(insertion.duplicates, insertion.canonical)
        return kept

    def attach_snapshot(self, pages: int) -> None:
        view, snapshots = self._sequence.request.view, self._memory.cache.snapshots
        scope = self._memory.cache.view_of(view)
        assert snapshots is not None, "there is a slot"
        assert self.snapshot is not None, "it is attached once"
        assert scope is not None, "the cache keeps what has arrived"
        snapshots.settle(int(self.table[pages - 1]), scope, self.snapshot)
        self.snapshot = None

    def close(self) -> None:
        snapshots = self._memory.cache.snapshots
        if snapshots is not None and self.snapshot is not None:
            snapshots.cancel(self.snapshot)
            self.snapshot = None
        if self._lock is not None:
            self._memory.cache.release(self._lock)
            self._memory.allocator.release(self.table)
            self._lock, self.table = None, NO_PAGES

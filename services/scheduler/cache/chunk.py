"""The cache that keeps nothing: rows own all their pages and no prefix is ever matched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.steps import NO_IDS
from services.scheduler.cache.events import CacheEvents
from services.scheduler.cache.sharing.fleet import FleetReport
from services.scheduler.cache.types import (
    CacheEventKind,
    CacheUsage,
    Insertion,
    LockId,
    NodeSnapshot,
    OwnerSnapshot,
    PrefixLock,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.limits import Limits
    from common.steps import PageIds
    from common.types import Subject, TokenIds, View
    from services.scheduler.cache.sharing.fleet import FleetNews
    from services.scheduler.cache.types import CandidateId, PromotionCandidate

_NO_PAGES: PageIds = np.empty(0, np.int32)
_NO_PAGES.flags.writeable = False


class ChunkCache:
    """Serves chunked prefill without reuse, as a baseline and for models whose KV cannot be shared."""

    evictable_pages = 0
    protected_pages = 0
    soft_free_pages = 0
    held_references = 0
    host = None
    snapshots = None

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.epoch = 0
        self.events = CacheEvents()
        self._next_lock = 0
        self._locks: set[LockId] = set()

    def view_of(self, view: View) -> None:
        """Return None: nothing is matched."""

    def peek(self, view: View, token_ids: TokenIds) -> int:
        return 0

    def continuation(self, view: View, token_ids: TokenIds, most: int) -> TokenIds:
        """Return nothing: nothing is kept."""
        return NO_IDS

    def commit(
        self,
        view: View,
        token_ids: TokenIds,
        *,
        repeated: bool = False,
        may_promote: bool = True,
        priority: int = 0,
        session: str | None = None,
    ) -> PrefixLock:
        return self.commit_nothing(view)

    def commit_pages(
        self,
        view: View,
        token_ids: TokenIds,
        *,
        may_promote: bool = True,
        priority: int = 0,
        session: str | None = None,
    ) -> PrefixLock:
        return self.commit_nothing(view)

    def commit_nothing(self, view: View) -> PrefixLock:
        lock = PrefixLock(LockId(self._next_lock), view, 0, _NO_PAGES)
        self._next_lock += 1
        self._locks.add(lock.lock_id)
        return lock

    def insert(self, lock: PrefixLock, token_ids: TokenIds, pages: PageIds, prompt_tokens: int) -> Insertion:
        """Keep nothing: the row's pages remain its own."""
        assert lock.lock_id in self._locks, f"lock {lock.lock_id} was released before"
        whole = len(token_ids) // self.page_size
        assert len(pages) >= whole, "a row's page table covers its tokens"
        return Insertion(lock, pages[:whole].copy(), _NO_PAGES, _NO_PAGES)

    def release(self, lock: PrefixLock) -> None:
        assert lock.lock_id in self._locks, f"lock {lock.lock_id} was released before"
        self._locks.remove(lock.lock_id)

    def evict(self, pages: int) -> int:
        return 0

    def flush(self) -> int:
        self.events.emit(CacheEventKind.FLUSHED)
        return 0

    def forget(self, subject: Subject, session: str | None = None) -> int:
        return 0

    def advance(self, epoch: int) -> None:
        self.epoch = epoch

    def share(self) -> None:
        """Do nothing: nothing is shared."""

    def adopt(self, limits: Limits) -> None:
        """Do nothing, as no pages are kept."""

    def pin(self, token_ids: TokenIds) -> int:
        return 0

    def unpin(self, token_ids: TokenIds) -> bool:
        return False

    def take_candidates(self) -> tuple[PromotionCandidate, ...]:
        return ()

    def resolve(self, candidate_id: CandidateId, allowed_tokens: int) -> None:
        """Do nothing: there are no candidates."""

    def forget_verdicts(self) -> None:
        """Do nothing: there are no verdicts."""

    def take_report(self) -> FleetReport:
        return FleetReport()

    def learn(self, news: FleetNews) -> None:
        """Do nothing: nothing is shared."""

    @property
    def usage(self) -> CacheUsage:
        return CacheUsage(0, 0, 0, 0, 0, 0)

    def owners(self) -> Iterator[OwnerSnapshot]:
        return iter(())

    def dump(self, view: View | None = None) -> Iterator[NodeSnapshot]:
        return iter(())

"""Who gives up pages next: the principal most over its quota, then the coldest leaf of all."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from services.scheduler.cache.config import EvictionPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.scheduler.cache.config import CacheConfig

# What is lower goes first.
Coldness = tuple[int, ...]

_OVER_QUOTA, _WITHIN_QUOTA, _WITHIN_FLOOR = range(3)
# A heap is rebuilt when it has so many dead entries beside the live ones.
_SPARE_ENTRIES = 32


class Candidate(Protocol):
    """What can be evicted, with what tells how cold it is; on the device that is a node."""

    queued: int

    @property
    def owner(self) -> Owner[Any]:  # whose heap holds this kind of candidate
        """Whose it is."""

    @property
    def pinned(self) -> bool:
        """The operator's pin."""

    @property
    def priority(self) -> int:
        """Of the requests that used it."""

    @property
    def epoch(self) -> int:
        """Of its last use."""

    @property
    def last_access(self) -> int:
        """By the logical clock."""

    @property
    def u_pre(self) -> int:
        """Principals that used it in the epoch before."""

    @property
    def uses(self) -> int:
        """Leases that covered it."""


C = TypeVar("C", bound=Candidate)


class Owner(Protocol[C]):
    """Whose candidates they are; on the device that is an account."""

    heap: list[tuple[Coldness, int, C]]
    candidates: int
    rank: int
    standing: int

    @property
    def live_pages(self) -> int:
        """What it has on this tier."""

    @property
    def is_shared(self) -> bool:
        """Whether it is a tenant or the public."""

    @property
    def is_active(self) -> bool:
        """Whether its floor counts."""


class EvictionQueue(Generic[C]):
    """Orders the candidates of one tier; on the device these are LIVE nodes without lock and without LIVE children.

    Each account has a heap of its candidates, and the accounts stand in one heap by (over quota, within it, within the
    floor) and then by how far over or how cold their first candidate is. Entries are invalidated by their numbers and
    left to be met, so a change costs O(log n) and a victim O(log n) amortised.
    """

    def __init__(self, config: CacheConfig, capacity: int) -> None:
        """Start empty, for a tier of `capacity` pages."""
        self.quota = max(1, int(capacity * config.quota_share))
        self._floor = int(capacity * config.floor_share)
        self._coldness = _coldness(config)
        self._ranks: list[tuple[int, Coldness, int, Owner[C]]] = []
        self._ranked = 0
        self._next = 0

    def push(self, node: C) -> None:
        """Take in a candidate; its coldness is what it is now."""
        assert not node.queued
        self._next += 1
        node.queued = self._next
        account = node.owner
        account.candidates += 1
        heapq.heappush(account.heap, (self._coldness(node), node.queued, node))
        if account.heap[0][2] is node:
            self.rank(account)
        else:
            self.refresh(account)

    def discard(self, node: C) -> None:
        """Let go of a node that is no candidate any more, if it was one."""
        if not node.queued:
            return
        node.queued = 0
        account = node.owner
        account.candidates -= 1
        if not account.candidates:
            account.heap.clear()
            if account.rank:
                account.rank = 0
                self._ranked -= 1
        elif len(account.heap) > 2 * account.candidates + _SPARE_ENTRIES:
            account.heap = [entry for entry in account.heap if entry[2].queued == entry[1]]
            heapq.heapify(account.heap)

    def is_over(self, account: Owner[C]) -> bool:
        """Whether a view has more than its quota."""
        return account.live_pages > self.quota and not account.is_shared

    def refresh(self, account: Owner[C]) -> None:
        """Note that an account has grown: that may have made it more urgent."""
        if account.candidates and (account.live_pages > self.quota or self._standing(account) != account.standing):
            self.rank(account)

    def rank(self, account: Owner[C]) -> None:
        """Look anew at where an account stands."""
        if not account.candidates:
            return
        self._next += 1
        if not account.rank:
            self._ranked += 1
        account.rank = self._next
        urgency = self.urgency(account)
        account.standing = urgency[0]
        heapq.heappush(self._ranks, (*urgency, self._next, account))
        if len(self._ranks) > 2 * self._ranked + _SPARE_ENTRIES:
            self._ranks = [entry for entry in self._ranks if entry[3].rank == entry[2]]
            heapq.heapify(self._ranks)

    def first(self) -> C | None:
        """Return who goes next; it stays a candidate."""
        while self._ranks:
            urgency, detail, number, account = self._ranks[0]
            if account.rank != number:
                heapq.heappop(self._ranks)
            elif (urgency, detail) != self.urgency(account):
                heapq.heappop(self._ranks)
                self.rank(account)
            else:
                return self.first_of(account)
        return None

    def first_of(self, account: Owner[C]) -> C | None:
        """Return which of its nodes a principal gives up next."""
        heap = account.heap
        while heap:
            _, number, node = heap[0]
            if node.queued == number:
                return node
            heapq.heappop(heap)
        return None

    def is_current(self, node: C) -> bool:
        """Whether the one that `first` returned is still as cold as when it was pushed."""
        return bool(node.owner.heap[0][0] == self._coldness(node))

    def candidate(self, number: int) -> C | None:
        """Return some candidate, another one for most other numbers; for samples. O(1)."""
        if not self._ranks:
            return None
        turn, rank = divmod(number, len(self._ranks))
        heap = self._ranks[rank][3].heap
        node = heap[turn % len(heap)][2] if heap else None
        return node if node is not None and node.queued else None

    def urgency(self, account: Owner[C]) -> tuple[int, Coldness]:
        """Return where an account with candidates stands now; the lowest goes first."""
        first = self.first_of(account)
        assert first is not None, "ranked accounts have candidates"
        standing = self._standing(account)
        coldness, queued, _ = account.heap[0]
        # Whoever was queued first goes first, however often one has looked since: a replay looks less often.
        if standing == _OVER_QUOTA:
            return standing, (self.quota - account.live_pages, queued)
        return standing, (*coldness, queued)

    def _standing(self, account: Owner[C]) -> int:
        if account.live_pages <= self._floor and account.is_active:
            return _WITHIN_FLOOR
        return _OVER_QUOTA if self.is_over(account) else _WITHIN_QUOTA


def _coldness(config: CacheConfig) -> Callable[[Candidate], Coldness]:
    """Return the order of the configured policy. What is deeper goes first by itself, as only leaves are candidates."""
    bonus = config.public_bonus_epochs

    def lru(node: Candidate) -> Coldness:
        return node.pinned, node.priority, node.epoch + bonus * node.u_pre.bit_length(), node.last_access

    def lfu(node: Candidate) -> Coldness:
        return node.pinned, node.priority, (node.uses + node.u_pre).bit_length(), node.last_access

    def slru(node: Candidate) -> Coldness:
        recency = node.epoch + bonus * node.u_pre.bit_length(), node.last_access
        return node.pinned, node.priority, node.uses > 1, *recency

    match config.eviction:
        case EvictionPolicy.LFU:
            return lfu
        case EvictionPolicy.SLRU:
            return slru
        case _:  # under PRIORITY, requests set the priorities; else they are all 0
            return lru

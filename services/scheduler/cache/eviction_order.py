"""The order of eviction: coldness by policy within a subject, and a lazy priority queue of holdings."""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from services.scheduler.cache.config import EvictionPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.scheduler.cache.config import CacheConfig
    from services.scheduler.cache.node import Account

# Lower values are evicted first.
Coldness = tuple[int, ...]

# Standing, then the excess over the quota or the coldness of the first candidate; never equal for two holdings.
Urgency = tuple[Any, ...]  # numbers; equal standings have the same types

# A heap is rebuilt when its length exceeds twice the number of live entries by more than this.
SPARE_ENTRIES = 32

H = TypeVar("H")


class EvictionCandidate(Protocol):
    """An evictable item, with the values that its coldness depends on; on the device it is a node."""

    queued: int

    @property
    def owner(self) -> Account:
        """The item's owner."""

    @property
    def pinned(self) -> bool:
        """Whether the operator has pinned it."""

    @property
    def priority(self) -> int:
        """Highest priority of the requests that used it."""

    @property
    def epoch(self) -> int:
        """Epoch of its last use."""

    @property
    def last_access(self) -> int:
        """Logical time of its last use."""

    @property
    def u_pre(self) -> int:
        """Number of subjects that used it in the previous epoch."""

    @property
    def uses(self) -> int:
        """Number of prefix locks that covered it."""


C = TypeVar("C", bound=EvictionCandidate)


def coldness_of(config: CacheConfig) -> Callable[[EvictionCandidate], Coldness]:
    """Return the order of the configured policy. Deeper nodes go first implicitly, as only leaves are candidates."""
    bonus = config.public_bonus_epochs

    def lru(node: EvictionCandidate) -> Coldness:
        return node.pinned, node.priority, node.epoch + bonus * node.u_pre.bit_length(), node.last_access

    def lfu(node: EvictionCandidate) -> Coldness:
        return node.pinned, node.priority, (node.uses + node.u_pre).bit_length(), node.last_access

    def slru(node: EvictionCandidate) -> Coldness:
        recency = node.epoch + bonus * node.u_pre.bit_length(), node.last_access
        return node.pinned, node.priority, node.uses > 1, *recency

    match config.eviction:
        case EvictionPolicy.LFU:
            return lfu
        case EvictionPolicy.SLRU:
            return slru
        case _:  # under PRIORITY, requests set the priorities; else they are all 0
            return lru


class Ranking(Generic[H]):
    """Holdings that have candidates, the most urgent first.

    A heap entry may overstate the urgency, which is corrected when it comes first. A holding that may have become more
    urgent must be noted; the next access enters it again, so that many changes between two accesses cost one entry. The
    order depends on the holdings alone, not on the number of accesses.
    """

    def __init__(self, urgency: Callable[[H], Urgency]) -> None:
        self._urgency = urgency
        self._heap: list[tuple[Urgency, int, H]] = []
        self._entries: dict[H, int] = {}
        self._noted: dict[H, None] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._heap) + len(self._noted)

    def note(self, holding: H) -> None:
        self._noted[holding] = None

    def drop(self, holding: H) -> None:
        self._noted.pop(holding, None)
        self._entries.pop(holding, None)

    def first(self) -> H | None:
        self._enter_noted()
        heap = self._heap
        while heap:
            urgency, number, holding = heap[0]
            if self._entries.get(holding) != number:
                heapq.heappop(heap)
            elif (now := self._urgency(holding)) != urgency:
                heapq.heapreplace(heap, (now, number, holding))
            else:
                return holding
        return None

    def any(self, number: int) -> H | None:
        """Return some holding, varying with `number`."""
        self._enter_noted()
        if not self._heap:
            return None
        for index in range(number, number + len(self._heap)):
            _, entry, holding = self._heap[index % len(self._heap)]
            if self._entries.get(holding) == entry:
                return holding
        return None

    def _enter_noted(self) -> None:
        if not self._noted:
            return
        for holding in self._noted:
            number = self._entries[holding] = next(self._numbers)
            heapq.heappush(self._heap, (self._urgency(holding), number, holding))
        self._noted.clear()
        if len(self._heap) > 2 * len(self._entries) + SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if self._entries.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

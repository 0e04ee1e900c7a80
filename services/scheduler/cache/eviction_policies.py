"""Coldness by eviction policy: the order of the candidates of one subject."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from services.scheduler.cache.config import EvictionPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.scheduler.cache.config import CacheConfig
    from services.scheduler.cache.node import Account

# Lower values are evicted first.
Coldness = tuple[int, ...]


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

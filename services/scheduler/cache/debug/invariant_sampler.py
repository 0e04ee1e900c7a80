"""Checks the invariants on a few paths at a time, so cheaply that a running scheduler can do it all the time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.cache.debug.invariants import node_violations
from services.scheduler.cache.debug.recorded import RecordedCache
from services.scheduler.cache.radix import RadixCache

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.scheduler.cache.interface import PrefixCache
    from services.scheduler.cache.node import Node


class InvariantSampler:
    """Walks up from leaves to the root: those that rows need, those that may be evicted, those that were just freed.

    So every kind of node is looked at, the public ones most often, and nothing is scanned: a check costs
    O(paths × depth). It finds a defect that stays within minutes, and is no proof that there is none; tests check all
    nodes after every operation.
    """

    def __init__(self, cache: RadixCache) -> None:
        """Begin with any paths of `cache`."""
        self._cache = cache
        self._turn = 0

    @classmethod
    def of(cls, cache: PrefixCache) -> InvariantSampler | None:
        """Return a sampler of a cache that has a tree."""
        inner = cache.inner if isinstance(cache, RecordedCache) else cache
        return cls(inner) if isinstance(inner, RadixCache) else None

    def check(self, paths: int) -> list[str]:
        """Return what is wrong on the next `paths` paths of each kind, nothing if all is well."""
        self._turn += 1
        found: dict[str, None] = {}
        seen: set[Node] = set()
        for leaf in self._leaves(paths):
            node = leaf
            while node.parent is not None and node not in seen:
                seen.add(node)
                found.update(dict.fromkeys(node_violations(self._cache, node)))
                node = node.parent
        return list(found)

    def _leaves(self, paths: int) -> Iterator[Node]:
        store, first = self._cache.store, self._turn * paths
        held = [locked.node for locked in self._cache.locks.all() if locked.node is not None]
        for number in range(first, first + paths):
            if held:
                yield held[number % len(held)]
            candidate = store.queue.candidate(number)
            if candidate is not None:
                yield candidate
        for node, _ in zip(store.soft, range(paths), strict=False):
            yield node

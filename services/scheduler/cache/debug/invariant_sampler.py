"""Checks the invariants on a few paths at a time, cheaply enough for permanent use in a running scheduler."""

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
    """Walks from leaves to the root: locked ones, candidates for eviction, and those next to be reclaimed.

    So every kind of node is checked, public ones most often, and nothing is scanned: a check costs O(paths × depth). It
    finds a lasting defect within minutes, but does not prove that there is none; tests check all nodes after every
    operation.
    """

    def __init__(self, cache: RadixCache) -> None:
        """Start at an arbitrary path of `cache`."""
        self._cache = cache
        self._turn = 0

    @classmethod
    def of(cls, cache: PrefixCache) -> InvariantSampler | None:
        """Return a sampler for a cache that has a tree, otherwise None."""
        inner = cache.inner if isinstance(cache, RecordedCache) else cache
        return cls(inner) if isinstance(inner, RadixCache) else None

    def check(self, paths: int) -> list[str]:
        """Return the violations on the next `paths` paths of each kind; empty if there are none."""
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

"""Which nodes are in use, which can go, and in what order."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.scheduler.cache.tree import Node


class PathLocks:
    """Owns locks and recency of a tree's nodes, and counts their pages by whether they are locked.

    Every node without a lock stands in `unlocked`, least recently used first. Locks hold whole paths and are given up
    from the deepest node upwards, hence a node always stands behind its descendants and the first one is a leaf:
    eviction takes from the front and never searches.
    """

    def __init__(self) -> None:
        """Start without nodes."""
        self.unlocked: OrderedDict[Node, None] = OrderedDict()
        self.evictable_pages = 0
        self.protected_pages = 0
        self._clock = 0

    def first_unlocked(self) -> Node | None:
        """Return the leaf to evict next."""
        return next(iter(self.unlocked), None)

    def lock(self, node: Node, above: Node) -> None:
        """Lock the path from below `above` to `node`, and touch all of the path from the root."""
        at = node
        while at is not above:
            if at.lock_ref == 0:
                del self.unlocked[at]
                self.evictable_pages -= len(at.pages)
                self.protected_pages += len(at.pages)
            at.lock_ref += 1
            assert at.parent is not None
            at = at.parent
        self._touch(node)

    def unlock(self, node: Node) -> None:
        """Take one lock from the path from the root to `node`, and touch it: until now it was in use."""
        self._touch(node)
        while node.parent is not None:
            assert node.lock_ref > 0
            node.lock_ref -= 1
            if node.lock_ref == 0:
                self.unlocked[node] = None
                self.evictable_pages += len(node.pages)
                self.protected_pages -= len(node.pages)
            node = node.parent

    def add(self, node: Node) -> None:
        """Take in a new node, which the caller locks in the same operation: only then the order is right again."""
        assert node.lock_ref == 0
        self.unlocked[node] = None
        self.evictable_pages += len(node.pages)

    def add_upper_half(self, upper: Node) -> None:
        """Take in what a split made, whose pages are counted already; as with `add`, the caller locks it at once."""
        if upper.lock_ref == 0:
            self.unlocked[upper] = None

    def count_growth(self, node: Node, pages: int) -> None:
        """Note that a locked node has so many pages more."""
        assert node.lock_ref > 0
        self.protected_pages += pages

    def count_loss(self, node: Node, pages: int) -> None:
        """Note that an unlocked node has so many pages less; with none left it leaves."""
        assert node.lock_ref == 0
        self.evictable_pages -= pages
        if not len(node.pages):
            del self.unlocked[node]

    def _touch(self, node: Node) -> None:
        self._clock += 1
        while node.parent is not None:
            node.last_access = self._clock
            node = node.parent

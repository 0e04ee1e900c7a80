"""Counts a tier's cached pages by state, each physical page once, even if several nodes refer to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.cache.types import NodeState

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from common.steps import PageIds
    from services.scheduler.cache.node import Node

_LIVE, _SOFT_FREE = NodeState.LIVE, NodeState.SOFT_FREE


class PageUse:
    """Owns the totals, and with them the changes of `lock_ref` and `host_ref` from and to 0, and of `state`.

    A page is protected if a locked node, a node that a transfer needs, or a locked path refers to it, else evictable if
    a LIVE node does, else soft-free. The pages of most nodes belong to no other node: for these the totals change by
    the edge's length. Only the pages of nodes marked `joint` are counted individually, and a page of a joint node is
    never in a node that is not joint. A hold keeps pages protected for a row whose path has left its view while other
    owners' nodes still refer to them.
    """

    def __init__(self, capacity: int) -> None:
        """Start with no cached pages."""
        self.evictable = 0
        self.protected = 0
        self.soft_free = 0
        # Sum of all edges: the page references that the cache holds.
        self.references = 0
        self._capacity = capacity
        # Per page, the number of joint nodes that refer to it, of locked ones (or holds), and of LIVE ones; [capacity]
        # each. Created with the first joint pages: isolated and shared caches never need them.
        self._joint: NDArray[np.int32] | None = None

    def enter(self, node: Node) -> None:
        """Add a node's pages."""
        count = len(node.pages)
        self.references += count
        if node.joint:
            self._count(node, 1)
        else:
            self._add(node, count)

    def leave(self, node: Node) -> None:
        """Remove a node's pages."""
        count = len(node.pages)
        self.references -= count
        if node.joint:
            self._count(node, -1)
        else:
            self._add(node, -count)

    def lock(self, node: Node) -> None:
        """Add the first lock."""
        assert node.lock_ref == 0
        if node.joint:
            self._count(node, -1)
            node.lock_ref = 1
            self._count(node, 1)
        elif node.host_ref:
            node.lock_ref = 1
        else:
            count = len(node.pages)
            self.evictable -= count
            self.protected += count
            node.lock_ref = 1

    def unlock(self, node: Node) -> None:
        """Remove the last lock."""
        assert node.lock_ref == 1
        if node.joint:
            self._count(node, -1)
            node.lock_ref = 0
            self._count(node, 1)
        elif node.host_ref:
            node.lock_ref = 0
        else:
            count = len(node.pages)
            self.protected -= count
            self.evictable += count
            node.lock_ref = 0

    def set_host_ref(self, node: Node, count: int) -> None:
        """Set the number of transfers that need a node."""
        assert count >= 0
        if (count > 0) == (node.host_ref > 0):
            node.host_ref = count
            return
        self.leave(node)
        node.host_ref = count
        self.enter(node)

    def set_state(self, node: Node, state: NodeState) -> None:
        """Change an unlocked node's state."""
        assert node.lock_ref == 0
        self.leave(node)
        node.state = state
        self.enter(node)

    def make_joint(self, node: Node) -> None:
        """Allow other nodes or holds to refer to this node's pages from now on."""
        if not node.joint:
            self.leave(node)
            node.joint = True
            self.enter(node)

    def hold(self, pages: PageIds) -> None:
        """Protect pages for a row; nodes that refer to them are joint."""
        self._lock_pages(pages, 1)

    def give_up(self, pages: PageIds) -> None:
        """Undo a `hold`."""
        self._lock_pages(pages, -1)

    def _add(self, node: Node, count: int) -> None:
        if node.lock_ref or node.host_ref:
            self.protected += count
        elif node.state is _SOFT_FREE:
            self.soft_free += count
        else:
            self.evictable += count

    def _count(self, node: Node, sign: int) -> None:
        named, locked, live = self._arrays()
        pages = node.pages
        self._weigh(pages, -1)
        named[pages] += sign
        if node.lock_ref or node.host_ref:
            locked[pages] += sign
        if node.state is _LIVE:
            live[pages] += sign
        self._weigh(pages, 1)

    def _lock_pages(self, pages: PageIds, sign: int) -> None:
        _, locked, _ = self._arrays()
        self._weigh(pages, -1)
        locked[pages] += sign
        self._weigh(pages, 1)

    def _weigh(self, pages: PageIds, sign: int) -> None:
        """Add joint pages to the totals by their current state, with the given sign."""
        named, locked, live = self._arrays()
        is_named = named[pages] > 0
        is_locked = is_named & (locked[pages] > 0)
        is_live = is_named & ~is_locked & (live[pages] > 0)
        protected, evictable = int(is_locked.sum()), int(is_live.sum())
        self.protected += sign * protected
        self.evictable += sign * evictable
        self.soft_free += sign * (int(is_named.sum()) - protected - evictable)

    def _arrays(self) -> NDArray[np.int32]:
        if self._joint is None:
            self._joint = np.zeros((3, self._capacity), np.int32)
        return self._joint

"""The pages of the host tier: which node has which, and whose go first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.scheduler.cache.eviction import EvictionQueue
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.cache.types import CacheEventKind, NodeState

if TYPE_CHECKING:
    from common.steps import PageIds
    from services.scheduler.cache.node import Account, Node
    from services.scheduler.cache.store import NodeStore

_ON_HOST = NodeState.ON_HOST


@dataclass(slots=True, eq=False, repr=False)
class HostEntry:
    """A node's copy on the host as a candidate for eviction; it is as cold as the node."""

    node: Node
    owner: Account
    queued: int = 0

    @property
    def pinned(self) -> bool:
        """The operator's pin."""
        return self.node.pinned

    @property
    def priority(self) -> int:
        """Of the requests that used it."""
        return self.node.priority

    @property
    def epoch(self) -> int:
        """Of its last use."""
        return self.node.epoch

    @property
    def last_access(self) -> int:
        """By the logical clock."""
        return self.node.last_access

    @property
    def u_pre(self) -> int:
        """Principals in the epoch before."""
        return self.node.u_pre

    @property
    def uses(self) -> int:
        """Prefix locks that covered it."""
        return self.node.uses


class HostPages:
    """Owns the host's page allocator and the `host_pages` and `host_ref` of nodes.

    A node's copy is a candidate for eviction if no transfer needs the node and none of its children has a copy: so what
    is on the host is closed under ancestors, as it is on the device. The copies of different nodes never share pages.
    """

    def __init__(self, store: NodeStore, capacity: int) -> None:
        """Start with `capacity` free pages."""
        self.allocator = PageAllocator(capacity)
        # Sum of all copies' pages, and of those that transfers need.
        self.references = 0
        self.needed = 0
        self._store = store
        self.queue: EvictionQueue[HostEntry] = EvictionQueue(store.config, capacity, store.accounts)
        self._entries: dict[Node, HostEntry] = {}
        self._pages_of: Counter[Account] = Counter()

    @property
    def evictable(self) -> int:
        """Pages that `try_allocate` could take from nodes."""
        return self.references - self.needed

    def pages_of(self, account: Account) -> int:
        """Return how many pages an owner has."""
        return self._pages_of.get(account, 0)

    def try_allocate(self, count: int) -> PageIds | None:
        """Take `count` pages, dropping the coldest copies as needed; None, and nothing dropped, if there are fewer."""
        if count > self.allocator.free_pages + self.evictable:
            return None
        while self.allocator.free_pages < count:
            victim = self._victim()
            assert victim is not None, "evictable pages have candidates"
            self._evict(victim, count - self.allocator.free_pages)
        return self.allocator.try_allocate(count)

    def keep(self, node: Node, pages: PageIds) -> None:
        """Let a node have a copy in `pages`, with a reference on each."""
        assert node.host_pages is None
        assert node.parent is not None
        self.allocator.retain(pages)
        self._store.tree.set_host_pages(node, pages)
        self._charge(node.owner, len(pages))
        self._entries[node] = HostEntry(node, node.owner)
        self.references += len(pages)
        self.needed += len(pages) if node.host_ref else 0
        self._discard(node.parent)
        self.offer(node)

    def drop(self, node: Node) -> int:
        """Let a node have no copy any more; return how many pages became free."""
        pages, parent = node.host_pages, node.parent
        assert pages is not None
        assert parent is not None
        self._discard(node)
        self._charge(self._entries.pop(node).owner, -len(pages))
        self.references -= len(pages)
        self.needed -= len(pages) if node.host_ref else 0
        self._store.tree.set_host_pages(node, None)
        self.offer(parent)
        return self.allocator.release(pages)

    def hand_on(self, node: Node, other: Node) -> None:
        """Give a node's copy, if it has one, to another node with the same tokens that has none."""
        pages = node.host_pages
        if pages is not None and other.host_pages is None:
            self.keep(other, pages)

    def add_host_ref(self, node: Node, count: int) -> None:
        """Change how many transfers need a node; neither of its copies is a candidate as long as there is one."""
        before, after = node.host_ref, node.host_ref + count
        if node.is_soft_free:
            self._store.revive(node)
        if not before:
            self._store.queue.discard(node)
            self._discard(node)
        self._store.use.set_host_ref(node, after)
        if node.host_pages is not None:
            self.needed += len(node.host_pages) * ((after > 0) - (before > 0))
        if not after:
            self._store.offer(node)
            self.offer(node)

    def split(self, node: Node, upper: Node) -> None:
        """Follow a split; the lower half keeps its place in the order of eviction."""
        if node.host_pages is not None:
            self._entries[upper] = HostEntry(upper, self._entries[node].owner)

    def absorb(self, node: Node) -> None:
        """Follow a merge: what was `node` is part of its only child now, with the copies of both."""
        entry = self._entries.pop(node, None)
        if entry is not None:
            assert not entry.queued, "its child has a copy"
            node.host_pages = None

    def hand_over(self, node: Node) -> None:
        """Follow a change of owner."""
        entry = self._entries.get(node)
        if entry is None:
            return
        self._discard(node)
        self._charge(entry.owner, -node.size)
        entry.owner = node.owner
        self._charge(entry.owner, node.size)
        self.offer(node)

    def offer(self, node: Node) -> None:
        """Make a copy a candidate for eviction if it can be one and is none."""
        entry = self._entries.get(node)
        if entry is not None and not (entry.queued or node.host_ref or node.host_children):
            self.queue.push(entry)

    def entry(self, node: Node) -> HostEntry:
        """Return what stands for a node's copy in the order of eviction; for tests."""
        return self._entries[node]

    def candidates(self) -> set[Node]:
        """Return the nodes whose copies can be evicted; for tests."""
        return {node for node, entry in self._entries.items() if entry.queued}

    def _discard(self, node: Node) -> None:
        entry = self._entries.get(node)
        if entry is not None:
            self.queue.discard(entry)

    def _charge(self, account: Account, pages: int) -> None:
        self._pages_of[account] += pages
        if not self._pages_of[account]:
            del self._pages_of[account]
        self.queue.charge(account, pages)

    def _victim(self) -> Node | None:
        """Return whose copy goes next. Nodes are touched without the queue's knowledge, so it is asked again."""
        while (entry := self.queue.first()) is not None:
            if self.queue.is_current(entry):
                return entry.node
            self.queue.discard(entry)
            self.queue.push(entry)
        return None

    def _evict(self, node: Node, pages: int) -> None:
        """Drop a copy, or of a node that is nowhere else up to `pages` pages at its end."""
        if node.state is not _ON_HOST:
            self.drop(node)
            self._store.emit(CacheEventKind.RECLAIMED, node)
            return
        if pages < node.size:
            self._store.split(node, node.size - pages)
        self._store.remove(node, CacheEventKind.RECLAIMED)

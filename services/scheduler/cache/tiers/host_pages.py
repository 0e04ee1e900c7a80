"""The pages of the host tier: which node has which, and whose go first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.scheduler.cache.eviction import EvictionQueue
from services.scheduler.cache.interface import CacheEventKind, NodeState
from services.scheduler.cache.pages import PageAllocator

if TYPE_CHECKING:
    from common.steps import PageIds
    from services.scheduler.cache.accounts import Account
    from services.scheduler.cache.eviction import Coldness
    from services.scheduler.cache.node import Node
    from services.scheduler.cache.store import NodeStore

_ON_HOST = NodeState.ON_HOST


@dataclass(slots=True, eq=False, repr=False)
class HostShare:
    """What an account has on the host; `heap` to `standing` are the eviction queue's, as in `Account`."""

    account: Account
    live_pages: int = 0
    nodes: int = 0
    heap: list[tuple[Coldness, int, HostEntry]] = field(default_factory=list)
    candidates: int = 0
    rank: int = 0
    standing: int = 0

    @property
    def is_shared(self) -> bool:
        """Whether this is a tenant's or the public's."""
        return self.account.is_shared

    @property
    def is_active(self) -> bool:
        """Whether its floor counts."""
        return self.account.is_active


@dataclass(slots=True, eq=False, repr=False)
class HostEntry:
    """A node's copy on the host as a candidate for eviction; it is as cold as the node."""

    node: Node
    owner: HostShare
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
        """Leases that covered it."""
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
        self._queue: EvictionQueue[HostEntry] = EvictionQueue(store.config, capacity)
        self._entries: dict[Node, HostEntry] = {}
        self._shares: dict[Account, HostShare] = {}

    @property
    def evictable(self) -> int:
        """Pages that `try_allocate` could take from nodes."""
        return self.references - self.needed

    def pages_of(self, account: Account) -> int:
        """Return how many pages an owner has."""
        share = self._shares.get(account)
        return share.live_pages if share else 0

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
        share = self._share(node.owner)
        share.live_pages += len(pages)
        share.nodes += 1
        self._entries[node] = HostEntry(node, share)
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
        share = self._entries.pop(node).owner
        share.live_pages -= len(pages)
        share.nodes -= 1
        if not share.nodes:
            del self._shares[share.account]
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
            share = self._entries[node].owner
            share.nodes += 1
            self._entries[upper] = HostEntry(upper, share)

    def absorb(self, node: Node) -> None:
        """Follow a merge: what was `node` is part of its only child now, with the copies of both."""
        entry = self._entries.pop(node, None)
        if entry is not None:
            assert not entry.queued, "its child has a copy"
            entry.owner.nodes -= 1
            node.host_pages = None

    def hand_over(self, node: Node) -> None:
        """Follow a change of owner."""
        entry = self._entries.get(node)
        if entry is None:
            return
        pages = node.size
        self._discard(node)
        former, share = entry.owner, self._share(node.owner)
        for holder, sign in ((former, -1), (share, 1)):
            holder.live_pages += sign * pages
            holder.nodes += sign
        if not former.nodes:
            del self._shares[former.account]
        entry.owner = share
        self.offer(node)

    def offer(self, node: Node) -> None:
        """Make a copy a candidate for eviction if it can be one and is none."""
        entry = self._entries.get(node)
        if entry is not None and not (entry.queued or node.host_ref or node.host_children):
            self._queue.push(entry)

    def candidates(self) -> set[Node]:
        """Return the nodes whose copies can be evicted; for tests."""
        return {node for node, entry in self._entries.items() if entry.queued}

    def _discard(self, node: Node) -> None:
        entry = self._entries.get(node)
        if entry is not None:
            self._queue.discard(entry)

    def _share(self, account: Account) -> HostShare:
        share = self._shares.get(account)
        if share is None:
            share = self._shares[account] = HostShare(account)
        return share

    def _victim(self) -> Node | None:
        """Return whose copy goes next. Nodes are touched without the queue's knowledge, so it is asked again."""
        while (entry := self._queue.first()) is not None:
            if self._queue.is_current(entry):
                return entry.node
            self._queue.discard(entry)
            self._queue.push(entry)
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

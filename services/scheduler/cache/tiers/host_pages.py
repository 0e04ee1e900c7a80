"""Pages of the host tier: their nodes and their order of eviction."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.scheduler.cache.eviction import EvictionQueue
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.cache.types import CacheEventKind, NodeState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Set

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
        return self.node.pinned

    @property
    def priority(self) -> int:
        return self.node.priority

    @property
    def epoch(self) -> int:
        return self.node.epoch

    @property
    def last_access(self) -> int:
        return self.node.last_access

    @property
    def u_pre(self) -> int:
        return self.node.u_pre

    @property
    def uses(self) -> int:
        return self.node.uses


@dataclass(slots=True, eq=False, repr=False)
class HostHold:
    """Keeps the `pages` copies of a path on the host, which ends with `node`; None: none of them is left."""

    node: Node | None
    pages: int = 0


class HostPages:
    """Owns the host's page allocator and the `host_pages` and `host_ref` of nodes.

    A node's copy is a candidate for eviction if no transfer needs the node, nothing holds the copy, and none of its
    children has a copy: so the nodes on the host are closed under ancestors, as those on the device are. Copies of
    different nodes never share pages. A hold leaves a node's device pages free to go, which a transfer does not.
    """

    def __init__(self, store: NodeStore, capacity: int) -> None:
        self.allocator = PageAllocator(capacity)
        # Sum of all copies' pages, of those that transfers need, and of others that are held.
        self.references = 0
        self.needed = 0
        self.held = 0
        self._store = store
        self.queue: EvictionQueue[HostEntry] = EvictionQueue(store.config, capacity, store.accounts)
        self._entries: dict[Node, HostEntry] = {}
        self._pages_of: Counter[Account] = Counter()
        self._holds: dict[HostHold, None] = {}
        # By node on the path of a hold: the number of holds that end in it or below it.
        self._holds_of: Counter[Node] = Counter()

    @property
    def evictable(self) -> int:
        """Pages that `try_allocate` could take from nodes."""
        return self.references - self.needed - self.held

    def held_nodes(self) -> Set[Node]:
        """Return the nodes whose copies are held."""
        return self._holds_of.keys()

    def holds(self) -> Iterable[HostHold]:
        """Return the holds on copies; for audits."""
        return self._holds.keys()

    def counted_holds(self) -> Mapping[Node, int]:
        """Return the number of holds of each held node; for audits."""
        return self._holds_of

    def pages_of(self, account: Account) -> int:
        """Return the number of an owner's pages."""
        return self._pages_of.get(account, 0)

    def try_allocate(self, count: int) -> PageIds | None:
        """Allocate `count` pages, evicting the coldest copies; if there are too few, return None and evict nothing."""
        if count > self.allocator.free_pages + self.evictable:
            return None
        while self.allocator.free_pages < count:
            victim = self._victim()
            assert victim is not None, "evictable pages have candidates"
            self._evict(victim, count - self.allocator.free_pages)
        return self.allocator.try_allocate(count)

    def has_room(self, count: int, end: Node) -> bool:
        """Whether `try_allocate` would find `count` pages beside those of the path to `end`. O(nodes on the path)."""
        room, at = self.allocator.free_pages + self.evictable, end
        while at.parent is not None and room >= count:
            is_evictable = at.host_pages is not None and not at.host_ref and at not in self._holds_of
            room -= at.size if is_evictable else 0
            at = at.parent
        return room >= count

    def hold(self, node: Node) -> HostHold:
        """Keep the copies of a node and of its ancestors from being evicted until `release`."""
        assert node.host_pages is not None
        hold = HostHold(node, self._count_path(node, 1))
        self._holds[hold] = None
        self._discard(node)
        return hold

    def release(self, hold: HostHold) -> None:
        """Undo `hold`."""
        del self._holds[hold]
        if hold.node is not None:
            self._count_path(hold.node, -1)
            self.offer(hold.node)

    def rehang(self, node: Node, old: Node) -> None:
        """Follow a node that has been moved from below `old`, which has the same tokens as its parent now."""
        count = self._holds_of[node]
        if count:
            assert node.parent is not None
            self._count_path(node.parent, count)
            self._count_path(old, -count)

    def keep(self, node: Node, pages: PageIds) -> None:
        """Set a node's copy to `pages`, with a reference on each."""
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
        """Drop a node's copy; return the number of pages that became free."""
        pages, parent = node.host_pages, node.parent
        assert pages is not None
        assert parent is not None
        self._discard(node)
        if node in self._holds_of:
            self._move_holds(node, parent if parent.parent is not None else None, -node.size)
            self._count(node, -self._holds_of[node])
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
        count = self._holds_of[node]
        if count and other.host_pages is not None:
            self._move_holds(node, other)
            self._count(node, -count)
            self._count(other, count)

    def add_host_ref(self, node: Node, count: int) -> None:
        """Change the number of transfers that need a node; while it is above 0, no copy of the node can be evicted."""
        before, after = node.host_ref, node.host_ref + count
        if node.is_soft_free:
            self._store.revive(node)
        if not before:
            self._store.queue.discard(node)
            self._discard(node)
        self._store.use.set_host_ref(node, after)
        if node.host_pages is not None:
            change = len(node.host_pages) * ((after > 0) - (before > 0))
            self.needed += change
            self.held -= change if node in self._holds_of else 0
        if not after:
            self._store.offer(node)
            self.offer(node)

    def split(self, node: Node, upper: Node) -> None:
        """Follow a split; the lower half keeps its position in the eviction order."""
        if node.host_pages is not None:
            self._entries[upper] = HostEntry(upper, self._entries[node].owner)
            if node in self._holds_of:
                self._holds_of[upper] = self._holds_of[node]

    def absorb(self, node: Node, child: Node) -> None:
        """Follow the joining of `node` with its only child, which has the copies of both now."""
        entry = self._entries.pop(node, None)
        if entry is not None:
            assert not entry.queued, "its child has a copy"
            if node in self._holds_of:
                assert node.host_pages is not None
                own = child.size - len(node.host_pages)
                self._move_holds(node, child, own)
                self.held += own if child not in self._holds_of and not child.host_ref else 0
                self._holds_of[child] = self._holds_of.pop(node)
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
        """Make a copy a candidate for eviction, if it can be one and is not yet."""
        entry = self._entries.get(node)
        if entry is None or entry.queued or node.host_ref or node.host_children:
            return
        if node not in self._holds_of:
            self.queue.push(entry)

    def entry(self, node: Node) -> HostEntry:
        """Return the entry of a node's copy in the eviction order; for tests."""
        return self._entries[node]

    def candidates(self) -> set[Node]:
        """Return the nodes whose copies can be evicted; for tests."""
        return {node for node, entry in self._entries.items() if entry.queued}

    def _discard(self, node: Node) -> None:
        entry = self._entries.get(node)
        if entry is not None:
            self.queue.discard(entry)

    def _move_holds(self, node: Node, heir: Node | None, change: int = 0) -> None:
        """Let the holds of paths to a node end in another one, by `change` pages longer; None: nothing is left."""
        for hold in self._holds:
            if hold.node is node:
                hold.node = heir
                hold.pages += change
                if heir is not None:
                    self._discard(heir)

    def _count_path(self, end: Node, count: int) -> int:
        """Change the number of holds of the path to `end` by `count`; return its pages."""
        pages, at = 0, end
        while at.parent is not None:
            self._count(at, count)
            pages, at = pages + at.size, at.parent
        return pages

    def _count(self, node: Node, count: int) -> None:
        before = self._holds_of[node]
        after = before + count
        if after:
            self._holds_of[node] = after
        else:
            del self._holds_of[node]
        if not node.host_ref:
            self.held += node.size * ((after > 0) - (before > 0))

    def _charge(self, account: Account, pages: int) -> None:
        self._pages_of[account] += pages
        if not self._pages_of[account]:
            del self._pages_of[account]
        self.queue.charge(account, pages)

    def _victim(self) -> Node | None:
        """Return the node whose copy is evicted next.

        Stale entries are queued again, as touching nodes does not update them.
        """
        while (entry := self.queue.first()) is not None:
            if self.queue.is_current(entry):
                return entry.node
            self.queue.discard(entry)
            self.queue.push(entry)
        return None

    def _evict(self, node: Node, pages: int) -> None:
        """Drop a copy; of a node that is on the host only, at most `pages` pages at its end."""
        if node.state is not _ON_HOST:
            self.drop(node)
            self._store.emit(CacheEventKind.RECLAIMED, node)
            return
        if pages < node.size:
            self._store.split(node, node.size - pages)
        self._store.remove(node, CacheEventKind.RECLAIMED)

"""A paged radix tree as prefix cache, one view per principal or one for all."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from common.types import Principal
from services.scheduler.cache.events import CacheEvents
from services.scheduler.cache.interface import CacheEventKind, Insertion, Lease, LeaseId, NodeView, Visibility
from services.scheduler.cache.keys import PagedKey
from services.scheduler.cache.tree import PUBLIC_SCOPE, PageTree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.steps import PageIds
    from common.types import TokenIds
    from services.scheduler.cache.pages import PageAllocator
    from services.scheduler.cache.tree import Node, Scope

_NO_PAGES: PageIds = np.empty(0, np.int32)
_NO_PAGES.flags.writeable = False


class RadixCache:
    """Principals are isolated, or with `shared` see everything of each other.

    Every node that no lease holds stands in `unlocked`, least recently used first. Leases hold whole paths and give
    them up from the deepest node upwards, hence a node always stands behind its descendants and the first one is a
    leaf: eviction takes from the front and never searches.
    """

    def __init__(self, allocator: PageAllocator, page_size: int, *, shared: bool = False) -> None:
        """Start empty, over the pages of `allocator`."""
        self.page_size = page_size
        self.events = CacheEvents()
        self.tree = PageTree(page_size)
        self.unlocked: OrderedDict[Node, None] = OrderedDict()
        self._allocator = allocator
        self._shared = shared
        self._evictable_pages = 0
        self._protected_pages = 0
        self._clock = 0
        self._next_lease = 0
        # Where each lease ends; None for a lease on nothing.
        self._leases: dict[LeaseId, Node | None] = {}

    @property
    def evictable_pages(self) -> int:
        """Device pages that `evict` could make free now."""
        return self._evictable_pages

    @property
    def protected_pages(self) -> int:
        """Device pages in nodes that a lease holds."""
        return self._protected_pages

    @property
    def soft_free_pages(self) -> int:
        """Always 0: what this cache evicts is free at once."""
        return 0

    @property
    def held_references(self) -> int:
        """Page references the cache holds, one per page and node."""
        return self._evictable_pages + self._protected_pages

    def peek(self, principal: Principal, token_ids: TokenIds) -> int:
        """Return how many leading tokens the principal's view covers; pure."""
        key = PagedKey(token_ids, self.page_size)
        match = self.tree.match(self.tree.root, self._scope(principal), key, 0, self._matchable_pages(token_ids))
        return match.pages * self.page_size

    def commit(self, principal: Principal, token_ids: TokenIds, *, repeated: bool = False) -> Lease:
        """Match, lock and touch the longest prefix; `repeated` changes nothing, as no evidence is counted here."""
        key = PagedKey(token_ids, self.page_size)
        root = self.tree.root
        match = self.tree.match(root, self._scope(principal), key, 0, self._matchable_pages(token_ids))
        node = self._split(match.partial, match.partial_pages) if match.partial else match.node
        pages = self.tree.path_pages(node, root)
        self._lock(node, root)
        self._touch(node)
        self._allocator.retain(pages)
        return self._lease(principal, node, pages)

    def commit_nothing(self, principal: Principal) -> Lease:
        """Return a lease on nothing, through which nothing is inserted."""
        return self._lease(principal, None, _NO_PAGES)

    def insert(self, lease: Lease, token_ids: TokenIds, pages: PageIds, prompt_tokens: int) -> Insertion:
        """Add the whole pages of `token_ids` below the lease; `prompt_tokens` matters only to caches with evidence."""
        node = self._held_node(lease)
        key = PagedKey(token_ids, self.page_size)
        assert len(pages) >= key.pages, "a row's page table covers its tokens"
        first = len(lease.pages)
        if node is None:
            return Insertion(lease, pages[: key.pages].copy(), _NO_PAGES, _NO_PAGES)
        if key.pages <= first:
            return Insertion(lease, lease.pages, _NO_PAGES, _NO_PAGES)
        match = self.tree.match(node, self._scope(lease.principal), key, first, key.pages)
        deepest = self._split(match.partial, match.partial_pages) if match.partial else match.node
        found = self.tree.path_pages(deepest, node)
        added = pages[match.pages : key.pages]
        if len(added):
            deepest = self._grow(deepest, lease, key.slice(match.pages, key.pages), added, is_ours=deepest is node)
        self._lock(deepest, node)
        self._touch(deepest)
        del self._leases[lease.lease_id]
        known = np.concatenate([lease.pages, found, added])
        replaced = np.flatnonzero(pages[first : match.pages] != found)
        return Insertion(
            lease=self._lease(lease.principal, deepest, known),
            pages=known,
            duplicates=pages[first : match.pages][replaced],
            canonical=found[replaced],
            first_duplicate=first + int(replaced[0]) if len(replaced) else None,
        )

    def release(self, lease: Lease) -> None:
        """Unlock the lease's path, from its end upwards."""
        node = self._held_node(lease)
        del self._leases[lease.lease_id]
        if node is None:
            return
        self._touch(node)
        while node.parent is not None:
            assert node.lock_ref > 0
            node.lock_ref -= 1
            if node.lock_ref == 0:
                self.unlocked[node] = None
                self._evictable_pages += len(node.pages)
                self._protected_pages -= len(node.pages)
            node = node.parent

    def evict(self, pages: int) -> int:
        """Free at least so many pages, least recently used first and leaves from their ends, or all there are."""
        freed = 0
        while freed < pages and self.unlocked:
            freed += self._allocator.release(self._drop(pages - freed))
        return freed

    def flush(self) -> int:
        """Drop everything that no lease holds; return how many pages became free."""
        freed = self.evict(self._evictable_pages)
        self.events.emit(CacheEventKind.FLUSHED)
        return freed

    def dump(self, principal: Principal | None = None) -> Iterator[NodeView]:
        """Yield the nodes of one principal's view, or all nodes: parents before children."""
        scope = None if principal is None else self._scope(principal)
        for node, depth in self.tree.walk():
            if scope is None or node.scope == scope:
                yield self._view(node, depth)

    def _scope(self, principal: Principal) -> Scope:
        return PUBLIC_SCOPE if self._shared else (principal.tenant, principal.user)

    def _matchable_pages(self, token_ids: TokenIds) -> int:
        """The last token must be computed, for its logits."""
        return max(len(token_ids) - 1, 0) // self.page_size

    def _lease(self, principal: Principal, node: Node | None, pages: PageIds) -> Lease:
        lease = Lease(LeaseId(self._next_lease), principal, len(pages) * self.page_size, pages)
        self._next_lease += 1
        pages.flags.writeable = False
        self._leases[lease.lease_id] = node
        return lease

    def _held_node(self, lease: Lease) -> Node | None:
        assert lease.lease_id in self._leases, f"lease {lease.lease_id} was released or replaced before"
        return self._leases[lease.lease_id]

    def _split(self, node: Node, pages: int) -> Node:
        """Cut an edge; the upper half is out of its order in `unlocked` until the caller locks it."""
        upper = self.tree.split(node, pages)
        if upper.lock_ref == 0:
            self.unlocked[upper] = None
        self._emit(CacheEventKind.SPLIT, upper)
        self._emit(CacheEventKind.SPLIT, node)
        return upper

    def _grow(self, node: Node, lease: Lease, key: bytes, pages: PageIds, *, is_ours: bool) -> Node:
        """Put new pages below `node`; return the node they are in."""
        self._allocator.retain(pages)
        # Chunks of one prompt become one node, unless another lease or a child needs the boundary.
        if is_ours and node.lock_ref == 1 and not node.children:
            self.tree.extend(node, key, pages)
            self._protected_pages += len(pages)
        else:
            node = self.tree.attach(node, self._scope(lease.principal), key, pages)
            self.unlocked[node] = None
            self._evictable_pages += len(pages)
        self._emit(CacheEventKind.INSERTED, node)
        return node

    def _lock(self, node: Node, above: Node) -> None:
        """Lock the path from below `above` to `node`."""
        while node is not above:
            if node.lock_ref == 0:
                del self.unlocked[node]
                self._evictable_pages -= len(node.pages)
                self._protected_pages += len(node.pages)
            node.lock_ref += 1
            assert node.parent is not None
            node = node.parent

    def _touch(self, node: Node) -> None:
        self._clock += 1
        while node.parent is not None:
            node.last_access = self._clock
            node = node.parent

    def _drop(self, pages: int) -> PageIds:
        """Take up to `pages` pages out of the tree."""
        dropped = [_NO_PAGES]
        missing = pages
        while missing > 0 and self.unlocked:
            leaf = next(iter(self.unlocked))
            if len(leaf.pages) > missing:
                taken = self.tree.trim(leaf, missing)
            else:
                taken = self.tree.detach(leaf)
                del self.unlocked[leaf]
            self._emit(CacheEventKind.EVICTED, leaf)
            dropped.append(taken)
            missing -= len(taken)
        self._evictable_pages -= pages - missing
        return np.concatenate(dropped)

    def _emit(self, kind: CacheEventKind, node: Node) -> None:
        self.events.emit(kind, lambda: self._view(node, self.tree.depth_pages(node)))

    def _view(self, node: Node, depth: int) -> NodeView:
        assert node.parent is not None
        return NodeView(
            node_id=node.node_id,
            parent_id=None if node.parent is self.tree.root else node.parent.node_id,
            edge_tokens=len(node.pages) * self.page_size,
            depth_tokens=depth * self.page_size,
            visibility=Visibility.PRIVATE if node.scope else Visibility.PUBLIC,
            owner=Principal(*node.scope) if node.scope else None,
            lock_ref=node.lock_ref,
            last_access=node.last_access,
            pages=node.pages,
            token_ids=np.frombuffer(node.key, np.int32),
        )

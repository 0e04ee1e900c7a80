"""A paged radix tree as prefix cache, one view per principal or one for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.cache.events import CacheEvents
from services.scheduler.cache.interface import CacheEventKind, Insertion, Lease, LeaseId
from services.scheduler.cache.keys import PagedKey
from services.scheduler.cache.locks import PathLocks
from services.scheduler.cache.tree import PUBLIC_SCOPE, PageTree
from services.scheduler.cache.views import view

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.steps import PageIds
    from common.types import Principal, TokenIds
    from services.scheduler.cache.interface import NodeView
    from services.scheduler.cache.pages import PageAllocator
    from services.scheduler.cache.tree import Match, Node, Scope

_NO_PAGES: PageIds = np.empty(0, np.int32)
_NO_PAGES.flags.writeable = False


class RadixCache:
    """Principals are isolated, or with `shared` see everything of each other."""

    soft_free_pages = 0

    def __init__(self, allocator: PageAllocator, page_size: int, *, shared: bool = False) -> None:
        """Start empty, over the pages of `allocator`."""
        self.page_size = page_size
        self.events = CacheEvents()
        self.tree = PageTree(page_size)
        self.locks = PathLocks()
        self._allocator = allocator
        self._shared = shared
        self._next_lease = 0
        # Where each lease ends; None for a lease on nothing.
        self._leases: dict[LeaseId, Node | None] = {}

    @property
    def evictable_pages(self) -> int:
        """Device pages that `evict` could make free now."""
        return self.locks.evictable_pages

    @property
    def protected_pages(self) -> int:
        """Device pages in nodes that a lease holds."""
        return self.locks.protected_pages

    @property
    def held_references(self) -> int:
        """Page references the cache holds: no page is in two nodes."""
        return self.locks.evictable_pages + self.locks.protected_pages

    def peek(self, principal: Principal, token_ids: TokenIds) -> int:
        """Return how many leading tokens the principal's view covers; pure."""
        return self._match(principal, token_ids).pages * self.page_size

    def commit(self, principal: Principal, token_ids: TokenIds, *, repeated: bool = False) -> Lease:
        """Match, lock and touch the longest prefix; `repeated` changes nothing, as no evidence is counted here."""
        node = self._end_of(self._match(principal, token_ids))
        pages = self.tree.path_pages(node, self.tree.root)
        self.locks.lock(node, self.tree.root)
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
        deepest = self._end_of(match)
        found = self.tree.path_pages(deepest, node)
        added = pages[match.pages : key.pages]
        if len(added):
            deepest = self._grow(deepest, lease, key.slice(match.pages, key.pages), added)
        self.locks.lock(deepest, node)
        del self._leases[lease.lease_id]
        known = np.concatenate([lease.pages, found, added])
        own = pages[first : match.pages]
        replaced = np.flatnonzero(own != found)
        return Insertion(
            lease=self._lease(lease.principal, deepest, known),
            pages=known,
            duplicates=own[replaced],
            canonical=found[replaced],
            first_duplicate=first + int(replaced[0]) if len(replaced) else None,
        )

    def release(self, lease: Lease) -> None:
        """Unlock the lease's path."""
        node = self._held_node(lease)
        del self._leases[lease.lease_id]
        if node is not None:
            self.locks.unlock(node)

    def evict(self, pages: int) -> int:
        """Free at least so many pages, least recently used first and leaves from their ends, or all there are."""
        freed = 0
        while freed < pages and self.evictable_pages:
            freed += self._allocator.release(self._drop(pages - freed))
        return freed

    def flush(self) -> int:
        """Drop everything that no lease holds; return how many pages became free."""
        freed = self.evict(self.evictable_pages)
        self.events.emit(CacheEventKind.FLUSHED)
        return freed

    def dump(self, principal: Principal | None = None) -> Iterator[NodeView]:
        """Yield the nodes of one principal's view, or all nodes: parents before children."""
        scope = None if principal is None else self._scope(principal)
        for node, depth in self.tree.walk():
            if scope is None or node.scope == scope:
                yield view(self.tree, node, depth)

    def _scope(self, principal: Principal) -> Scope:
        return PUBLIC_SCOPE if self._shared else (principal.tenant, principal.user)

    def _match(self, principal: Principal, token_ids: TokenIds) -> Match:
        # The last token must be computed, for its logits.
        pages = max(len(token_ids) - 1, 0) // self.page_size
        return self.tree.match(self.tree.root, self._scope(principal), PagedKey(token_ids, self.page_size), 0, pages)

    def _lease(self, principal: Principal, node: Node | None, pages: PageIds) -> Lease:
        pages.flags.writeable = False
        lease = Lease(LeaseId(self._next_lease), principal, len(pages) * self.page_size, pages)
        self._next_lease += 1
        self._leases[lease.lease_id] = node
        return lease

    def _held_node(self, lease: Lease) -> Node | None:
        assert lease.lease_id in self._leases, f"lease {lease.lease_id} was released or replaced before"
        return self._leases[lease.lease_id]

    def _end_of(self, match: Match) -> Node:
        """Return the node that ends where the match ends, cut out of a longer one if need be; the caller locks it."""
        if match.partial is None:
            return match.node
        upper = self.tree.split(match.partial, match.partial_pages)
        self.locks.add_upper_half(upper)
        self._emit(CacheEventKind.SPLIT, upper)
        self._emit(CacheEventKind.SPLIT, match.partial)
        return upper

    def _grow(self, node: Node, lease: Lease, key: bytes, pages: PageIds) -> Node:
        """Put new pages below `node`; return the node they are in."""
        self._allocator.retain(pages)
        # Chunks of one prompt become one node, unless another lease or a child needs the boundary.
        if node is self._leases[lease.lease_id] and node.lock_ref == 1 and not node.children:
            self.tree.extend(node, key, pages)
            self.locks.count_growth(node, len(pages))
        else:
            node = self.tree.attach(node, self._scope(lease.principal), key, pages)
            self.locks.add(node)
        self._emit(CacheEventKind.INSERTED, node)
        return node

    def _drop(self, pages: int) -> PageIds:
        """Take up to `pages` pages out of the tree."""
        dropped = [_NO_PAGES]
        missing = pages
        while missing > 0 and (leaf := self.locks.first_unlocked()) is not None:
            taken = self.tree.trim(leaf, missing) if len(leaf.pages) > missing else self.tree.detach(leaf)
            self.locks.count_loss(leaf, len(taken))
            self._emit(CacheEventKind.EVICTED, leaf)
            dropped.append(taken)
            missing -= len(taken)
        return np.concatenate(dropped)

    def _emit(self, kind: CacheEventKind, node: Node) -> None:
        self.events.emit(kind, lambda: view(self.tree, node, self.tree.depth_pages(node)))

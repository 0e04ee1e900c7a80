"""What becomes public: chains that enough principals have computed themselves from their prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.cache.interface import CacheEventKind, NodeState
from services.scheduler.cache.keys import chain_hashes, common_run
from services.scheduler.cache.reviews import Reviews

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.scheduler.cache.accounts import Scope
    from services.scheduler.cache.demotion import DemotedChains
    from services.scheduler.cache.leases import Leases
    from services.scheduler.cache.node import Node
    from services.scheduler.cache.store import NodeStore

_ON_HOST = NodeState.ON_HOST


class Promoter:
    """Publishes at epoch boundaries, where private nodes have grown."""

    def __init__(self, store: NodeStore, leases: Leases, demoted: DemotedChains) -> None:
        """Work on the nodes of `store`, for whose holders `leases` are repointed."""
        self.reviews = Reviews(store.config, store.tree.page_size)
        self._store = store
        self._leases = leases
        self._demoted = demoted
        self._moved: dict[Node, Node] = {}

    def note(self, nodes: Iterable[Node]) -> None:
        """Look at these private nodes at the next boundary."""
        for node in nodes:
            self._store.fresh[node] = None

    def take_fresh(self) -> list[Node]:
        """Return the nodes noted since the last boundary, and forget them."""
        fresh, self._store.fresh = list(self._store.fresh), {}
        return fresh

    def groups(self, nodes: Iterable[Node]) -> list[tuple[Node, bytes]]:
        """Return where the private subtrees with `nodes` hang below the public: parent and first page, each once."""
        groups: dict[tuple[Node, bytes], None] = {}
        for node in nodes:
            if node.is_dead or node.is_public:
                continue
            top, parent = node, node.parent
            while parent is not None and parent.owner is node.owner:
                top, parent = parent, parent.parent
            assert parent is not None, "the root is public"
            groups[parent, self._store.tree.first_page(top)] = None
        return list(groups)

    def promote(self, groups: Iterable[tuple[Node, bytes]]) -> None:
        """Publish every chain with enough evidence that begins in one of `groups`."""
        stack = list(groups)
        while stack:
            parent, page = stack.pop()
            published = None if parent.is_dead else self._try_promote(parent, page)
            if published is not None:
                stack.extend((published, following) for following in published.children)
        self._settle()

    def publish_pin(self, pin: bytes) -> None:
        """Make public what the cache holds of a prompt that the operator has pinned."""
        tree = self._store.tree
        node, rest = tree.root, pin
        while rest and (members := tree.group(node, rest[: tree.page_bytes])):
            pages = common_run([rest, *(member.key for member in members)], tree.page_bytes)
            if members[0].is_public:
                node = self._store.split(members[0], pages) if pages < members[0].size else members[0]
                self._revive(node)
            else:
                node = self._publish(members, pages, generation=max(member.generation for member in members))
                self._store.emit(CacheEventKind.PROMOTED, node)
                # What hangs below may have had the evidence, and lacked only a public parent.
                self.note(child for child in tree.children(node) if not child.is_public)
            self.set_pinned(node, is_pinned=True)
            rest = rest[pages * tree.page_bytes :]
        self._settle()

    def set_pinned(self, node: Node, *, is_pinned: bool) -> None:
        """Pin or unpin a public node, which moves it in the order of eviction."""
        self._store.queue.discard(node)
        node.pinned = is_pinned
        self._store.offer(node)

    def _settle(self) -> None:
        if self._moved:
            self._leases.repoint(self._moved)
            self._moved = {}

    def _try_promote(self, parent: Node, page: bytes) -> Node | None:
        """Publish the first run of a group if its evidence suffices."""
        config, tree = self._store.config, self._store.tree
        members = tree.group(parent, page)
        if len(members) < config.promotion_principals or members[0].is_public:
            return None
        creators = self._evidence(members)
        if self._weight(creators) < config.promotion_principals:
            return None
        pages = common_run([member.key for member in members], tree.page_bytes)
        generation = max(parent.generation, *(member.generation for member in members))
        if config.content_check or len(self._demoted):
            pages, generation = self._examine(parent, members, pages, generation)
        required = config.promotion_principals * (config.repromotion_factor if generation else 1)
        if not pages or self._weight(creators) < required:
            return None
        published = self._publish(members, pages, generation)
        published.promoted = self._weight(creators), self._store.epoch
        self._store.emit(CacheEventKind.PROMOTED, published)
        return published

    def _evidence(self, members: Iterable[Node]) -> dict[Scope, int]:
        """Return who has computed it from a prompt lately, with the epoch."""
        oldest = self._store.epoch - self._store.config.promotion_epochs
        return {
            member.owner_id: member.prompt_epoch
            for member in members
            if member.prompt_epoch is not None and member.prompt_epoch >= oldest and not member.no_promote
        }

    def _weight(self, creators: Iterable[Scope]) -> int:
        if self._store.config.tenant_counts_as_one:
            return len({tenant for tenant, *_ in creators})
        return len({scope[:2] for scope in creators})

    def _examine(self, parent: Node, members: list[Node], pages: int, generation: int) -> tuple[int, int]:
        """Cut a run where a demoted chain begins or where the content check has not let it pass."""
        tree = self._store.tree
        start = tree.depth_pages(parent)
        key = tree.path_key(parent) + members[0].key[: pages * tree.page_bytes]
        hashes = chain_hashes(key, tree.page_bytes)
        pages, generation = self._demoted.examine(hashes[start:], generation)
        if self._store.config.content_check:
            end = start + pages
            allowed = self.reviews.allowed_pages(hashes[:end], key, members, self._store.epoch)
            pages = max(allowed - start, 0)
        return pages, generation

    def _publish(self, members: list[Node], pages: int, generation: int) -> Node:
        """Make the first `pages` pages of all members one PUBLIC node.

        The owners' duplicates go, except those that running rows name; their children and locks move to the node.
        """
        store = self._store
        halves = [store.split(member, pages) if pages < member.size else member for member in members]
        creators = self._evidence(halves)
        for half in halves:
            creators.setdefault(half.owner_id, store.epoch)
        canonical = min(
            halves, key=lambda half: (half.state is _ON_HOST, half.is_soft_free, -half.lock_ref, half.node_id)
        )
        self._revive(canonical)
        for half in halves:
            if half is not canonical:
                self._absorb(half, canonical)
        store.hand_over(canonical, store.accounts.public)
        limit = store.config.creators_limit
        canonical.creators = dict(list(creators.items())[:limit])
        canonical.prompt_epoch, canonical.no_promote, canonical.generation = None, False, generation
        canonical.sessions = None
        store.offer(canonical)
        return canonical

    def _revive(self, node: Node) -> None:
        """Make a node LIVE, and those above it, of which there may be an upper half that has just been cut off."""
        at: Node | None = node
        while at is not None and at.is_soft_free:
            self._store.revive(at)
            self._store.offer(at)
            at = at.parent

    def _absorb(self, half: Node, canonical: Node) -> None:
        """Let `canonical`, which holds the same tokens, take over children and locks of `half`, which goes."""
        store = self._store
        for child in store.tree.children(half):
            store.rehang(child, canonical)
        locks = half.lock_ref
        if locks:
            if not canonical.lock_ref:
                store.queue.discard(canonical)
                store.use.lock(canonical)
                locks -= 1
            canonical.lock_ref += locks
            half.lock_ref = 1
            store.use.unlock(half)
            self._moved[half] = canonical
        canonical.last_access = max(canonical.last_access, half.last_access)
        canonical.priority = max(canonical.priority, half.priority)
        canonical.uses += half.uses
        if store.host is not None:
            store.host.take_over(half, canonical)
        store.remove(half)

"""Demotion: shared nodes become private again, or their tenants' again, without copying their pages."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

from common.types import Sharing
from services.scheduler.cache.config import MIN_TENANTS
from services.scheduler.cache.keys import chain_hashes
from services.scheduler.cache.locks import orphan
from services.scheduler.cache.types import CacheEventKind, NodeState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from common.steps import PageIds
    from services.scheduler.cache.locks import LockedPath, LockTable
    from services.scheduler.cache.node import Account, Node
    from services.scheduler.cache.store import NodeStore
    from services.scheduler.cache.types import Scope

# Replacements of shared nodes, by the node and the copy's owner.
_Copies = dict[tuple["Node", "Account"], "Node"]


class DemotedChains:
    """Remembers demoted chains, so that their next promotion requires more evidence, also after their eviction.

    The memory is per scope: a demotion in one tenant must not raise the bar in another.
    """

    def __init__(self, limit: int) -> None:
        """Start empty; the oldest entries of a scope beyond `limit` are dropped."""
        self._limit = limit
        self._generations: dict[Scope, OrderedDict[bytes, int]] = {}

    def __len__(self) -> int:
        """Return the number of entries."""
        return sum(map(len, self._generations.values()))

    def add(self, scope: Scope, chain: bytes, generation: int) -> None:
        """Record that `scope` may share tokens that begin with `chain` only as `generation` again."""
        generations = self._generations.setdefault(scope, OrderedDict())
        generations[chain] = generation
        generations.move_to_end(chain)
        while len(generations) > self._limit:
            generations.popitem(last=False)

    def first_of(self, scope: Scope, hashes: Sequence[bytes]) -> int:
        """Return the index of the first demoted chain among `hashes`, their number if there is none."""
        generations: Mapping[bytes, int] = self._generations.get(scope) or {}
        return next((index for index, chain in enumerate(hashes) if chain in generations), len(hashes))

    def examine(self, scope: Scope, hashes: Sequence[bytes], generation: int) -> tuple[int, int]:
        """Return the number of a run's pages that `scope` can share at once, and their generation."""
        generations: Mapping[bytes, int] = self._generations.get(scope) or {}
        for index, chain in enumerate(hashes):
            demoted = generations.get(chain)
            if demoted is not None and index:
                return index, generation
            generation = max(generation, demoted or 0)
        return len(hashes), generation


class DemotionListener(Protocol):
    """Receives demotions."""

    def note_demotion(self, top: Node, generation: int, *, is_news: bool) -> None:
        """A suspect subtree is about to be demoted, on other groups' news or by this group's own detection."""


class Demoter:
    """Turns TENANT subtrees private for their creators, and PUBLIC ones TENANT for the tenants that shared them."""

    def __init__(self, store: NodeStore, locks: LockTable, listener: DemotionListener) -> None:
        """Change nodes of `store`; `locks` holds the locks on them; `listener` hears of demotions of suspects."""
        self.demoted = DemotedChains(store.config.profile.remembered_chains)
        self._store = store
        self._locks = locks
        self._listener = listener

    def demote(self, top: Node, *, is_suspect: bool = True, is_news: bool = False) -> None:
        """Remove a shared subtree from all views but those of its heirs, who get nodes of their own on its pages.

        The heirs of a TENANT node are its creators. Those of a PUBLIC node are the tenants that shared it, or share a
        node below it, by their own evidence, and the creators of other tenants: so no tenant loses its own nodes.

        Rows of heirs keep their paths. Rows of other views keep their pages, through a closed path; private nodes of
        others below the subtree are dropped, as no path leads to them any more.

        Args:
            top: The top of the subtree.
            is_suspect: Whether it appeared to be probed, so that sharing it again takes more evidence. Otherwise its
                tenants do not want to share it any more.
            is_news: Whether another scheduler group has demoted it.
        """
        store, owner = self._store, top.owner
        above = top.parent
        assert above is not None
        if is_suspect:
            self._remember(top)
            self._listener.note_demotion(top, top.generation + 1, is_news=is_news)
        store.tier.revoke(owner)
        store.tier.strip(top)
        nodes = self._nodes(top)
        paths = self._let_go(top, above)
        copies = self._copy(nodes, above, is_suspect=is_suspect)
        self._settle_children(nodes, copies)
        for node in reversed(nodes):
            store.remove(node, CacheEventKind.DEMOTED)
        for locked, pages in paths:
            self._take_hold(locked, pages, above, copies)
        for copy in copies.values():
            store.offer(copy)
            if owner.is_public or not is_suspect:
                # Tenants whose subjects had matched it may have enough evidence to share it themselves.
                store.fresh[copy] = None
        for (node, heir), copy in copies.items():
            # A tenant quarantined as a whole loses it, as it would lose a TENANT node.
            if heir.is_shared and heir.fingerprint in (node.quarantined or ()) and not copy.is_dead:
                self.demote(copy, is_news=is_news)

    def withdraw(self) -> None:
        """Demote nodes that are PUBLIC by evidence of tenants of which too few still choose global sharing."""
        accounts = self._store.accounts
        for node in list(self._store.tree.walk_owned(accounts.public)):
            if node.is_dead or node.pinned or not node.tenants:
                continue
            if sum(accounts.sharing_of(tenant) is Sharing.GLOBAL for tenant in node.tenants) < MIN_TENANTS:
                self.demote(node, is_suspect=False)

    def _remember(self, top: Node) -> None:
        tree = self._store.tree
        hashes = chain_hashes(tree.path_key(top), tree.page_bytes)
        self.demoted.add(top.owner_id, hashes[-top.size], top.generation + 1)

    def _let_go(self, top: Node, above: Node) -> list[tuple[LockedPath, PageIds]]:
        """Unlock the subtree; return the locked paths that end in it, with their pages below `above`."""
        found = []
        for locked in self._locks.all():
            if locked.node is not None and self._store.tree.is_below(locked.node, top):
                found.append((locked, self._store.tree.path_pages(locked.node, above)))
                self._store.unlock_path(locked.node, above)
        assert not top.lock_ref, "every lock belongs to a row or a session"
        return found

    def _nodes(self, top: Node) -> list[Node]:
        """Return the nodes of a subtree that have the owner of its top, parents first."""
        return [top, *self._store.tree.walk_owned(top.owner, top=top)]

    def _copy(self, nodes: list[Node], above: Node, *, is_suspect: bool) -> _Copies:
        """Create each heir's nodes; nodes that are not LIVE are not copied."""
        store = self._store
        holders = self._holders(nodes)
        copies: _Copies = {}
        for node in nodes:
            if node.state is not NodeState.LIVE:
                continue
            store.use.make_joint(node)
            for heir, epoch in self._heirs(node, holders[node]):
                assert node.parent is not None
                parent = above if node is nodes[0] else _place(copies, node.parent, heir)
                if parent is None:
                    store.accounts.forget_if_empty(heir)
                elif heir.is_shared:
                    copies[node, heir] = self._copy_for_tenant(node, parent, heir)
                else:
                    generation = 0 if node.is_public else node.generation + is_suspect
                    copies[node, heir] = self._copy_for_view(node, parent, heir, epoch, generation)
        return copies

    def _holders(self, nodes: list[Node]) -> dict[Node, dict[str, None]]:
        """Return the tenants that keep each node of a PUBLIC subtree: those that shared it, or nodes below it."""
        accounts = self._store.accounts
        holders: dict[Node, dict[str, None]] = {}
        for node in reversed(nodes):
            names = dict.fromkeys(node.tenants or ())
            for child in self._store.tree.children(node) if node.is_public else ():
                if child.is_public:
                    names.update(holders[child])
                elif child.is_shared:
                    names[child.owner.scope[0]] = None
            holders[node] = {name: None for name in names if accounts.sharing_of(name) is not Sharing.NONE}
        return holders

    def _heirs(self, node: Node, tenants: dict[str, None]) -> Iterator[tuple[Account, int]]:
        """Yield the heirs of a node, with the epochs of their last computation of it."""
        accounts = self._store.accounts
        for tenant in tenants:
            yield accounts.owner((tenant,)), 0
        for subject, creator in (node.creators or {}).items():
            if subject[0] not in tenants:
                for salt in creator.salts:
                    yield accounts.owner((*subject, salt)), creator.epoch

    def _copy_for_view(self, node: Node, parent: Node, heir: Account, epoch: int, generation: int) -> Node:
        copy = self._copy_node(node, parent, heir, generation)
        copy.prompt_epoch = None if heir.tenant.sharing is Sharing.NONE else epoch
        return copy

    def _copy_for_tenant(self, node: Node, parent: Node, heir: Account) -> Node:
        """Return a tenant's copy of a PUBLIC node, with the creators, quarantines and counters of its own subjects."""
        (tenant,) = heir.scope
        copy = self._copy_node(node, parent, heir, (node.tenants or {}).get(tenant, 0))
        creators, quarantined = node.creators or {}, node.quarantined or {}
        copy.creators = {subject: creator for subject, creator in creators.items() if subject[0] == tenant}
        copy.quarantined = {
            fingerprint: one for fingerprint, one in quarantined.items() if one.tenant == tenant and not one.is_whole
        } or None
        window = (node.parties or {}).get(heir.scope)
        if window is not None and node.epoch == copy.epoch:
            copy.hit_pre, copy.u_pre = window.previous_hits, window.previous_users
        copy.promoted = len(copy.creators), self._store.epoch
        return copy

    def _copy_node(self, node: Node, parent: Node, heir: Account, generation: int) -> Node:
        copy = self._store.attach(parent, heir, node.key, node.pages, is_joint=True)
        copy.priority, copy.uses, copy.last_access = node.priority, node.uses, node.last_access
        copy.generation = generation
        self._store.emit(CacheEventKind.INSERTED, copy)
        return copy

    def _settle_children(self, nodes: list[Node], copies: _Copies) -> None:
        """Move other owners' nodes below the subtree to their own or their tenant's copies.

        Drop those without such a copy.
        """
        store, owner = self._store, nodes[0].owner
        for node in nodes:
            for child in store.tree.children(node):
                if child.owner is owner:
                    continue
                copy = _place(copies, node, child.owner)
                if copy is None:
                    store.remove_below(child)
                else:
                    store.rehang(child, copy)

    def _take_hold(self, locked: LockedPath, pages: PageIds, above: Node, copies: _Copies) -> None:
        node = locked.node
        assert node is not None
        target = _place(copies, node, locked.account) if node.is_dead else node
        if target is None:
            orphan(self._store, locked, above, pages)
            return
        locked.node = target
        self._store.lock_path(target, above)


def _place(copies: _Copies, node: Node, owner: Account) -> Node | None:
    """Return the copy of a node that `owner` can match: its own, or its tenant's."""
    return copies.get((node, owner)) or copies.get((node, owner.tenant))

"""How something public becomes private again, without a copy of its pages."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from services.scheduler.cache.interface import CacheEventKind, NodeState
from services.scheduler.cache.keys import chain_hashes
from services.scheduler.cache.leases import orphan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.steps import PageIds
    from services.scheduler.cache.accounts import Account
    from services.scheduler.cache.leases import Hold, Leases
    from services.scheduler.cache.node import Node
    from services.scheduler.cache.store import NodeStore


class DemotedChains:
    """Remembers where chains were demoted, so that the next promotion asks for more, also after their eviction."""

    def __init__(self, limit: int) -> None:
        """Start with none; the oldest go beyond `limit`."""
        self._limit = limit
        self._generations: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        """Return how many are remembered."""
        return len(self._generations)

    def add(self, chain: bytes, generation: int) -> None:
        """Note that what begins with `chain` may only be public again as `generation`."""
        self._generations[chain] = generation
        self._generations.move_to_end(chain)
        while len(self._generations) > self._limit:
            self._generations.popitem(last=False)

    def examine(self, hashes: Sequence[bytes], generation: int) -> tuple[int, int]:
        """Return how many of a run's pages can be promoted at once, and as which generation."""
        for index, chain in enumerate(hashes):
            demoted = self._generations.get(chain)
            if demoted is not None and index:
                return index, generation
            generation = max(generation, demoted or 0)
        return len(hashes), generation


class Demoter:
    """Turns public subtrees private for those who computed them."""

    def __init__(self, store: NodeStore, leases: Leases) -> None:
        """Work on the nodes of `store`, whose holders are in `leases`."""
        self.demoted = DemotedChains(store.config.remembered_chains)
        self._store = store
        self._leases = leases

    def demote(self, top: Node) -> None:
        """Give the creators of a public subtree private nodes on its pages, and take it out of everybody else's view.

        Rows of creators keep their paths. Rows of others keep their pages, through a closed hold; what others have
        private below it goes, as there is no path to it any more.
        """
        store = self._store
        above = top.parent
        assert above is not None
        self._remember(top)
        if store.host is not None:
            store.host.strip(top)
        holds = self._let_go(top, above)
        copies = self._copy(top, above)
        self._settle_private(top, copies)
        for node in reversed(self._public_nodes(top)):
            store.remove(node, CacheEventKind.DEMOTED)
        for hold, pages in holds:
            self._take_hold(hold, pages, above, copies)
        for copy in copies.values():
            store.offer(copy)

    def _remember(self, top: Node) -> None:
        tree = self._store.tree
        hashes = chain_hashes(tree.path_key(top), tree.page_bytes)
        self.demoted.add(hashes[-top.size], top.generation + 1)
        if self._store.host is not None and self._store.host.storage is not None:
            self._store.host.storage.demote()

    def _let_go(self, top: Node, above: Node) -> list[tuple[Hold, PageIds]]:
        """Unlock the subtree; return its holds with their pages in it."""
        found = []
        for hold in self._leases.all():
            if hold.node is not None and self._store.tree.is_below(hold.node, top):
                found.append((hold, self._store.tree.path_pages(hold.node, above)))
                self._store.unlock_path(hold.node, above)
        assert not top.lock_ref, "leases hold all locks"
        return found

    def _public_nodes(self, top: Node) -> list[Node]:
        """Return the public nodes of a subtree, parents first."""
        return [top, *(node for node, _ in self._store.tree.walk(top) if node.is_public)]

    def _copy(self, top: Node, above: Node) -> dict[tuple[Node, Account], Node]:
        """Make each creator's nodes; what is not LIVE counts as gone and is not copied."""
        store = self._store
        copies: dict[tuple[Node, Account], Node] = {}
        for node in self._public_nodes(top):
            if node.state is not NodeState.LIVE:
                continue
            store.use.make_joint(node)
            for scope, epoch in (node.creators or {}).items():
                owner = store.accounts.owner(scope)
                parent = above if node is top else copies.get((node.parent, owner)) if node.parent else None
                if parent is None:
                    store.accounts.forget_if_empty(owner)
                    continue
                copies[node, owner] = self._copy_node(node, parent, owner, epoch)
        return copies

    def _copy_node(self, node: Node, parent: Node, owner: Account, epoch: int) -> Node:
        copy = self._store.attach(parent, owner, node.key, node.pages, is_joint=True)
        copy.prompt_epoch = epoch
        copy.priority, copy.uses, copy.last_access = node.priority, node.uses, node.last_access
        copy.generation = node.generation + 1
        self._store.emit(CacheEventKind.INSERTED, copy)
        return copy

    def _settle_private(self, top: Node, copies: dict[tuple[Node, Account], Node]) -> None:
        """Move creators' private continuations below their copies; drop the others'."""
        store = self._store
        for node in self._public_nodes(top):
            for child in store.tree.children(node):
                if child.is_public:
                    continue
                copy = copies.get((node, child.owner))
                if copy is None:
                    store.remove_below(child)
                else:
                    store.rehang(child, copy)

    def _take_hold(self, hold: Hold, pages: PageIds, above: Node, copies: dict[tuple[Node, Account], Node]) -> None:
        node = hold.node
        assert node is not None
        target = copies.get((node, hold.account)) if node.is_dead else node
        if target is None:
            orphan(self._store, hold, above, pages)
            return
        hold.node = target
        self._store.lock_path(target, above)

"""Attaches pages that arrive on the host, from storage or from other groups, to the views that asked for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.types import Sharing
from services.scheduler.cache.tree import Reach
from services.scheduler.cache.types import PUBLIC_SCOPE, CacheEventKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.steps import PageIds
    from services.scheduler.cache.keys import PagedKey
    from services.scheduler.cache.node import Account, Node
    from services.scheduler.cache.store import NodeStore
    from services.scheduler.cache.types import Scope


class Arrivals:
    """Places for new nodes on the host, below the path that a view already has."""

    def __init__(self, store: NodeStore) -> None:
        self._store = store

    def find(self, scope: Scope, key: PagedKey, position: int) -> Node | None:
        """Return the node in the view `scope` that ends at `position` pages of `key` and may get children, or None."""
        tree, viewer = self._store.tree, self._store.accounts.view(scope)
        match = tree.match(tree.root, viewer, key, 0, position, Reach.HOST)
        if match.pages < position or not can_grow(match.partial or match.node):
            return None
        return match.node if match.partial is None else self._store.split(match.partial, match.partial_pages)

    def attach(
        self,
        scope: Scope,
        key: PagedKey,
        first: int,
        pages: PageIds,
        stored_as: Scope,
        note: Callable[[Node], None] | None = None,
    ) -> int:
        """Attach the pages [first, first + len(pages)) of `key` that are still missing in the view `scope`.

        They become pages of `stored_as`, which is the view, its tenant or the public, unless other nodes are in the
        way. Return len(pages), or 0 if they cannot be attached. `note` is called with the new node, if there is one.
        """
        store, end = self._store, first + len(pages)
        viewer = store.accounts.view(scope)
        match = store.tree.match(store.tree.root, viewer, key, 0, end, Reach.HOST)
        if match.pages < first:
            return 0
        if match.pages == end:
            return len(pages)
        above = self.find(scope, key, match.pages)
        page = key.page(match.pages)
        # A shared node that is hidden from the view is matched again only after the view has computed it.
        if above is None or any(node.owner_id in (PUBLIC_SCOPE, scope[:1]) for node in store.tree.group(above, page)):
            return 0
        owner = self._owner(viewer, stored_as, above, page)
        node = store.attach_on_host(above, owner, key.slice(match.pages, end), pages[match.pages - first :])
        if owner.is_shared and owner is not viewer:
            node.creators = {}
            node.generation = above.generation if above.owner is owner else 0
        if note is not None:
            note(node)
        store.emit(CacheEventKind.INSERTED, node)
        return len(pages)

    def _owner(self, viewer: Account, scope: Scope, above: Node, page: bytes) -> Account:
        """Return the owner for a page of `scope`: the same scope, unless other nodes are in the way."""
        accounts, siblings = self._store.accounts, self._store.tree.group(above, page)
        if scope == PUBLIC_SCOPE and above.is_public and not siblings:
            return accounts.public
        is_tenants = scope == viewer.tenant.scope and accounts.sharing_of(viewer.scope[0]) is not Sharing.NONE
        if is_tenants and above.is_shared and not any(sibling.owner_id[:1] == scope for sibling in siblings):
            return accounts.owner(scope)
        return accounts.owner(viewer.scope)


def can_grow(node: Node) -> bool:
    """Whether a node may have children that are only on the host."""
    return node.parent is None or node.host_pages is not None

"""Bringing pages back from the host to the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from common.transfers import TransferDirection
from services.scheduler.cache.keys import PagedKey
from services.scheduler.cache.tree import Reach
from services.scheduler.cache.types import NodeState

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.steps import PageIds
    from common.transfers import Transfer, TransferId
    from common.types import TokenIds
    from services.scheduler.cache.node import Account, Node
    from services.scheduler.cache.store import NodeStore
    from services.scheduler.cache.tiers.ledger import OpenTransfer, TransferLedger

_LIVE, _ON_HOST = NodeState.LIVE, NodeState.ON_HOST


@dataclass(frozen=True, slots=True)
class HostMatch:
    """How much of a request's view covers its tokens: on the device, and then further on the host alone.

    `loading` is the transfer that brings the first of the latter to the device, if one does already.
    """

    device_tokens: int
    host_tokens: int
    loading: TransferId | None = None


class Loads:
    """Finds what is only on the host, and makes it LIVE again."""

    def __init__(self, store: NodeStore, ledger: TransferLedger) -> None:
        """Work on the nodes of `store`."""
        self._store = store
        self._ledger = ledger
        self._page_size = store.tree.page_size

    def find(self, viewer: Account, token_ids: TokenIds) -> HostMatch:
        """Return what a view holds of a request's tokens; pure."""
        tree = self._store.tree
        match = tree.match(tree.root, viewer, *self._wanted(token_ids), Reach.HOST)
        at, end, on_device = match.partial or match.node, match.pages, match.pages
        loading: OpenTransfer | None = None
        while at.state is _ON_HOST:
            loading = self._ledger.about(at)
            on_device -= match.partial_pages if at is match.partial else at.size
            assert at.parent is not None
            at = at.parent
        return HostMatch(
            on_device * self._page_size,
            (end - on_device) * self._page_size,
            loading.transfer.transfer_id if loading else None,
        )

    def begin(self, viewer: Account, token_ids: TokenIds, allocate: Callable[[int], PageIds | None]) -> Transfer | None:
        """Begin to load all that `find` finds on the host; None if `allocate` has no device pages for it."""
        tree = self._store.tree
        match = tree.match(tree.root, viewer, *self._wanted(token_ids), Reach.HOST)
        end = match.node if match.partial is None else self._store.split(match.partial, match.partial_pages)
        path = self._on_host(end)
        assert path, "there is something to load"
        # From here on, making room on either tier leaves the path alone.
        self._ledger.need(end, 1)
        self._store.touch(end)
        device_pages = allocate(sum(node.size for node in path))
        transfer = None
        if device_pages is not None:
            host_pages = np.concatenate([node.host_pages for node in path if node.host_pages is not None])
            self._ledger.retain_host(host_pages)
            transfer = self._ledger.open(TransferDirection.HOST_TO_DEVICE, path, device_pages, host_pages)
        self._ledger.need(end, -1)
        return transfer

    def finish(self, opened: OpenTransfer) -> int:
        """Make nodes LIVE whose pages have been loaded; return how many pages that are.

        What has left the tree, or has been computed meanwhile, is not needed any more.
        """
        loaded = 0
        for node, device_pages, _ in opened.in_order():
            if node.state is _ON_HOST and node.parent is not None and node.parent.state is _LIVE:
                self._store.load(node, device_pages)
                loaded += len(device_pages)
        return loaded

    def restore(self, above: Node, account: Account, key: PagedKey, first: int, pages: PageIds) -> None:
        """Make nodes LIVE on the pages of a row that has computed them instead of loading them.

        Args:
            above: The node that the row's path ends in; it is locked.
            account: Whose view the row has.
            key: The row's tokens.
            first: Depth of `above` in pages.
            pages: The row's page table.
        """
        match = self._store.tree.match(above, account, key, first, key.pages, Reach.COMPUTED | Reach.HOST)
        end = match.partial or match.node
        if end.state is not _ON_HOST:
            return
        if match.partial is not None:
            end = self._store.split(match.partial, match.partial_pages)
        path = self._on_host(end)
        at = path[0].parent
        while at is not None and at.is_soft_free:
            self._store.revive(at)
            at = at.parent
        start = match.pages - sum(node.size for node in path)
        for node in path:
            self._store.load(node, pages[start : start + node.size])
            start += node.size
        self._store.offer(end)

    def _wanted(self, token_ids: TokenIds) -> tuple[PagedKey, int, int]:
        # The last token must be computed, for its logits.
        return PagedKey(token_ids, self._page_size), 0, max(len(token_ids) - 1, 0) // self._page_size

    def _on_host(self, end: Node) -> list[Node]:
        """Return the nodes from the first that is only on the host to `end`."""
        path = []
        at = end
        while at.state is _ON_HOST:
            path.append(at)
            assert at.parent is not None
            at = at.parent
        return path[::-1]

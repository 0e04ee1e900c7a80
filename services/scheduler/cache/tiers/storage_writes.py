"""Writes pages from the host to storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.transfers import TransferDirection
from services.scheduler.cache.config import Mode
from services.scheduler.cache.keys import chain_hashes
from services.scheduler.cache.object_keys import ObjectKeys

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.transfers import Transfer
    from services.scheduler.cache.node import Account, Node
    from services.scheduler.cache.store import NodeStore
    from services.scheduler.cache.tiers.ledger import TransferLedger
    from services.scheduler.cache.tiers.storage_config import PageNames

# Maximum number of names in one transfer that drops objects: 32 kB.
DROPPED_AT_ONCE = 1024
_NO_PAGES = np.empty(0, np.int32)


class StorageWrites:
    """Stores nodes that have a copy on the host, once under each owner, and drops stored pages.

    Of public nodes only pinned ones are stored as public. Others are public by choices of tenants, which may end while
    no scheduler has the node in memory; they are stored under each of these tenants already.
    """

    def __init__(self, store: NodeStore, ledger: TransferLedger, names: PageNames) -> None:
        self._store = store
        self._ledger = ledger
        self._names = names
        self._is_shared = store.config.mode is Mode.SHARED
        self._noted: dict[Node, None] = {}
        self._dropped: list[bytes] = []

    @property
    def has_work(self) -> bool:
        """Whether there are pages to write or to drop."""
        return bool(self._noted or self._dropped)

    def note(self, node: Node) -> None:
        """Note a node whose copy on the host is new, or whose owner has changed."""
        self._noted[node] = None

    def drop(self, account: Account) -> None:
        """Drop all stored pages that the tree has as an account's own."""
        for top in account.tops:
            self._drop(top)
            for node, _ in self._store.tree.walk(top):
                self._drop(node)

    def plan(self, room: int) -> Iterable[Transfer]:
        """Start the writes that fit into `room` pages, but at least one node."""
        while self._dropped:
            keys = ObjectKeys(tuple(self._dropped[:DROPPED_AT_ONCE]))
            self._dropped = self._dropped[DROPPED_AT_ONCE:]
            root = self._store.tree.root
            yield self._ledger.open_stored(TransferDirection.DROP_FROM_STORAGE, root, _NO_PAGES, keys)
        while self._noted and room > 0:
            node = next(iter(self._noted))
            del self._noted[node]
            if node.is_dead or node.host_pages is None or not self._may_store(node):
                continue
            room -= node.size
            self._ledger.retain_host(node.host_pages)
            direction = TransferDirection.HOST_TO_STORAGE
            yield self._ledger.open_stored(direction, node, node.host_pages, self._keys(node))

    def forget_all(self) -> None:
        """Start over: no copies are left. Pending drops remain."""
        self._noted.clear()

    def _may_store(self, node: Node) -> bool:
        return node.pinned or not node.is_public or self._is_shared

    def _drop(self, node: Node) -> None:
        self._noted.pop(node, None)
        self._dropped += self._keys(node).names

    def _keys(self, node: Node) -> ObjectKeys:
        tree = self._store.tree
        hashes = chain_hashes(tree.path_key(node), tree.page_bytes)
        return self._names.keys(node.owner_id, hashes[-node.size :])

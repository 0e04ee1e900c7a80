"""Which row holds which path, also while the tree changes its shape under it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.cache.types import Lease, LeaseId

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from common.steps import PageIds
    from common.types import View
    from services.scheduler.cache.node import Account, Node
    from services.scheduler.cache.store import NodeStore


@dataclass(slots=True, eq=False, repr=False)
class Hold:
    """What stands behind a lease: the path up to `node` is locked; None for a lease on nothing.

    Through a closed hold nothing more is inserted: the row's path has left its view while it ran, and
    `node` is what is left of it. `held` are the pages of the rest, protected as long as the row may read them.
    """

    account: Account
    node: Node | None
    may_promote: bool = True
    priority: int = 0
    sessions: frozenset[str] | None = None
    held: PageIds | None = None
    is_closed: bool = False


class Leases:
    """Owns the holds of all leases."""

    def __init__(self, page_size: int) -> None:
        """Start without leases."""
        self._page_size = page_size
        self._next = 0
        self._holds: dict[LeaseId, Hold] = {}

    def open(self, hold: Hold, view: View, pages: PageIds, shared_pages: tuple[int, int] = (0, 0)) -> Lease:
        """Return a new lease on `pages`; `shared_pages` says how many are public, and then the tenant's."""
        pages.flags.writeable = False
        public, tenant = (count * self._page_size for count in shared_pages)
        lease = Lease(LeaseId(self._next), view, len(pages) * self._page_size, pages, public, tenant)
        self._next += 1
        self._holds[lease.lease_id] = hold
        return lease

    def hold(self, lease: Lease) -> Hold:
        """Return what a living lease holds."""
        assert lease.lease_id in self._holds, f"lease {lease.lease_id} was released or replaced before"
        return self._holds[lease.lease_id]

    def close(self, lease: Lease) -> Hold:
        """End a lease; return what it held."""
        hold = self.hold(lease)
        del self._holds[lease.lease_id]
        return hold

    def all(self) -> Iterable[Hold]:
        """Return all holds, oldest lease first."""
        return self._holds.values()

    def repoint(self, moved: Mapping[Node, Node]) -> None:
        """Follow nodes that another node with the same end has taken the place of."""
        for hold in self._holds.values():
            while hold.node is not None and hold.node in moved:
                hold.node = moved[hold.node]


def orphan(store: NodeStore, hold: Hold, above: Node, pages: PageIds) -> None:
    """Let a hold go on with the path to `above` alone, whose locks it keeps; `pages` are those of the rest."""
    store.use.hold(pages)
    hold.held = pages if hold.held is None else np.concatenate([hold.held, pages])
    hold.node = above
    hold.is_closed = True

"""Maps prefix locks to locked paths while the tree is restructured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.cache.types import LockId, PrefixLock

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from common.steps import PageIds
    from common.types import View
    from services.scheduler.cache.node import Account, Node
    from services.scheduler.cache.store import NodeStore


@dataclass(slots=True, eq=False, repr=False)
class LockedPath:
    """The path that a prefix lock protects, up to `node`; None for an empty lock.

    Through a closed path nothing more is inserted: the end of the row's path has left its view while it ran, and `node`
    is the end of the remaining part. `held` are the pages of the lost part, protected as long as the row may read them.
    """

    account: Account
    node: Node | None
    may_promote: bool = True
    priority: int = 0
    sessions: frozenset[str] | None = None
    held: PageIds | None = None
    is_closed: bool = False


class LockTable:
    """Owns the locked paths of all prefix locks."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._next = 0
        self._paths: dict[LockId, LockedPath] = {}

    def open(
        self, locked: LockedPath, view: View, pages: PageIds, shared_pages: tuple[int, int] = (0, 0)
    ) -> PrefixLock:
        """Return a new lock on `pages`; `shared_pages` are the numbers of PUBLIC and of TENANT ones, which lead."""
        pages.flags.writeable = False
        public, tenant = (count * self._page_size for count in shared_pages)
        lock = PrefixLock(LockId(self._next), view, len(pages) * self._page_size, pages, public, tenant)
        self._next += 1
        self._paths[lock.lock_id] = locked
        return lock

    def path_of(self, lock: PrefixLock) -> LockedPath:
        """Return the path of a lock that has not been released."""
        assert lock.lock_id in self._paths, f"lock {lock.lock_id} was released or replaced before"
        return self._paths[lock.lock_id]

    def close(self, lock: PrefixLock) -> LockedPath:
        """Remove a lock; return its path."""
        locked = self.path_of(lock)
        del self._paths[lock.lock_id]
        return locked

    def all(self) -> Iterable[LockedPath]:
        """Return all locked paths, oldest lock first."""
        return self._paths.values()

    def repoint(self, moved: Mapping[Node, Node]) -> None:
        """Replace nodes by the nodes with the same end that took their place."""
        for locked in self._paths.values():
            while locked.node is not None and locked.node in moved:
                locked.node = moved[locked.node]


def orphan(store: NodeStore, locked: LockedPath, above: Node, pages: PageIds) -> None:
    """Shorten a locked path to `above`; `pages` are those of the lost part, which stay protected."""
    store.use.hold(pages)
    locked.held = pages if locked.held is None else np.concatenate([locked.held, pages])
    locked.node = above
    locked.is_closed = True

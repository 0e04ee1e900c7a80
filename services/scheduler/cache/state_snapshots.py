"""Snapshots of recurrent states: copies of rows' states at page boundaries, from which other rows continue.

A snapshot belongs to a page, after whose last token it was taken, and to an owner: a view, a tenant or the public. It
is found only by views that contain its owner, even if equal pages of several owners were merged; it is dropped when the
owner's node or the page goes. Snapshots are one more tier: the same shares, floors and order of eviction apply to them
as to pages, and each counts as one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from common.types import SnapshotSlot
from services.scheduler.cache.eviction import EvictionQueue

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from common.steps import PageIds
    from common.types import Subject
    from services.scheduler.cache.accounts import Accounts
    from services.scheduler.cache.config import CacheConfig
    from services.scheduler.cache.node import Account, Holder
    from services.scheduler.cache.types import Scope


@dataclass(slots=True, eq=False, repr=False)
class SnapshotEntry:
    """A snapshot as a candidate for eviction."""

    slot: SnapshotSlot
    page: int
    owner: Account
    epoch: int = 0
    last_access: int = 0
    uses: int = 0
    queued: int = 0
    pins: int = 0
    priority: int = 0
    u_pre: int = 0

    @property
    def pinned(self) -> bool:
        """Whether a session wants to continue from it: it is evicted last."""
        return self.pins > 0


class StateSnapshots:
    """Owns the workers' snapshot slots: free ones, those that rows fill, and those of pages."""

    def __init__(self, config: CacheConfig, accounts: Accounts, device_pages: int) -> None:
        """Start with `config.snapshots` free slots, for pages [0, device_pages)."""
        self.capacity = config.snapshots
        self.interval = config.snapshot_interval
        self.epoch = 0
        self._accounts = accounts
        self._queue: EvictionQueue[SnapshotEntry] = EvictionQueue(config, self.capacity, accounts)
        self._free = [SnapshotSlot(slot) for slot in range(self.capacity - 1, -1, -1)]
        self._entries: dict[int, dict[Scope, SnapshotEntry]] = {}
        # Whether a page has any, so that long paths need no loop.
        self._has_some: NDArray[np.bool_] = np.zeros(device_pages, np.bool_)
        self._clock = 0
        # Slots that belong to pages, and those that rows hold.
        self.kept = 0
        self.held = 0

    # --- of rows ---

    def try_allocate(self) -> SnapshotSlot | None:
        """Give a row a slot to fill, evicting the coldest snapshot if none is free.

        Rows hold at most half of all slots, so that they do not drive out what they could continue from.
        """
        if 2 * self.held >= self.capacity:
            return None
        if not self._free:
            victim = self._queue.first()
            if victim is None:
                return None
            self._drop(victim)
        self.held += 1
        return self._free.pop()

    def release(self, slot: SnapshotSlot) -> None:
        """Take a slot back from a row."""
        self.held -= 1
        self._free.append(slot)

    def attach(self, page: int, scope: Scope, slot: SnapshotSlot) -> None:
        """Let a row's slot, which is filled, belong to a page; it is freed if the owner has one there."""
        of_page = self._entries.setdefault(page, {})
        if scope in of_page:
            self._use(of_page[scope])
            self.release(slot)
            return
        entry = of_page[scope] = SnapshotEntry(slot, page, self._accounts.owner(scope))
        self._has_some[page] = True
        self.held -= 1
        self.kept += 1
        self._queue.charge(entry.owner, 1)
        self._renew(entry)
        while self._queue.excess(entry.owner) > 0 and (first := self._queue.first_of(entry.owner)) is not None:
            self._drop(first)

    # --- of views ---

    def deepest(self, pages: PageIds, viewer: Account) -> tuple[int, SnapshotEntry | None]:
        """Return the number of a path's leading pages that a row can continue after, and the snapshot there."""
        scopes = viewer.scope, viewer.tenant.scope, self._accounts.public.scope
        for index in np.flatnonzero(self._has_some[pages])[::-1].tolist():
            of_page = self._entries[int(pages[index])]
            for scope in scopes:
                if scope in of_page:
                    return index + 1, of_page[scope]
        return 0, None

    def touch(self, pages: PageIds, viewer: Account) -> None:
        """Record a use of the deepest snapshot."""
        _, entry = self.deepest(pages, viewer)
        if entry is not None:
            self._use(entry)

    def pin(self, pages: PageIds, scope: Scope) -> SnapshotEntry | None:
        """Keep the deepest snapshot of a path, in the view of `scope`, until `unpin`, if others can go instead."""
        _, entry = self.deepest(pages, self._accounts.view(scope))
        if entry is not None:
            entry.pins += 1
            self._use(entry)
        return entry

    def unpin(self, entry: SnapshotEntry) -> None:
        """Undo `pin`."""
        entry.pins -= 1
        if self._entries.get(entry.page, {}).get(entry.owner.scope) is entry:
            self._use(entry)

    # --- of pages and owners ---

    def forget(self, pages: PageIds) -> None:
        """Drop the snapshots of pages that are free."""
        for page in pages[self._has_some[pages]].tolist():
            for entry in list(self._entries[page].values()):
                self._drop(entry)

    def leave(self, pages: PageIds, scope: Scope) -> None:
        """Drop an owner's snapshots on pages of a node that it has no more."""
        for page in pages[self._has_some[pages]].tolist():
            entry = self._entries[page].get(scope)
            if entry is not None:
                self._drop(entry)

    def adopt(self, old: PageIds, new: PageIds) -> None:
        """Move snapshots from pages that become free to equal ones."""
        moving = self._has_some[old]
        for page, heir in zip(old[moving].tolist(), new[moving].tolist(), strict=True):
            for scope, entry in list(self._entries[page].items()):
                if scope not in self._entries.get(heir, {}):
                    self._unlink(entry)
                    entry.page = heir
                    self._entries.setdefault(heir, {})[scope] = entry
                    self._has_some[heir] = True

    def forget_subject(self, subject: Subject) -> None:
        """Drop all private snapshots of a subject."""
        mine = subject.tenant, subject.name
        for entry in [entry for of_page in self._entries.values() for entry in of_page.values()]:
            if not entry.owner.is_shared and entry.owner.subject == mine:
                self._drop(entry)

    def begin_epoch(self, epoch: int, idle: Iterable[Holder]) -> None:
        """Start an epoch; the subjects and tenants in `idle` have lost their floors."""
        self.epoch = epoch
        self._queue.begin_epoch(epoch, idle)

    def repair(self) -> None:
        """Free all slots that belong to no page: no row holds any."""
        kept = {entry.slot for of_page in self._entries.values() for entry in of_page.values()}
        self._free = [SnapshotSlot(slot) for slot in range(self.capacity - 1, -1, -1) if slot not in kept]
        self.held = 0

    def faults(self) -> list[str]:
        """Return inconsistencies. O(capacity), for audits."""
        entries = [entry for of_page in self._entries.values() for entry in of_page.values()]
        found = []
        if not all(self._entries.values()) or sorted(self._entries) != np.flatnonzero(self._has_some).tolist():
            found.append("pages without snapshots are listed, or others are not")
        if len(entries) != self.kept or len({*self._free, *(entry.slot for entry in entries)}) != (
            len(self._free) + len(entries)
        ):
            found.append("snapshots of pages are miscounted, or a slot belongs to two")
        if len(self._free) + self.kept + self.held != self.capacity:
            found.append(f"{len(self._free)} free, {self.kept} kept and {self.held} held slots of {self.capacity}")
        return found

    def _use(self, entry: SnapshotEntry) -> None:
        entry.uses += 1
        self._queue.discard(entry)
        self._renew(entry)

    def _renew(self, entry: SnapshotEntry) -> None:
        self._clock += 1
        entry.epoch, entry.last_access = self.epoch, self._clock
        self._queue.push(entry)

    def _unlink(self, entry: SnapshotEntry) -> None:
        of_page = self._entries[entry.page]
        del of_page[entry.owner.scope]
        if not of_page:
            del self._entries[entry.page]
            self._has_some[entry.page] = False

    def _drop(self, entry: SnapshotEntry) -> None:
        self._unlink(entry)
        self._queue.discard(entry)
        self._queue.charge(entry.owner, -1)
        self.kept -= 1
        self._free.append(entry.slot)

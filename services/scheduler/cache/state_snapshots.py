"""Snapshots of recurrent states: copies of rows' states at page boundaries, from which other rows continue.

A snapshot belongs to a page, after whose last token it was taken, and to an owner: a view, a tenant or the public. It
is found only by views that contain its owner, even if equal pages of several owners were merged; it is dropped when the
owner's node or the page goes. Snapshots are one more tier: the same shares, floors and order of eviction apply to them
as to pages, and each counts as one of them. The host tier has snapshots of its own, of its own pages, by these rules.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from common.types import SnapshotSlot
from services.scheduler.cache.eviction import EvictionQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from common.steps import PageIds
    from common.types import Subject
    from services.scheduler.cache.accounts import Accounts
    from services.scheduler.cache.config import CacheConfig
    from services.scheduler.cache.debug.decisions import DecisionRecorder, Facts
    from services.scheduler.cache.node import Account, Holder
    from services.scheduler.cache.types import Scope


@dataclass(slots=True, eq=False, repr=False)
class SnapshotEntry:
    """A snapshot as a candidate for eviction."""

    slot: SnapshotSlot
    page: int
    owner: Account
    # Counts all that the pool has had: by it, a decision log names what it pins or lends.
    number: int = 0
    epoch: int = 0
    last_access: int = 0
    uses: int = 0
    queued: int = 0
    pins: int = 0
    # Open copies and leases that read the slot: it is neither evicted nor given to others meanwhile.
    readers: int = 0
    # On the device: whether a copy on the host is to be made when the node's is, or is used for the next time.
    wants_copy: bool = True
    priority: int = 0
    u_pre: int = 0

    @property
    def pinned(self) -> bool:
        """Whether a session wants to continue from it: it is evicted last."""
        return self.pins > 0


class StateSnapshots:
    """Owns one tier's snapshot slots: free ones, those that rows or copies fill, and those of pages."""

    def __init__(self, config: CacheConfig, accounts: Accounts, pages: int, host_slots: int | None = None) -> None:
        """Start with `config.snapshots` free slots for the device's pages [0, pages), or `host_slots` for the host's.

        As with pages, a subject that exceeds its quota gives up its own at once on the device, and on the host when
        room is needed.
        """
        self.capacity = config.snapshots if host_slots is None else host_slots
        self._is_host = host_slots is not None
        self.interval = config.snapshot_interval
        self.epoch = 0
        # Records the calls of rows, sessions and leases; others follow from operations of the cache or its tiers.
        self.observer: DecisionRecorder | None = None
        self._accounts = accounts
        self._queue: EvictionQueue[SnapshotEntry] = EvictionQueue(config, self.capacity, accounts)
        self._free = [SnapshotSlot(slot) for slot in range(self.capacity - 1, -1, -1)]
        self._entries: dict[int, dict[Scope, SnapshotEntry]] = {}
        # Whether a page has any, so that long paths need no loop.
        self._has_some: NDArray[np.bool_] = np.zeros(pages, np.bool_)
        self._clock = 0
        self._made = 0
        # Slots that belong to pages, and those that rows hold.
        self.kept = 0
        self.held = 0
        # Slots that open copies fill, or still read although their snapshot has been dropped.
        self._moving: set[SnapshotSlot] = set()

    @property
    def moving(self) -> int:
        """Slots that belong to neither pages nor rows, but to open copies, or to leases of what has been dropped."""
        return len(self._moving)

    @property
    def moving_slots(self) -> frozenset[SnapshotSlot]:
        """The slots of `moving`, for audits."""
        return frozenset(self._moving)

    # --- of rows ---

    def try_allocate(self) -> SnapshotSlot | None:
        """Give a row a slot to fill, evicting the coldest snapshot if none is free.

        Rows hold at most half of all slots, so that they do not drive out what they could continue from.
        """
        with self._operation("fill_slot", {}) as outcome:
            slot = self._take() if 2 * self.held < self.capacity else None
            self.held += slot is not None
            outcome["slot"] = slot
        return slot

    def release(self, slot: SnapshotSlot) -> None:
        """Take a slot back from a row."""
        with self._operation("free_slot", {"slot": slot}):
            self.held -= 1
            self._free.append(slot)

    def attach(self, page: int, scope: Scope, slot: SnapshotSlot) -> None:
        """Let a row's slot, which is filled, belong to a page; it is freed if the owner has one there."""
        with self._operation("keep_slot", {"page": page, "scope": list(scope), "slot": slot}):
            self.held -= 1
            self._keep(page, scope, slot)

    # --- of copies between the tiers ---

    def try_reserve(self) -> SnapshotSlot | None:
        """Take a slot for a copy to fill, evicting the coldest snapshot if none is free.

        Copies fill at most half of all slots, as rows do.
        """
        slot = self._take() if 2 * self.moving < self.capacity else None
        if slot is not None:
            self._moving.add(slot)
        return slot

    @property
    def can_reserve(self) -> bool:
        """Whether `try_reserve` would give a copy a slot now."""
        return 2 * self.moving < self.capacity and (bool(self._free) or self._queue.first() is not None)

    def arrive(self, page: int, owner: Account, slot: SnapshotSlot) -> SnapshotEntry:
        """Let a slot that a copy has filled belong to a page; it is freed if the owner has a snapshot there.

        Return the owner's snapshot.
        """
        self._moving.remove(slot)
        entry = self._keep(page, owner.scope, slot)
        entry.wants_copy = False
        return entry

    def settle(self, page: int, scope: Scope, slot: SnapshotSlot) -> None:
        """Let a slot that was filled from elsewhere belong to a page; it is freed if the owner has one there."""
        self._moving.remove(slot)
        self._keep(page, scope, slot)

    def cancel(self, slot: SnapshotSlot) -> None:
        """Free a slot for a copy that is not wanted any more."""
        self._moving.remove(slot)
        self._free.append(slot)

    def lend(self, entry: SnapshotEntry) -> None:
        """Let a copy or a lease read a snapshot until `give_back`."""
        entry.readers += 1
        self._queue.discard(entry)

    def try_lend_last(self, pages: PageIds, scope: Scope) -> SnapshotEntry | None:
        """Let others read the snapshot after the last of `pages`, in the view of `scope`, until `give_back`.

        None: the view has none there.
        """
        with self._operation("lend_snapshot", {"pages": pages.copy(), "scope": list(scope)}) as outcome:
            depth, entry = self.deepest(pages, self._accounts.view(scope))
            if entry is None or depth < len(pages):
                return None
            self.lend(entry)
            outcome["entry"] = entry.number
        return entry

    def give_back(self, entry: SnapshotEntry) -> None:
        """Undo `lend`; a slot whose snapshot has been dropped meanwhile becomes free."""
        with self._operation("take_back_snapshot", {"entry": entry.number}):
            entry.readers -= 1
            if entry.readers:
                return
            if self.at(entry.page, entry.owner.scope) is entry:
                self._queue.push(entry)
            else:
                self.cancel(entry.slot)

    def at(self, page: int, scope: Scope) -> SnapshotEntry | None:
        """Return the snapshot of an owner after a page."""
        return self._entries[page].get(scope) if self._has_some[page] else None

    def on(self, pages: PageIds) -> Iterator[tuple[int, SnapshotEntry]]:
        """Yield the snapshots of all owners after each of `pages`, with the page's index there, in order."""
        for index in np.flatnonzero(self._has_some[pages]).tolist():
            for entry in self._entries[int(pages[index])].values():
                yield index, entry

    def all(self) -> Iterator[SnapshotEntry]:
        """Yield the snapshots of all pages."""
        for of_page in self._entries.values():
            yield from of_page.values()

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
        with self._operation("pin_snapshot", {"pages": pages.copy(), "scope": list(scope)}) as outcome:
            _, entry = self.deepest(pages, self._accounts.view(scope))
            if entry is not None:
                entry.pins += 1
                self._use(entry)
                outcome["entry"] = entry.number
        return entry

    def unpin(self, entry: SnapshotEntry) -> None:
        """Undo `pin`."""
        with self._operation("unpin_snapshot", {"entry": entry.number}):
            entry.pins -= 1
            if self.at(entry.page, entry.owner.scope) is entry:
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
                    self._move(entry, heir)

    def pass_on(self, old: PageIds, new: PageIds, scope: Scope) -> None:
        """Move the snapshots of `scope`, and of views in it, from pages of a node that goes to equal ones.

        The node was of `scope`. Others that refer to `old`, too, have theirs there.
        """
        moving = self._has_some[old] & (old != new)
        for page, heir in zip(old[moving].tolist(), new[moving].tolist(), strict=True):
            for owner, entry in list(self._entries[page].items()):
                if owner[: len(scope)] != scope:
                    continue
                if owner in self._entries.get(heir, {}):
                    self._drop(entry)
                else:
                    self._move(entry, heir)

    def forget_subject(self, subject: Subject) -> None:
        """Drop all private snapshots of a subject."""
        mine = subject.tenant, subject.name
        for entry in list(self.all()):
            if not entry.owner.is_shared and entry.owner.subject == mine:
                self._drop(entry)

    def begin_epoch(self, epoch: int, idle: Iterable[Holder]) -> None:
        """Start an epoch; the subjects and tenants in `idle` have lost their floors."""
        self.epoch = epoch
        self._queue.begin_epoch(epoch, idle)

    def repair(self) -> None:
        """Free all slots that belong to no page and no copy: no row holds any."""
        with self._operation("repair_slots", {}):
            used = {entry.slot for entry in self.all()} | self._moving
            self._free = [SnapshotSlot(slot) for slot in range(self.capacity - 1, -1, -1) if slot not in used]
            self.held = 0

    def faults(self) -> list[str]:
        """Return inconsistencies. O(capacity), for audits."""
        entries, found = list(self.all()), []
        if not all(self._entries.values()) or sorted(self._entries) != np.flatnonzero(self._has_some).tolist():
            found.append("pages without snapshots are listed, or others are not")
        used = {*self._free, *self._moving, *(entry.slot for entry in entries)}
        if len(entries) != self.kept or len(used) != len(self._free) + self.moving + len(entries):
            found.append("snapshots of pages are miscounted, or a slot belongs to two")
        if len(self._free) + self.kept + self.held + self.moving != self.capacity:
            found.append(
                f"{len(self._free)} free, {self.kept} kept, {self.held} held and {self.moving} moving slots of "
                f"{self.capacity}"
            )
        if any(bool(entry.queued) == bool(entry.readers) for entry in entries):
            found.append("a snapshot that is read can be evicted, or another cannot")
        return found

    def _operation(self, name: str, given: Facts) -> AbstractContextManager[Facts]:
        return nullcontext({}) if self.observer is None else self.observer.operation(name, given)

    def _take(self) -> SnapshotSlot | None:
        if not self._free:
            victim = self._queue.first()
            if victim is None:
                return None
            self._drop(victim)
        return self._free.pop()

    def _keep(self, page: int, scope: Scope, slot: SnapshotSlot) -> SnapshotEntry:
        """Let a slot that is in none of the sets belong to a page, or free it if the scope has one there."""
        of_page = self._entries.setdefault(page, {})
        if scope in of_page:
            self._use(of_page[scope])
            self._free.append(slot)
            return of_page[scope]
        self._made += 1
        # Which may have ended since a copy for it began.
        owner = self._accounts.owner(scope)
        owner.snapshots += 1
        entry = of_page[scope] = SnapshotEntry(slot, page, owner, self._made)
        self._has_some[page] = True
        self.kept += 1
        self._queue.charge(entry.owner, 1)
        self._renew(entry)
        while not self._is_host and self._queue.excess(entry.owner) > 0:
            first = self._queue.first_of(entry.owner)
            if first is None:
                break
            self._drop(first)
        return entry

    def _use(self, entry: SnapshotEntry) -> None:
        entry.uses += 1
        entry.wants_copy = True
        self._queue.discard(entry)
        self._renew(entry)

    def _renew(self, entry: SnapshotEntry) -> None:
        self._clock += 1
        entry.epoch, entry.last_access = self.epoch, self._clock
        if not entry.readers:
            self._queue.push(entry)

    def _move(self, entry: SnapshotEntry, page: int) -> None:
        self._unlink(entry)
        entry.page = page
        self._entries.setdefault(page, {})[entry.owner.scope] = entry
        self._has_some[page] = True

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
        entry.owner.snapshots -= 1
        self._accounts.forget_if_empty(entry.owner)
        self.kept -= 1
        if entry.readers:
            self._moving.add(entry.slot)
        else:
            self._free.append(entry.slot)

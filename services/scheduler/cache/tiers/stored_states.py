"""Snapshots of recurrent states in storage, beside the pages that they belong to: written, searched for and read.

A snapshot's name is derived as that of its page is, from the hash of the page and all before it and the keys of its
owner. So it can be named only by views that may see it, and becomes unreadable with the owner's pages.

Nothing lists which depths of a prompt have one. A request's search therefore asks storage which of the names of its
prompt exist, deepest first, before it reads pages: those after the deepest snapshot would be of no use. Before that,
one page is read, as for other models, so that a prompt that is not stored takes no search. If the last turn is long,
the one before it ended far before the end of the prompt, but often soon after the deepest regular snapshot there is.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from common.steps import NO_PAGES
from common.transfers import TransferDirection
from common.types import Sharing
from services.scheduler.cache.object_keys import ObjectKeys
from services.scheduler.cache.tree import Reach

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from common.steps import PageIds
    from common.transfers import Transfer, TransferAck, TransferId
    from common.types import SnapshotSlot
    from services.scheduler.cache.keys import PagedKey
    from services.scheduler.cache.node import Account, Node
    from services.scheduler.cache.state_snapshots import SnapshotEntry, StateSnapshots
    from services.scheduler.cache.store import NodeStore
    from services.scheduler.cache.tiers.config import PageNames
    from services.scheduler.cache.tiers.ledger import OpenTransfer, TransferLedger
    from services.scheduler.cache.tiers.state_copies import StateCopies
    from services.scheduler.cache.types import Scope

# So many pages before the end of a prompt, a snapshot is searched for after each page, as a turn may have ended there;
# before them only at regular depths first, and then after each of so many pages after the deepest one that exists. A
# name takes 2 µs and 32 bytes in each scope.
NEAR_PAGES = 512
# A search that was wrong, as objects are damaged or were deleted meanwhile, is repeated for earlier depths.
MAX_SEARCHES = 3
# Reads in turn of a request: a page, the search, the other pages, the snapshot. A second search is rare.
READS = 4
# Distinguishes the name of a snapshot from that of its page.
_SUFFIX = b" state"


def state_keys(names: PageNames, scope: Scope, hashes: Iterable[bytes]) -> ObjectKeys:
    """Return names and key of the snapshots of `scope` after pages with these chained hashes."""
    return names.keys(scope, (chain + _SUFFIX for chain in hashes))


class Step(Enum):
    """The next transfer of a search."""

    SEARCH = "search"
    READ = "read"


class StateSearch:
    """Progress of the search for the deepest snapshot of one prompt; depths are numbers of pages."""

    def __init__(self, scopes: Sequence[Scope], least: int, end: int, interval: int) -> None:
        """Look for snapshots at depths [least, end] under the names of `scopes`; regular ones are `interval` apart."""
        self.step: Step | None = None
        # Where a snapshot was found that has not been read yet, and under which name.
        self.found: tuple[int, Scope] | None = None
        # The depth of the snapshot that has arrived, and this.
        self.arrived = 0
        self.entry: SnapshotEntry | None = None
        self._scopes = scopes
        self._least = least
        self._end = end
        self._interval = interval
        self._searches = 0
        # Depths to search next, as those near the end have none, and what was found before them.
        self._gap = range(0)
        self._earlier: tuple[int, Scope] | None = None
        self._is_open = False
        self._is_over = least > end

    @property
    def is_done(self) -> bool:
        """Whether no snapshot will arrive any more."""
        return self._is_over and not self._is_open

    @property
    def has_found(self) -> bool:
        """Whether a snapshot was found that is still to be read."""
        return self.found is not None and not self._is_over

    def candidates(self) -> list[tuple[int, Scope]]:
        """Return the depths and names to search, best last: of equal depths the view's own name."""
        first = -(-self._least // self._interval) * self._interval
        depths: Sequence[int] = self._gap
        if not depths:
            depths = (*range(first, self._near, self._interval), *range(self._near, self._end + 1))
        return [(depth, scope) for depth in depths for scope in reversed(self._scopes)]

    @property
    def _near(self) -> int:
        """The first depth from which on all are searched."""
        return max(self._least, self._end - NEAR_PAGES + 1)

    def settle(self, position: int, *, has_pages: bool) -> None:
        """Choose the next step, once no pages are requested or in flight.

        Args:
            position: The depth up to which the view has pages now.
            has_pages: Whether pages after the first missing one may be stored.
        """
        if self._is_open or self._is_over:
            return
        if self._gap:
            self.step = Step.SEARCH
            return
        if self.found is not None and position >= self.found[0]:
            self.step = Step.READ
            return
        if self.found is not None or not has_pages:
            # What is missing ends the prompt.
            self.found, self._end = None, min(self._end, position)
        self.step = Step.SEARCH
        if self._end < self._least or self._searches >= MAX_SEARCHES:
            self.stop()

    def begin(self) -> None:
        """Record that the transfer of `step` has begun."""
        assert self.step is not None
        self._searches += self.step is Step.SEARCH and not self._gap
        self.step, self._is_open = None, True

    def end_search(self, found: tuple[int, Scope] | None) -> None:
        """Record where a search has found a snapshot."""
        self._is_open = False
        if self._is_over:
            return
        if self._gap:
            found, self._gap = found or self._earlier, range(0)
        else:
            after = self._least if found is None else found[0] + 1
            self._earlier, self._gap = found, range(after, min(after + NEAR_PAGES, self._near))
        if self._gap:
            return
        if found is None:
            self.stop()
        else:
            self.found, self._end = found, found[0]

    def end_read(self, *, has_arrived: bool) -> None:
        """Record whether the snapshot that was found has arrived; if not, an earlier one may be there."""
        assert self.found is not None
        self._is_open = False
        depth, _ = self.found
        self.found, self._end = None, depth - 1
        if has_arrived:
            self.arrived = depth
            self.stop()

    def stop(self) -> None:
        """Begin nothing more."""
        self._is_over, self.step = True, None

    def abandon(self) -> None:
        """Finish at once: nothing in flight will arrive."""
        self.stop()
        self._is_open = False


class StateReads:
    """Searches for snapshots, and reads them to the host for the views that have asked."""

    def __init__(self, store: NodeStore, ledger: TransferLedger, names: PageNames, states: StateCopies) -> None:
        """Read to the host's slots of `states`, with transfers in `ledger`."""
        self._store = store
        self._ledger = ledger
        self._names = names
        self._states = states
        self._searching: dict[TransferId, tuple[StateSearch, list[tuple[int, Scope]]]] = {}
        self._reading: dict[TransferId, StateRead] = {}

    @property
    def pool(self) -> StateSnapshots:
        """The host's snapshots."""
        return self._states.host

    @property
    def interval(self) -> int:
        """Pages that take as much memory as a snapshot."""
        return self._states.host.interval

    @property
    def has_slots(self) -> bool:
        """Whether the host can hold a snapshot."""
        return self._states.host.capacity > 0

    def resumable_pages(self, viewer: Account, key: PagedKey, end: int) -> int:
        """Return after how many of a prompt's pages a row of the view can continue from device or host."""
        match = self._store.tree.match(self._store.tree.root, viewer, key, 0, end, Reach.HOST)
        return self._states.resumable(match, viewer).pages

    def search(self, search: StateSearch, hashes: Sequence[bytes]) -> Transfer:
        """Start to search; `hashes` are those of all pages of the prompt."""
        candidates = search.candidates()
        names = {scope: self._names_of(scope, candidates, hashes) for _, scope in candidates}
        keys = ObjectKeys(tuple(next(names[scope]) for _, scope in candidates))
        direction, root = TransferDirection.FIND_IN_STORAGE, self._store.tree.root
        transfer = self._ledger.open_stored(direction, root, NO_PAGES, keys)
        search.begin()
        self._searching[transfer.transfer_id] = search, candidates
        return transfer

    def has_page(self, search: StateSearch, viewer: Scope, key: PagedKey) -> bool:
        """Return whether the page of the snapshot that was found is on the host."""
        return search.found is not None and self._place(viewer, key, search.found[0]) is not None

    def read(self, search: StateSearch, viewer: Scope, key: PagedKey, hashes: Sequence[bytes]) -> Transfer | None:
        """Start to read the snapshot that was found, which has a page; None if the host has no slot for it now."""
        assert search.found is not None
        depth, scope = search.found
        place = self._place(viewer, key, depth)
        assert place is not None, "the page is there"
        # May evict a snapshot of the path, but never one of its pages.
        slot = self._states.host.try_reserve()
        if slot is None:
            return None
        keys = state_keys(self._names, scope, (hashes[depth - 1],))
        transfer = self._ledger.open_stored(
            TransferDirection.STORAGE_TO_HOST, place[0], NO_PAGES, keys, np.array([slot], np.int32)
        )
        search.begin()
        self._reading[transfer.transfer_id] = StateRead(search, viewer, key, slot)
        return transfer

    def finish(self, opened: OpenTransfer, ack: TransferAck) -> int:
        """Record the end of a transfer of this object; return the number of snapshots that have arrived."""
        if opened.transfer.direction is TransferDirection.FIND_IN_STORAGE:
            search, candidates = self._searching.pop(ack.transfer_id)
            search.end_search(candidates[ack.done_pages - 1] if ack.done_pages else None)
            return 0
        read = self._reading.pop(ack.transfer_id)
        has_arrived = bool(ack.done_pages) and not read.is_void and self._attach(read)
        if not has_arrived:
            self._states.host.cancel(read.slot)
        read.search.end_read(has_arrived=has_arrived)
        return int(has_arrived)

    def revoke(self, is_meant: Callable[[Scope], bool]) -> None:
        """Let what is being read be dropped when it arrives, if its name or its reader is revoked."""
        for read in self._reading.values():
            assert read.search.found is not None
            read.is_void |= is_meant(read.search.found[1]) or is_meant(read.viewer)

    def forget_all(self) -> None:
        """Start over: the transfers are cancelled."""
        for read in self._reading.values():
            self._states.host.cancel(read.slot)
        self._reading.clear()
        self._searching.clear()

    def faults(self) -> list[str]:
        """Return inconsistencies, for audits."""
        slots = {read.slot for read in self._reading.values()}
        is_sound = len(slots) == len(self._reading) and slots <= self._states.host.moving_slots
        return [] if is_sound else ["a snapshot is read from storage to a slot of others"]

    def _names_of(
        self, scope: Scope, candidates: Sequence[tuple[int, Scope]], hashes: Sequence[bytes]
    ) -> Iterator[bytes]:
        chains = [hashes[depth - 1] for depth, stored_as in candidates if stored_as == scope]
        return iter(state_keys(self._names, scope, chains).names)

    def _attach(self, read: StateRead) -> bool:
        assert read.search.found is not None
        depth, stored_as = read.search.found
        place = self._place(read.viewer, read.key, depth)
        if place is None:
            return False
        node, page = place
        owner = self._owner(read.viewer, stored_as, node)
        read.search.entry = self._states.host.arrive(page, owner, read.slot)
        return True

    def _place(self, scope: Scope, key: PagedKey, depth: int) -> tuple[Node, int] | None:
        """Return the node in a view with the last of a prompt's first `depth` pages, and that page, if on the host."""
        tree = self._store.tree
        match = tree.match(tree.root, self._store.accounts.view(scope), key, 0, depth, Reach.HOST)
        node = match.partial or match.node
        if match.pages < depth or node.host_pages is None:
            return None
        return node, int(node.host_pages[(match.partial_pages or node.size) - 1])

    def _owner(self, viewer: Scope, stored_as: Scope, node: Node) -> Account:
        """Return the owner for a snapshot on `node`: as stored, unless the page is in fewer views here."""
        accounts = self._store.accounts
        if stored_as == viewer:
            return accounts.owner(viewer)
        is_tenants = stored_as == viewer[:1] and accounts.sharing_of(viewer[0]) is not Sharing.NONE
        if node.is_shared and (stored_as == node.owner_id or (is_tenants and node.is_public)):
            return accounts.owner(stored_as)
        return accounts.owner(viewer)


class StateRead:
    """A snapshot that is being read, into `slot` of the host; `is_void`: it is not wanted any more."""

    __slots__ = ("is_void", "key", "search", "slot", "viewer")

    def __init__(self, search: StateSearch, viewer: Scope, key: PagedKey, slot: SnapshotSlot) -> None:
        """Start with it wanted, for the view `viewer` and the prompt `key`."""
        self.search = search
        self.viewer = viewer
        self.key = key
        self.slot = slot
        self.is_void = False


class StateWrites:
    """Stores the snapshots of the host's pages, each under its owner."""

    def __init__(self, ledger: TransferLedger, names: PageNames, states: StateCopies) -> None:
        """Store the host's snapshots of `states`, with transfers in `ledger`."""
        self._ledger = ledger
        self._names = names
        self._states = states
        self._writing: dict[TransferId, SnapshotEntry] = {}

    def plan(self, node: Node, hashes: Sequence[bytes], may_store: Callable[[Account], bool]) -> Iterator[Transfer]:
        """Start to store the snapshots of a node whose pages have these chained hashes."""
        assert node.host_pages is not None
        host = self._states.host
        for index, entry in list(host.on(node.host_pages)):
            if not may_store(entry.owner):
                continue
            keys = state_keys(self._names, entry.owner.scope, (hashes[index],))
            host.lend(entry)
            slots: PageIds = np.array([entry.slot], np.int32)
            transfer = self._ledger.open_stored(TransferDirection.HOST_TO_STORAGE, node, NO_PAGES, keys, slots)
            self._writing[transfer.transfer_id] = entry
            yield transfer

    def finish(self, transfer: Transfer) -> None:
        """Record the end of a transfer of this object."""
        self._states.host.give_back(self._writing.pop(transfer.transfer_id))

    def forget_all(self) -> None:
        """Start over: the transfers are cancelled."""
        for entry in self._writing.values():
            self._states.host.give_back(entry)
        self._writing.clear()

    def faults(self) -> list[str]:
        """Return inconsistencies, for audits."""
        is_sound = all(entry.readers for entry in self._writing.values())
        return [] if is_sound else ["a snapshot that is being stored can be evicted"]

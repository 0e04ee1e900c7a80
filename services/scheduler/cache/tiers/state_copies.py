"""Copies of snapshots of recurrent states between device and host, with the pages that they belong to or alone.

A snapshot on the host belongs to a page of the host and to the owner that the one on the device has. `StateSnapshots`
keeps and evicts it as those; it goes with the page, which is of one node only. While a copy is open, its source is not
evicted, and neither slot is given to others, even if the snapshot is dropped meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from common.steps import NO_PAGES
from common.transfers import TransferDirection
from services.scheduler.cache.state_snapshots import StateSnapshots
from services.scheduler.cache.types import NodeState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from common.steps import PageIds
    from common.transfers import Transfer, TransferId
    from common.types import SnapshotSlot, Subject
    from services.scheduler.cache.node import Account, Node
    from services.scheduler.cache.state_snapshots import SnapshotEntry
    from services.scheduler.cache.store import NodeStore
    from services.scheduler.cache.tiers.host_pages import HostPages
    from services.scheduler.cache.tree import PrefixMatch

_ON_HOST = NodeState.ON_HOST


@dataclass(slots=True, eq=False, repr=False)
class StateCopy:
    """A copy of `source` to the slot `target` of the other tier, for the page number `offset` of `node`.

    Without a node, the copy is of no use any more when it is done.
    """

    source: SnapshotEntry
    target: SnapshotSlot
    node: Node | None
    offset: int


@dataclass(frozen=True, slots=True)
class Resumable:
    """After how many pages of a match a row can continue: from the device as it is, and with the host's `snapshot`.

    None: the host has none that is deeper.
    """

    device_pages: int
    pages: int
    snapshot: SnapshotEntry | None


class StateCopies:
    """Owns the host's snapshots, and the open copies between them and those of the device."""

    def __init__(self, store: NodeStore, host: HostPages, device: StateSnapshots, capacity: int) -> None:
        """Start without any on the host, which has `capacity` slots."""
        self.device = device
        self.host = StateSnapshots(store.config, store.accounts, host.allocator.capacity, capacity)
        host.allocator.snapshots = self.host
        # Totals since the start; skipped ones found no slot on the host.
        self.backed_up = 0
        self.loaded = 0
        self.skipped = 0
        self._tree = store.tree
        self._open: dict[TransferId, list[StateCopy]] = {}
        self._by_node: dict[Node, list[StateCopy]] = {}
        self._loading: dict[SnapshotEntry, TransferId] = {}

    def open(self, transfer: Transfer, copies: list[StateCopy]) -> None:
        """Follow the copies that `transfer` makes."""
        self._open[transfer.transfer_id] = copies
        for copy in copies:
            assert copy.node is not None, "a copy begins with a node"
            self._by_node.setdefault(copy.node, []).append(copy)
            if transfer.direction is TransferDirection.HOST_TO_DEVICE:
                self._loading[copy.source] = transfer.transfer_id

    # --- backups ---

    def is_missing(self, node: Node) -> bool:
        """Return whether a node with a copy on the host has snapshots that are to be copied, too."""
        return any(
            entry.wants_copy and not self._has_copy(node, index, entry)
            for index, entry in self.device.on(node.pages)
            if _is_in(node, entry)
        )

    def want_all(self) -> None:
        """Have all snapshots copied that the host lacks, also those whose copies were evicted and not used since."""
        for entry in self.device.all():
            entry.wants_copy = True

    def begin_backup(self, nodes: Iterable[Node]) -> list[StateCopy]:
        """Reserve slots of the host for snapshots of nodes that are copied or were; the deepest first, if too few.

        If there is none for the deepest, from which the next request would continue, it stays missing, and is to be
        tried again when there is one. The others are so after their next use.
        """
        wanted = [
            (node, index, entry)
            for node in nodes
            for index, entry in self.device.on(node.pages)
            if _is_in(node, entry) and not self._has_copy(node, index, entry)
        ]
        copies = []
        for node, index, entry in reversed(wanted):
            slot = self.host.try_reserve()
            # Of several owners, too.
            entry.wants_copy = slot is None and (node, index) == wanted[-1][:2]
            if slot is None:
                self.skipped += 1
                continue
            self.device.lend(entry)
            copies.append(StateCopy(entry, slot, node, index))
        return copies[::-1]

    # --- loads ---

    def resumable(self, match: PrefixMatch, viewer: Account) -> Resumable:
        """Return where a row of a view can continue in a match that extends to the host; changes nothing."""
        path = self._path(match)
        on_device = np.concatenate([NO_PAGES, *(node.pages[:pages] for node, pages in path)])
        device_pages, _ = self.device.deepest(on_device, viewer)
        pages, snapshot = self.host.deepest(_host_pages(path), viewer)
        if snapshot is None or pages <= device_pages:
            return Resumable(device_pages, device_pages, None)
        return Resumable(device_pages, pages, snapshot)

    def loading(self, snapshot: SnapshotEntry) -> TransferId | None:
        """Return the transfer that loads a snapshot of the host, if there is one."""
        return self._loading.get(snapshot)

    def begin_load(self, snapshot: SnapshotEntry, end: Node) -> StateCopy | None:
        """Reserve a slot of the device for a snapshot of the host after the last page of `end`; None if none is free.

        The caller passes it to `open`, or takes it back by `give_up`.
        """
        slot = self.device.try_reserve()
        if slot is None:
            return None
        self.host.lend(snapshot)
        return StateCopy(snapshot, slot, end, end.size - 1)

    def give_up(self, copy: StateCopy) -> None:
        """Undo `begin_load`."""
        self.host.give_back(copy.source)
        self.device.cancel(copy.target)

    def touch(self, node: Node, viewer: Account) -> None:
        """Record a use of the deepest snapshot on a path, which ends in `node`, as the device's is."""
        self.host.touch(_host_pages(self._path_to(node)), viewer)

    # --- both ---

    def finish(self, transfer: Transfer) -> list[Node]:
        """Let the snapshots that a transfer has copied belong to the pages of their nodes on the other tier.

        Return the nodes that have more snapshots on the host now.
        """
        backed_up = []
        is_load = transfer.direction is TransferDirection.HOST_TO_DEVICE
        sources, targets = (self.host, self.device) if is_load else (self.device, self.host)
        for copy in self._open.pop(transfer.transfer_id, []):
            node = copy.node
            self._forget(copy)
            sources.give_back(copy.source)
            pages = _target_pages(copy, is_load=is_load)
            if pages is None:
                targets.cancel(copy.target)
                continue
            targets.arrive(int(pages[copy.offset]), copy.source.owner, copy.target)
            self.loaded += is_load
            self.backed_up += not is_load
            if not is_load and node is not None:
                backed_up.append(node)
        return backed_up

    def drop(self, transfer: Transfer) -> None:
        """End a transfer whose copies are of no use, as the workers are gone."""
        for copy in self._open.get(transfer.transfer_id, []):
            self._detach(copy)
        self.finish(transfer)

    # --- the tree changes ---

    def split(self, node: Node, upper: Node) -> None:
        """Follow a split: each copy remains with its page."""
        copies = self._by_node.pop(node, [])
        for copy in copies:
            if copy.offset < upper.size:
                copy.node = upper
            else:
                copy.offset -= upper.size
            assert copy.node is not None
            self._by_node.setdefault(copy.node, []).append(copy)

    def take_over(self, node: Node, other: Node) -> None:
        """Follow the replacement of a node by one with the same tokens: its snapshots and open copies are of that."""
        for copy in self._by_node.pop(node, []):
            copy.node = other
            self._by_node.setdefault(other, []).append(copy)
        if node.host_pages is not None and other.host_pages is not None:
            self.host.pass_on(node.host_pages, other.host_pages, node.owner.scope)

    def leave(self, leaf: Node) -> None:
        """Follow a leaf's removal: copies that are open will be dropped."""
        for copy in list(self._by_node.get(leaf, [])):
            self._detach(copy)

    def forget(self, subject: Subject) -> None:
        """Drop all private snapshots of a subject on the host, and those on their way there or back."""
        self.host.forget_subject(subject)
        mine = subject.tenant, subject.name
        for copies in self._open.values():
            for copy in copies:
                if not copy.source.owner.is_shared and copy.source.owner.subject == mine:
                    self._detach(copy)

    def faults(self) -> list[str]:
        """Return inconsistencies. O(capacity), for audits."""
        found = [f"host: {fault}" for fault in self.host.faults()]
        attached = [copy for copies in self._open.values() for copy in copies if copy.node is not None]
        if sum(map(len, self._by_node.values())) != len(attached):
            found.append("open copies of snapshots are listed by other nodes than theirs")
        for copy in attached:
            assert copy.node is not None
            if copy.node.is_dead or not 0 <= copy.offset < copy.node.size:
                found.append(f"a snapshot is copied for page {copy.offset} of {copy.node.size}")
        return found

    def _has_copy(self, node: Node, index: int, entry: SnapshotEntry) -> bool:
        """Return whether the host has a copy of a snapshot, or one is being made."""
        if any(copy.source is entry for copy in self._by_node.get(node, ())):
            return True
        return node.host_pages is not None and self.host.at(int(node.host_pages[index]), entry.owner.scope) is not None

    def _path(self, match: PrefixMatch) -> list[tuple[Node, int]]:
        """Return the nodes of a match, parents first, and how many of their pages it covers."""
        path = self._path_to(match.node)
        if match.partial is not None:
            path.append((match.partial, match.partial_pages))
        return path

    def _path_to(self, node: Node) -> list[tuple[Node, int]]:
        path, at = [], node
        while at is not self._tree.root:
            path.append((at, at.size))
            assert at.parent is not None
            at = at.parent
        return path[::-1]

    def _detach(self, copy: StateCopy) -> None:
        """Let a copy be dropped when it is done."""
        self._forget(copy)
        copy.node = None

    def _forget(self, copy: StateCopy) -> None:
        self._loading.pop(copy.source, None)
        if copy.node is not None:
            siblings = self._by_node[copy.node]
            siblings.remove(copy)
            if not siblings:
                del self._by_node[copy.node]


def _is_in(node: Node, entry: SnapshotEntry) -> bool:
    """Return whether a snapshot is of use with a node's pages: merged pages have those of other owners, too."""
    return node.is_shared or entry.owner is node.owner


def _host_pages(path: Sequence[tuple[Node, int]]) -> PageIds:
    """Return the pages on the host of a path's beginning, as far as it has a copy."""
    parts = [NO_PAGES]
    for node, pages in path:
        if node.host_pages is None:
            break
        parts.append(node.host_pages[:pages])
    return np.concatenate(parts)


def _target_pages(copy: StateCopy, *, is_load: bool) -> PageIds | None:
    """Return the pages of a copy's node on the tier that it was made for, or None if it is of no use there."""
    node = copy.node
    if node is None or not _is_in(node, copy.source):
        return None
    if is_load:
        return None if node.state is _ON_HOST else node.pages
    return node.host_pages

"""Copies between device and host: backups by write policy, and loads of host pages back to the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from common.steps import NO_PAGES
from common.transfers import TransferDirection
from services.scheduler.cache.keys import PagedKey
from services.scheduler.cache.tiers.config import WritePolicy
from services.scheduler.cache.tree import Reach
from services.scheduler.cache.types import NodeState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Set

    from common.steps import PageIds
    from common.transfers import Transfer, TransferId
    from common.types import TokenIds
    from services.scheduler.cache.node import Account, Node
    from services.scheduler.cache.state_snapshots import SnapshotEntry
    from services.scheduler.cache.store import NodeStore
    from services.scheduler.cache.tiers.config import HostConfig
    from services.scheduler.cache.tiers.host_pages import HostPages
    from services.scheduler.cache.tiers.ledger import OpenTransfer, TransferLedger
    from services.scheduler.cache.tiers.state_copies import Resumable, StateCopies, StateCopy
    from services.scheduler.cache.tree import PrefixMatch

_LIVE, _ON_HOST = NodeState.LIVE, NodeState.ON_HOST


class Backups:
    """Chooses the next nodes to copy to the host.

    A node is never copied without its ancestors, so that the nodes on the host are closed under ancestors.
    """

    def __init__(
        self,
        store: NodeStore,
        host: HostPages,
        ledger: TransferLedger,
        config: HostConfig,
        states: StateCopies | None = None,
    ) -> None:
        self.skipped_pages = 0
        self._states = states
        self._store = store
        self._host = host
        self._ledger = ledger
        self._config = config
        self._reserve = int(store.allocator.capacity * config.reserve_share)
        # Nodes without a copy to consider, oldest note first.
        self._noted: dict[Node, None] = {}
        # Copies of these were asked for, whatever the policy.
        self._wanted: dict[Node, None] = {}
        # The host had no slot for the deepest snapshot of these, which may have got a copy since.
        self._unplaced: dict[Node, None] = {}
        self._open_pages = 0

    @property
    def are_wanted(self) -> bool:
        """Whether copies that `want_all` asked for have yet to begin."""
        return bool(self._wanted)

    def want_all(self) -> None:
        """Have all nodes copied, as far as the host has room: their device memory is about to be given back."""
        if self._states is not None:
            self._states.want_all()
        self._wanted = {node: None for node, _ in self._store.tree.walk() if self._is_missing(node)}

    def note(self, node: Node) -> None:
        """Record that a node without a copy, of its pages or of a snapshot, has been used or soft-freed."""
        if self._config.policy is not WritePolicy.WRITE_BACK or node.is_soft_free:
            self._noted[node] = None

    def split(self, node: Node, upper: Node) -> None:
        """Follow a split: both halves are still to be copied; the lower one may go before, or have a copy."""
        for nodes in (self._noted, self._wanted, self._unplaced):
            if node in nodes:
                nodes[upper] = None

    def replace(self, node: Node, other: Node) -> None:
        """Follow a node that is joined with its only child, or merged into an equal one, which is copied in its place.

        Both are copied if either is still to be.
        """
        for nodes in (self._noted, self._wanted, self._unplaced):
            if node in nodes:
                del nodes[node]
                nodes[other] = None

    def leave(self, leaf: Node) -> None:
        """Follow a leaf's removal, with which its snapshots go."""
        self._unplaced.pop(leaf, None)

    def unplaced(self) -> Set[Node]:
        """Return the nodes whose deepest snapshot may lack a slot on the host, for audits."""
        return self._unplaced.keys()

    def forget_all(self) -> None:
        self._noted.clear()
        self._wanted.clear()
        self._unplaced.clear()
        self._open_pages = 0

    def ended(self, transfer: Transfer) -> None:
        """Record the end of a backup."""
        self._open_pages -= weight_of(transfer, self._store)

    @property
    def has_slots_again(self) -> bool:
        """Whether the host has a slot now, for which snapshots have waited."""
        return bool(self._unplaced) and self._states is not None and self._states.host.can_reserve

    @property
    def is_due(self) -> bool:
        """Whether `plan` has anything to consider."""
        if self._wanted or self.has_slots_again:
            return True
        if self._config.policy is WritePolicy.WRITE_BACK:
            return self._store.allocator.free_pages + self._open_pages < self._reserve
        return bool(self._noted)

    def plan(self) -> list[Transfer]:
        """Start the backups that are due, as far as the window allows."""
        started: list[Transfer] = []
        while self._open_pages < self._config.window_pages and (node := self._next()) is not None:
            transfer = self._begin(node)
            if transfer is not None:
                self._open_pages += weight_of(transfer, self._store)
                started.append(transfer)
            elif self._config.policy is WritePolicy.WRITE_BACK and node.queued:
                # Soft-free it without a copy; otherwise it would be the next victim again.
                self._store.soften(node, node.size)
                self._noted.pop(node, None)
        return started

    def _next(self) -> Node | None:
        while self._wanted:
            node = next(iter(self._wanted))
            del self._wanted[node]
            if self._is_missing(node) and self._has_room(node):
                return node
        if self.has_slots_again and (unplaced := self._next_unplaced()) is not None:
            return unplaced
        if self._config.policy is WritePolicy.WRITE_BACK:
            return self._next_to_go()
        least = self._config.uses if self._config.policy is WritePolicy.WRITE_THROUGH_SELECTIVE else 1
        while self._noted:
            node = next(iter(self._noted))
            del self._noted[node]
            if self._is_missing(node) and node.uses >= least:
                return node
        return None

    def _next_unplaced(self) -> Node | None:
        """Return the next node with a copy whose deepest snapshot found no slot; its pages' copy may still be made."""
        for node in list(self._unplaced):
            if self._ledger.about(node) is not None:
                continue
            del self._unplaced[node]
            if node.host_pages is not None and self._is_missing(node):
                return node
        return None

    def _next_to_go(self) -> Node | None:
        """Return the next device victim without a copy, while too few pages are free or have a copy.

        Victims that have one, or that do not fit on the host, are soft-freed on the way.
        """
        store = self._store
        if store.allocator.free_pages + self._open_pages >= self._reserve:
            return None
        while self._noted:
            noted = next(iter(self._noted))
            del self._noted[noted]
            if noted.is_soft_free and self._is_missing(noted) and self._has_room(noted):
                return noted
        while store.allocator.free_pages + store.use.soft_free + self._open_pages < self._reserve:
            node = store.queue.first()
            if node is None:
                return None
            if self._is_missing(node) and self._has_room(node):
                return node
            store.soften(node, self._reserve)
            self._noted.pop(node, None)
        return None

    def _begin(self, node: Node) -> Transfer | None:
        """Start to copy a node with those of its ancestors that have no copy; None if the host has no room.

        Of a node that has a copy, only snapshots are copied.
        """
        path = self._path(node)
        # Prevents that making room drops the ancestors' copies.
        self._ledger.need(node, 1)
        host_pages = self._host.try_allocate(sum(part.size for part in path))
        transfer = None
        if host_pages is None:
            self.skipped_pages += node.size
        else:
            copies = [] if self._states is None else self._begin_states(self._states, path or [node])
            if path or copies:
                device_pages = np.concatenate([NO_PAGES, *(part.pages for part in path)])
                self._store.allocator.retain(device_pages)
                snapshots = _slots(copy.source.slot for copy in copies), _slots(copy.target for copy in copies)
                pages = device_pages, host_pages
                transfer = self._ledger.open(TransferDirection.DEVICE_TO_HOST, path, pages, node, snapshots)
                if self._states is not None:
                    self._states.open(transfer, copies)
        self._ledger.need(node, -1)
        return transfer

    def _begin_states(self, states: StateCopies, nodes: list[Node]) -> list[StateCopy]:
        """Reserve slots for the snapshots of nodes that are copied or were, and note where the deepest got none."""
        copies = states.begin_backup(nodes)
        self._unplaced.update((node, None) for node in nodes if states.is_missing(node))
        return copies

    def _path(self, node: Node) -> list[Node]:
        path = []
        at: Node | None = node
        while at is not None and at.parent is not None:
            if at.host_pages is None and self._ledger.about(at) is None:
                path.append(at)
            at = at.parent
        return path[::-1]

    def _has_room(self, node: Node) -> bool:
        room = self._host.allocator.free_pages + self._host.evictable
        return sum(part.size for part in self._path(node)) <= room

    def _is_missing(self, node: Node) -> bool:
        # A soft-free node is revived until its copy is made.
        if node.is_dead or node.state is _ON_HOST or self._ledger.about(node) is not None:
            return False
        return node.host_pages is None or (self._states is not None and self._states.is_missing(node))


@dataclass(frozen=True, slots=True)
class HostMatch:
    """Cached part of a request's tokens in its view: on the device, and beyond that on the host only.

    `loading` is the transfer that is loading the first of the latter, if there is one. With recurrent layers, both end
    after a snapshot, and pages between them may be on the device. `copied_tokens` is the memory that is to be copied
    for `host_tokens`, in that of tokens' KV.
    """

    device_tokens: int
    host_tokens: int
    loading: TransferId | None = None
    copied_tokens: int = 0


class Loads:
    """Finds nodes that are on the host only, and makes them LIVE again."""

    def __init__(self, store: NodeStore, ledger: TransferLedger, states: StateCopies | None = None) -> None:
        """Change nodes of `store`; transfers are opened in `ledger`, and snapshots copied by `states`, if any."""
        self._store = store
        self._ledger = ledger
        self._states = states
        self._page_size = store.tree.page_size

    def find(self, viewer: Account, token_ids: TokenIds) -> HostMatch:
        """Return the cached part of a request's tokens in a view; changes nothing."""
        match, resumable = self._match(viewer, token_ids)
        at, end, on_device = match.partial or match.node, match.pages, match.pages
        loading: OpenTransfer | None = None
        while at.state is _ON_HOST:
            loading = self._ledger.about(at)
            on_device -= match.partial_pages if at is match.partial else at.size
            assert at.parent is not None
            at = at.parent
        copied, load = end - on_device, loading.transfer.transfer_id if loading else None
        if resumable is not None:
            on_device = resumable.device_pages
            if resumable.snapshot is not None and self._states is not None:
                copied += self._store.config.snapshot_interval
                load = load or self._states.loading(resumable.snapshot)
        size = self._page_size
        return HostMatch(on_device * size, (end - on_device) * size, load, copied * size)

    def _match(self, viewer: Account, token_ids: TokenIds) -> tuple[PrefixMatch, Resumable | None]:
        """Return the match of a request's tokens in a view on either tier, as far as a row can continue from it."""
        tree = self._store.tree
        match = tree.match(tree.root, viewer, *self._wanted(token_ids), Reach.HOST)
        if self._states is None:
            return match, None
        resumable = self._states.resumable(match, viewer)
        return tree.shortened(match, resumable.pages), resumable

    def begin(self, viewer: Account, token_ids: TokenIds, allocate: Callable[[int], PageIds | None]) -> Transfer | None:
        """Start to load everything that `find` finds on the host; None if `allocate` has no device pages for it."""
        match, resumable = self._match(viewer, token_ids)
        end = match.node if match.partial is None else self._store.split(match.partial, match.partial_pages)
        path = self._on_host(end)
        snapshot = None if resumable is None else resumable.snapshot
        assert path or snapshot is not None, "there is something to load"
        # From here on, making room on either tier spares the path.
        self._ledger.need(end, 1)
        self._store.touch(end)
        copies = self._begin_state(snapshot, end)
        transfer = None if copies is None else self._begin_pages(path, end, copies, allocate)
        self._ledger.need(end, -1)
        return transfer

    def _begin_state(self, snapshot: SnapshotEntry | None, end: Node) -> list[StateCopy] | None:
        """Reserve what a load of a snapshot needs, if it is to load one; None if the device has no slot for it."""
        if snapshot is None or self._states is None:
            return []
        copy = self._states.begin_load(snapshot, end)
        return None if copy is None else [copy]

    def _begin_pages(
        self, path: list[Node], end: Node, copies: list[StateCopy], allocate: Callable[[int], PageIds | None]
    ) -> Transfer | None:
        device_pages = allocate(sum(node.size for node in path)) if path else NO_PAGES
        if device_pages is None:
            for copy in copies:
                assert self._states is not None, "it has begun the copy"
                self._states.give_up(copy)
            return None
        host_pages = np.concatenate([NO_PAGES, *(node.host_pages for node in path if node.host_pages is not None)])
        self._ledger.retain_host(host_pages)
        snapshots = _slots(copy.target for copy in copies), _slots(copy.source.slot for copy in copies)
        pages = device_pages, host_pages
        transfer = self._ledger.open(TransferDirection.HOST_TO_DEVICE, path, pages, end, snapshots)
        if self._states is not None:
            self._states.open(transfer, copies)
        return transfer

    def finish(self, opened: OpenTransfer) -> int:
        """Make nodes LIVE whose pages have been loaded; return the number of these pages.

        Pages are discarded if their node has been removed or computed meanwhile.
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
            above: The node in which the row's path ends; it is locked.
            account: The account of the row's view.
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
        """Return the nodes on the path to `end` that are on the host only, parents first."""
        path = []
        at = end
        while at.state is _ON_HOST:
            path.append(at)
            assert at.parent is not None
            at = at.parent
        return path[::-1]


def weight_of(transfer: Transfer, store: NodeStore) -> int:
    """Return the memory that a transfer copies, in pages."""
    pages = max(len(transfer.device_pages), len(transfer.host_pages))
    snapshots = max(len(transfer.device_snapshots), len(transfer.host_snapshots))
    return pages + snapshots * store.config.snapshot_interval


def _slots(slots: Iterable[int]) -> PageIds:
    return np.fromiter(slots, np.int32)

"""The host tier, as seen by the cache and the scheduler."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from common.transfers import TransferDirection
from services.scheduler.cache.tiers.copies import Backups, Loads, weight_of
from services.scheduler.cache.tiers.host_pages import HostPages
from services.scheduler.cache.tiers.ledger import TransferLedger
from services.scheduler.cache.tiers.peer_reads import PeerReads
from services.scheduler.cache.tiers.state_copies import StateCopies
from services.scheduler.cache.tiers.storage_tier import StorageTier
from services.scheduler.cache.types import Accounting, CacheEventKind, NodeState, scope_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence, Set
    from contextlib import AbstractContextManager

    from common.steps import PageIds
    from common.transfers import Transfer, TransferAck, TransferId
    from common.types import Subject, TokenIds, View
    from services.scheduler.cache.debug.decisions import DecisionRecorder, Facts
    from services.scheduler.cache.keys import PagedKey
    from services.scheduler.cache.node import Account, Holder, Node
    from services.scheduler.cache.store import NodeStore
    from services.scheduler.cache.tiers.config import HostConfig, PageNames, StorageConfig
    from services.scheduler.cache.tiers.copies import HostMatch
    from services.scheduler.cache.tiers.ledger import OpenTransfer
    from services.scheduler.cache.tiers.peer_reads import ArrivalPlace, PeerFetch, PromptUse
    from services.scheduler.cache.tiers.storage_reads import Fetch

_ON_HOST = NodeState.ON_HOST


class HostTier:
    """Copies of nodes in host memory.

    A host page is written by the backup of one node, and read only by loads of nodes that refer to it; a node refers to
    it once that backup is done on all ranks. So previous content of a page is overwritten before it can be read.
    """

    def __init__(self, store: NodeStore, config: HostConfig, view_of: Callable[[View], Account]) -> None:
        """Start empty, for the nodes of `store`; `view_of` returns a view's account."""
        self.config = config
        self.pages = HostPages(store, config.pages)
        self.ledger = TransferLedger(store, self.pages)
        self.backed_up_pages = 0
        self.loaded_pages = 0
        # From peers.
        self.fetched_pages = 0
        # Records the tier's operations and their outcomes.
        self.observer: DecisionRecorder | None = None
        # Backups that all ranks have finished, while older ones are unfinished.
        self._done: set[TransferId] = set()
        self.storage: StorageTier | None = None
        # None: the model has no recurrent layers.
        self.states: StateCopies | None = None
        device_snapshots = store.allocator.snapshots
        if device_snapshots is not None:
            self.states = StateCopies(store, self.pages, device_snapshots, config.snapshots)
        self.peers = PeerReads(store, self.pages, self.ledger, self.copied, self.states)
        self._store = store
        self._view_of = view_of
        self._backups = Backups(store, self.pages, self.ledger, config, self.states)
        self._loads = Loads(store, self.ledger, self.states)
        store.tier = self

    @property
    def skipped_pages(self) -> int:
        """Pages whose backup was skipped because the host had no room."""
        return self._backups.skipped_pages

    @property
    def snapshot_pages(self) -> int:
        """Pages that take as much memory as a snapshot of recurrent states; see `EngineCapacity.pages_per_snapshot`."""
        return self._store.config.snapshot_interval

    # --- called by the scheduler ---

    def add_storage(self, config: StorageConfig, names: PageNames) -> None:
        """Add a storage tier below: copies are stored, and missing pages looked up there."""
        self.storage = StorageTier(self._store, self.pages, self.ledger, config, names, self.states)

    def prefetch(
        self,
        view: View,
        token_ids: TokenIds,
        max_pages: int | None = None,
        least_pages: int = 0,
        *,
        is_batch: bool = False,
    ) -> Fetch | None:
        """Start to look up a request's missing pages in storage, or the first `max_pages` of them.

        With recurrent layers, a snapshot is of use if it saves computing `least_pages`. Without `max_pages`, pages are
        looked up as far as they have one. The lookups of batches let others pass.

        Returns None without a storage tier.
        """
        if self.storage is None:
            return None
        given: Facts = {"view": list(scope_of(view)), "token_ids": token_ids.copy(), "max_pages": max_pages}
        if least_pages:
            given["least_pages"] = least_pages
        if is_batch:
            given["is_batch"] = True
        with self._operation("prefetch", given) as outcome:
            fetch = self.storage.prefetch(self._view_of(view), token_ids, max_pages, least_pages, is_batch=is_batch)
            outcome["fetch"] = fetch and fetch.number
        return fetch

    def end_prefetch(self, fetch: Fetch) -> None:
        """Stop requesting pages, as the request has started or ended. Pages in flight are kept when they arrive.

        From here on, what has arrived may be evicted.
        """
        assert self.storage is not None, "it has begun the fetch"
        if fetch.is_done and fetch.turn is None:
            return
        with self._operation("end_prefetch", {"fetch": fetch.number}):
            self.storage.end(fetch)

    def plan_storage(self, now: float) -> list[Transfer]:
        """Start the storage transfers that are due."""
        if self.storage is None or not self.storage.has_work(now):
            return []
        with self._operation("plan_storage", {"now": now}) as outcome:
            started = self.storage.plan(now)
            outcome["transfers"] = [_facts(transfer) for transfer in started]
        return started

    def await_peer(
        self,
        view: View,
        token_ids: TokenIds,
        min_tokens: int,
        use: PromptUse,
        place: ArrivalPlace | None = None,
        *,
        has_tail: bool = False,
    ) -> PeerFetch | None:
        """Prepare to fetch a prompt's missing pages from a peer, if these have at least `min_tokens` tokens.

        They arrive in `place`, if that has room for all of them, or else on the host. `has_tail`: if they arrive in
        `place`, the page that the prompt does not fill is fetched, too.

        None also if they cannot be attached to the view, or if the tier's operations are recorded, as transfers from
        peers are not.
        """
        if self.observer is not None:
            return None
        return self.peers.begin(self._view_of(view), token_ids, min_tokens, use, place, has_tail=has_tail)

    def find(self, view: View, token_ids: TokenIds) -> HostMatch:
        """Return the lengths of a request's prefix cached in its view on the device, and beyond it on the host.

        Changes nothing.
        """
        return self._loads.find(self._view_of(view), token_ids)

    def load(self, view: View, token_ids: TokenIds, allocate: Callable[[int], PageIds | None]) -> Transfer | None:
        """Start to load the pages that `find` found on the host only; nothing happens if `allocate` returns None.

        `allocate` takes a number of device pages and returns them with one reference on each.
        """
        given: Facts = {"view": list(scope_of(view)), "token_ids": token_ids.copy()}
        with self._operation("load", given) as outcome:
            transfer = self._loads.begin(self._view_of(view), token_ids, allocate)
            outcome["transfer"] = transfer and _facts(transfer)
        return transfer

    def back_up_all(self) -> None:
        """Have `plan_backups` copy everything that the device holds, as far as the host has room."""
        with self._operation("back_up_all", {}):
            self._backups.want_all()

    @property
    def has_backups_to_begin(self) -> bool:
        """Whether copies have yet to begin that `back_up_all` asked for, or of snapshots that have slots only now."""
        return self._backups.are_wanted or self._backups.has_slots_again

    def unplaced(self) -> Set[Node]:
        """Return the nodes whose deepest snapshot may lack a slot, for audits."""
        return self._backups.unplaced()

    def plan_backups(self) -> list[Transfer]:
        """Start the backups that are due by the policy."""
        if not self._backups.is_due or (self.storage is not None and self.storage.needs_room):
            return []
        with self._operation("plan_backups", {}) as outcome:
            started = self._backups.plan()
            outcome["transfers"] = [_facts(transfer) for transfer in started]
        return started

    def finish(self, ack: TransferAck, now: float) -> Transfer | None:
        """Record that all ranks have finished a transfer; return it, or None if it is not open."""
        given: Facts = {"transfer": ack.transfer_id, "done_pages": ack.done_pages, "now": now}
        with self._operation("finish", given) as outcome:
            transfer = self._finish(ack, now)
            outcome["was_open"] = transfer is not None
        return transfer

    def _finish(self, ack: TransferAck, now: float) -> Transfer | None:
        opened = self.ledger.get(ack.transfer_id)
        if opened is None:
            return None
        if opened.transfer.direction.uses_storage:
            assert self.storage is not None, "only storage begins such transfers"
            self.storage.finish(opened, ack, now)
            if opened.transfer.direction is TransferDirection.STORAGE_TO_HOST:
                self.peers.skip_present()
            self.ledger.close(opened)
            return opened.transfer
        if opened.transfer.direction.is_from_peer:
            self.fetched_pages += self.peers.finish(opened, ack)
            self.ledger.close(opened)
            return opened.transfer
        assert ack.done_pages == opened.transfer.pages, "copies between device and host never end early"
        if opened.transfer.direction is TransferDirection.DEVICE_TO_HOST:
            self._done.add(ack.transfer_id)
            self._settle_backups()
        else:
            self.loaded_pages += self._loads.finish(opened)
            self._finish_states(opened)
            self.ledger.close(opened)
        return opened.transfer

    def flush(self) -> int:
        """Drop all copies that no transfer needs; return the number of host pages that became free."""
        free_before = self.pages.allocator.free_pages
        count = self.pages.evictable + free_before
        pages = self.pages.try_allocate(count)
        assert pages is not None, "what is evictable can be had"
        self.pages.allocator.release(pages)
        return count - free_before

    def forget_all(self) -> None:
        """Cancel the open transfers and drop all copies: the workers are gone, with their memory."""
        with self._operation("lose_workers", {}):
            for opened in list(self.ledger.all()):
                if self.states is not None:
                    self.states.drop(opened.transfer)
                self.ledger.close(opened)
            self._done.clear()
            self._backups.forget_all()
            self.peers.forget_all()
            if self.storage is not None:
                self.storage.forget_all()
            self.flush()

    def weight(self, transfer: Transfer) -> int:
        """Return the memory that a transfer copies, in pages: a snapshot counts as those between regular ones."""
        return weight_of(transfer, self._store)

    def account_snapshots(self) -> Accounting | None:
        """Return the accounting of the tier's snapshots, if it has any, in O(1); those being copied are protected."""
        if self.states is None:
            return None
        pool = self.states.host
        free = pool.capacity - pool.kept - pool.moving
        return Accounting(pool.capacity, free, 0, pool.kept, pool.moving, pool.held)

    def account(self) -> Accounting:
        """Return the tier's page accounting in O(1)."""
        allocator, evictable = self.pages.allocator, self.pages.evictable
        return Accounting(
            capacity=allocator.capacity,
            free=allocator.free_pages,
            soft_free=0,
            evictable=evictable,
            protected=allocator.capacity - allocator.free_pages - evictable,
            unaccounted_references=allocator.references - self.pages.references - self.ledger.host_references,
        )

    def _operation(self, name: str, given: Facts) -> AbstractContextManager[Facts]:
        return nullcontext({}) if self.observer is None else self.observer.operation(name, given)

    def _settle_backups(self) -> None:
        """Finish the completed backups, oldest first: a copy is useless without those of its ancestors."""
        for opened in list(self.ledger.all()):
            if opened.transfer.direction is not TransferDirection.DEVICE_TO_HOST:
                continue
            if opened.transfer.transfer_id not in self._done:
                break
            self._done.remove(opened.transfer.transfer_id)
            self.backed_up_pages += self._keep(opened)
            self._finish_states(opened)
            self._backups.ended(opened.transfer)
            self.ledger.close(opened)

    def _finish_states(self, opened: OpenTransfer) -> None:
        if self.states is None:
            return
        for node in self.states.finish(opened.transfer):
            if self.storage is not None:
                self.storage.note_states(node)

    def _keep(self, opened: OpenTransfer) -> int:
        """Assign copies to the nodes that they were made for; return the number of their pages."""
        kept = 0
        for node, _, host_pages in opened.in_order():
            above = node.parent
            assert above is not None
            # The node may have been moved below one whose copy is missing.
            if node.host_pages is None and (above.parent is None or above.host_pages is not None):
                self.pages.keep(node, host_pages)
                self._store.emit(CacheEventKind.BACKED_UP, node)
                self.copied(node)
                kept += len(host_pages)
        return kept

    # --- TierObserver ---

    def keep(self, node: Node, host_pages: PageIds) -> None:
        self.pages.keep(node, host_pages)

    def note(self, node: Node) -> None:
        if node.host_pages is None or (self.states is not None and self.states.is_missing(node)):
            self._backups.note(node)
        if self.storage is not None:
            self.storage.use(node)

    def split(self, node: Node, upper: Node) -> None:
        self.pages.split(node, upper)
        self.ledger.split(node, upper)
        self._backups.split(node, upper)
        if self.states is not None:
            self.states.split(node, upper)
        if self.storage is not None:
            self.storage.split(node, upper)

    def absorb(self, node: Node, child: Node) -> None:
        self.pages.absorb(node, child)
        self._backups.replace(node, child)
        if self.storage is not None:
            self.storage.absorb(node, child)

    def rehang(self, node: Node, old: Node) -> None:
        self.pages.rehang(node, old)
        self.ledger.rehang(node, old)

    def take_over(self, node: Node, other: Node) -> None:
        self.ledger.follow(node, other)
        self._backups.replace(node, other)
        if self.states is not None:
            self.states.take_over(node, other)
        self.pages.hand_on(node, other)

    def hand_over(self, node: Node) -> None:
        self.pages.hand_over(node)
        self.copied(node)

    def leave(self, leaf: Node) -> None:
        self.ledger.leave(leaf)
        self._backups.leave(leaf)
        if self.storage is not None:
            self.storage.leave(leaf)
        if self.states is not None:
            self.states.leave(leaf)
        if leaf.host_pages is not None:
            self.pages.drop(leaf)

    def strip(self, top: Node) -> None:
        for node in reversed([top, *(node for node, _ in self._store.tree.walk(top))]):
            if node.state is _ON_HOST and node is not top:
                self._store.remove(node)
            elif node.host_pages is not None and node.state is not _ON_HOST:
                self.pages.drop(node)

    def restore(self, above: Node, account: Account, key: PagedKey, first: int, pages: PageIds) -> None:
        if self.pages.references:
            self._loads.restore(above, account, key, first, pages)

    def begin_epoch(self, epoch: int, idle: Sequence[Holder]) -> None:
        self.pages.queue.begin_epoch(epoch, idle)
        if self.states is not None:
            self.states.host.begin_epoch(epoch, idle)

    def pages_of(self, account: Account) -> int:
        return self.pages.pages_of(account)

    def revoke(self, account: Account) -> None:
        if self.storage is not None:
            self.storage.demote(account)

    def distrust(self, fingerprints: Iterable[int]) -> None:
        if self.storage is not None:
            self.storage.distrust(fingerprints)

    def forget(self, subject: Subject, accounts: Iterable[Account]) -> None:
        if self.storage is not None:
            self.storage.forget(subject, accounts)

    def renew(self, accounts: Iterable[Account]) -> None:
        if self.storage is not None:
            self.storage.renew(accounts)

    def copied(self, node: Node) -> None:
        """Store a node's new copy, or a copy whose owner has changed."""
        if self.storage is not None and node.host_pages is not None:
            self.storage.note(node)


def _facts(transfer: Transfer) -> Facts:
    return {
        "transfer": transfer.transfer_id,
        "direction": transfer.direction.value,
        "device_pages": transfer.device_pages,
        "host_pages": transfer.host_pages,
    }

"""The storage tier, as seen by the cache and the scheduler."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from common.circuit_breaker import CircuitBreaker
from common.transfers import TransferDirection
from services.scheduler.cache.config import Mode
from services.scheduler.cache.keys import chain_hashes
from services.scheduler.cache.object_keys import ObjectKeys
from services.scheduler.cache.tiers.config import CommonNames, PrefetchPolicy
from services.scheduler.cache.tiers.copies import weight_of
from services.scheduler.cache.tiers.storage_reads import StorageReads
from services.scheduler.cache.tiers.stored_states import StateReads, StateWrites, state_keys

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.transfers import Transfer, TransferAck
    from common.types import Subject, TokenIds
    from services.scheduler.cache.node import Account, Node
    from services.scheduler.cache.store import NodeStore
    from services.scheduler.cache.tiers.config import PageNames, StorageConfig
    from services.scheduler.cache.tiers.host_pages import HostPages
    from services.scheduler.cache.tiers.ledger import OpenTransfer, TransferLedger
    from services.scheduler.cache.tiers.state_copies import StateCopies
    from services.scheduler.cache.tiers.storage_reads import Fetch

# Maximum number of names in one transfer that drops objects: 32 kB.
DROPPED_AT_ONCE = 1024
_NO_PAGES = np.empty(0, np.int32)


class StorageTier:
    """Pages that outlive the host tier, and may be shared with other schedulers.

    The tier keeps no index of storage: pages are requested, and a miss is always a valid outcome.
    """

    def __init__(
        self,
        store: NodeStore,
        host: HostPages,
        ledger: TransferLedger,
        config: StorageConfig,
        names: PageNames,
        states: StateCopies | None = None,
    ) -> None:
        """Use the host's pages and snapshots, with transfers in `ledger`; `names` supplies their names in storage."""
        self.config = config
        self.stored_pages = 0
        self.fetched_pages = 0
        self.stored_snapshots = 0
        self.fetched_snapshots = 0
        # Lookups that did not return all requested pages, because they are missing or damaged, or storage failed.
        self.misses = 0
        self._store = store
        if store.config.mode is Mode.SHARED:
            names = CommonNames(names)
        self._names = names
        state_writes = None if states is None else StateWrites(ledger, names, states)
        state_reads = None if states is None else StateReads(store, ledger, names, states)
        self._writes = StorageWrites(store, ledger, names, state_writes)
        self._reads = StorageReads(store, host, ledger, config, names, state_reads)
        # Transfers prevent the eviction of pages, so most of a small tier is left alone.
        self._window = max(1, min(config.window_pages, host.allocator.capacity // 4))
        # Memory in flight now, in pages; a search counts as one.
        self.reading_pages = 0
        self.writing_pages = 0

    @property
    def unused_pages(self) -> int:
        """Pages that were read for requests with recurrent layers, but no snapshot after them."""
        return self._reads.unused_pages

    # --- called by the scheduler ---

    def prefetch(
        self,
        viewer: Account,
        token_ids: TokenIds,
        max_pages: int | None = None,
        least_pages: int = 0,
        *,
        is_batch: bool = False,
    ) -> Fetch | None:
        """Start to look up a request's pages that are missing in a view, or the first `max_pages` of them.

        With recurrent layers, also the deepest snapshot that saves computing at least `least_pages`.
        """
        if self.config.policy is PrefetchPolicy.OFF:
            return None
        return self._reads.begin(viewer, token_ids, max_pages, least_pages, is_batch=is_batch)

    def is_awaited(self, fetch: Fetch, now: float) -> bool:
        """Whether a request that could start now must wait for its pages."""
        if fetch.is_done or self.config.policy is PrefetchPolicy.BEST_EFFORT:
            return False
        if fetch.awaited_since is None:
            fetch.awaited_since = now
        return self.config.policy is PrefetchPolicy.WAIT_COMPLETE or now < fetch.awaited_since + self.config.wait_s

    def end(self, fetch: Fetch) -> None:
        """Stop requesting pages, as the request has started or ended. Pages in flight are kept when they arrive.

        From here on, what has arrived may be evicted.
        """
        self._reads.end(fetch)

    def find(self, number: int) -> Fetch | None:
        """Return the lookup with this number, if it is in progress or holds what it has brought."""
        return self._reads.find(number)

    @property
    def is_reading(self) -> bool:
        """Whether pages are in flight that a request may be waiting for."""
        return self.reading_pages > 0

    @property
    def needs_room(self) -> bool:
        """Whether a read waits for room on the host that a transfer takes up, so that no backup may do so next."""
        return self._reads.needs_room

    def has_work(self, now: float) -> bool:
        """Whether `plan` has transfers to start, now or when there is room."""
        return self._writes.has_work(now) or self._reads.has_work(now)

    def plan(self, now: float) -> list[Transfer]:
        """Start the transfers that there is room for: reads, then writes."""
        with self._names.together():
            return list(self._begin(now))

    def _begin(self, now: float) -> Iterable[Transfer]:
        for transfer in self._reads.plan(self._window - self.reading_pages, now):
            self.reading_pages += self._weight(transfer)
            yield transfer
        for transfer in self._writes.plan(max(self._window // 2, 1) - self.writing_pages, now):
            self.writing_pages += self._weight(transfer)
            yield transfer

    def finish(self, opened: OpenTransfer, ack: TransferAck, now: float) -> None:
        """Record that all ranks have finished a transfer; the caller closes it."""
        transfer = opened.transfer
        has_states = len(transfer.host_snapshots) > 0
        if transfer.direction is TransferDirection.STORAGE_TO_HOST:
            self.reading_pages -= self._weight(transfer)
            self.misses += ack.done_pages < transfer.pages
            if has_states:
                self.fetched_snapshots += self._reads.finish_states(opened, ack)
            else:
                self.fetched_pages += self._reads.finish(opened, ack)
        elif transfer.direction is TransferDirection.FIND_IN_STORAGE:
            self.reading_pages -= self._weight(transfer)
            self._reads.finish_states(opened, ack)
        elif transfer.direction is TransferDirection.HOST_TO_STORAGE:
            self.writing_pages -= self._weight(transfer)
            self._writes.finish(opened, ack, now)
            if has_states:
                self.stored_snapshots += ack.done_pages
            else:
                self.stored_pages += ack.done_pages

    def forget_all(self) -> None:
        """Start over: the workers and the host tier are gone; storage is not."""
        self.reading_pages = self.writing_pages = 0
        self._reads.forget_all()
        self._writes.forget_all()

    def faults(self) -> list[str]:
        """Return inconsistencies, for audits."""
        return [*self._reads.faults(), *self._writes.faults()]

    # --- called by the cache ---

    def note(self, node: Node) -> None:
        """Note a node whose copy on the host is new, or whose owner has changed."""
        if self.config.writes:
            self._writes.note(node)

    def note_states(self, node: Node) -> None:
        """Note a node whose pages have more snapshots on the host."""
        if self.config.writes:
            self._writes.note_states(node)

    def use(self, node: Node) -> None:
        """Store what could not be stored of a node that was used, as it is wanted again."""
        self._writes.retry(node)

    def leave(self, leaf: Node) -> None:
        """Follow a leaf's removal."""
        self._writes.leave(leaf)

    def split(self, node: Node, upper: Node) -> None:
        """Follow a split: both halves are still to be stored."""
        self._writes.split(node, upper)

    def absorb(self, node: Node, child: Node) -> None:
        """Follow the joining of a node with its only child: both are stored if either is still to be."""
        self._writes.absorb(node, child)

    def distrust(self, fingerprints: Iterable[int]) -> None:
        """Note subjects that appear to have probed shared prompts."""
        self._reads.distrust(fingerprints)

    def demote(self, account: Account) -> None:
        """Destroy the key of the pages stored as a tenant's or the public's, as some of them turned out to be private.

        Their remaining pages are stored again, under new names and a new key.
        """
        self._names.revoke(account.scope)
        self._reads.revoke(lambda scope: scope == account.scope)
        if account.is_public:
            self._note_all(self._store.tree.walk_owned(account))
        else:
            self.renew((account,))

    def renew(self, accounts: Iterable[Account]) -> None:
        """Store the remaining pages of these owners under their new names and keys."""
        for account in accounts:
            for top in account.tops:
                self._note_all((top, *self._store.tree.walk_owned(account, top=top)))

    def forget(self, subject: Subject, accounts: Iterable[Account]) -> None:
        """Destroy the key of a subject's stored pages, in all views; `accounts` are those of its views in memory."""
        for account in accounts:
            self._writes.drop(account)
        self._names.revoke((subject.tenant, subject.name))
        self._reads.revoke(lambda scope: scope[:2] == (subject.tenant, subject.name))

    def _weight(self, transfer: Transfer) -> int:
        """Return the memory that a transfer takes, in pages."""
        return max(weight_of(transfer, self._store), transfer.direction is TransferDirection.FIND_IN_STORAGE)

    def _note_all(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node.host_pages is not None:
                self.note(node)


class StorageWrites:
    """Stores nodes that have a copy on the host, once under each owner, and drops stored pages and snapshots.

    Of public nodes only pinned ones are stored as public. Others are public by choices of tenants, which may end while
    no scheduler has the node in memory; they are stored under each of these tenants already.

    A write that fails is repeated after the node's next use: pages after a missing one could not be found, and what is
    not used is not worth the attempts while storage is down. After some failures in a row, as on a disk that is full or
    read-only, nothing is written for a while, and then one node is tried before the others; what is noted meanwhile
    waits. It is stored under the owner that it has by then.
    """

    def __init__(
        self, store: NodeStore, ledger: TransferLedger, names: PageNames, states: StateWrites | None = None
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._names = names
        self._states = states
        self._is_shared = store.config.mode is Mode.SHARED
        # Nodes, and whether their pages are to be stored besides their snapshots.
        self._noted: dict[Node, bool] = {}
        # The same of nodes whose last write failed.
        self._failed: dict[Node, bool] = {}
        self._dropped: list[bytes] = []
        self._breaker = CircuitBreaker()

    def has_work(self, now: float) -> bool:
        """Whether there are pages to drop, or to write now."""
        return bool(self._dropped) or (bool(self._noted) and self._breaker.is_ready(now))

    def note(self, node: Node) -> None:
        """Note a node whose copy on the host is new, or whose owner has changed."""
        self._noted[node] = True

    def note_states(self, node: Node) -> None:
        """Note a node whose pages have more snapshots on the host."""
        self._noted.setdefault(node, False)

    def split(self, node: Node, upper: Node) -> None:
        """Follow a split: both halves are still to be stored."""
        for nodes in (self._noted, self._failed):
            if node in nodes:
                nodes[upper] = nodes[node]

    def absorb(self, node: Node, child: Node) -> None:
        """Follow the joining of a node with its only child: both are stored if either is still to be."""
        for nodes in (self._noted, self._failed):
            if node in nodes:
                has_pages = nodes.pop(node)
                nodes[child] = has_pages or nodes.get(child, False)

    def leave(self, leaf: Node) -> None:
        """Follow a leaf's removal."""
        self._noted.pop(leaf, None)
        self._failed.pop(leaf, None)

    def retry(self, node: Node) -> None:
        """Note a node again if its last write failed."""
        if node in self._failed:
            has_pages = self._failed.pop(node)
            self._noted[node] = has_pages or self._noted.get(node, False)

    def drop(self, account: Account) -> None:
        """Drop all stored pages that the tree has as an account's own."""
        for top in account.tops:
            self._drop(top)
            for node, _ in self._store.tree.walk(top):
                self._drop(node)

    def plan(self, room: int, now: float) -> Iterable[Transfer]:
        """Start the writes that fit into `room` pages, but at least one node; none while writes pause."""
        while self._dropped:
            keys = ObjectKeys(tuple(self._dropped[:DROPPED_AT_ONCE]))
            self._dropped = self._dropped[DROPPED_AT_ONCE:]
            root = self._store.tree.root
            yield self._ledger.open_stored(TransferDirection.DROP_FROM_STORAGE, root, _NO_PAGES, keys)
        while self._noted and room > 0 and self._breaker.is_ready(now):
            node = next(iter(self._noted))
            has_pages = self._noted.pop(node)
            if node.is_dead or node.host_pages is None:
                continue
            if has_pages:
                self._failed.pop(node, None)
            for transfer in self._store_node(node, has_pages=has_pages):
                self._breaker.begin()
                room -= weight_of(transfer, self._store)
                yield transfer

    def _store_node(self, node: Node, *, has_pages: bool) -> Iterable[Transfer]:
        """Start to store a node's snapshots, and its pages if they are not stored yet, under their present owners."""
        assert node.host_pages is not None
        hashes = self._hashes(node)
        if has_pages and self._may_store(node, node.owner):
            self._ledger.retain_host(node.host_pages)
            keys = self._names.keys(node.owner_id, hashes)
            yield self._ledger.open_stored(TransferDirection.HOST_TO_STORAGE, node, node.host_pages, keys)
        if self._states is not None:
            yield from self._states.plan(node, hashes, partial(self._may_store, node))

    def finish(self, opened: OpenTransfer, ack: TransferAck, now: float) -> None:
        """Record that all ranks have stored pages or a snapshot, or failed to."""
        transfer = opened.transfer
        if len(transfer.host_snapshots):
            assert self._states is not None, "it has begun the transfer"
            self._states.finish(transfer)
        if ack.done_pages == len(transfer.object_keys):
            self._breaker.succeed()
            return
        self._breaker.fail(now)
        # The node that was stored may have been split since.
        node, pages = opened.end, max(transfer.pages, 1)
        while pages > 0 and node.parent is not None:
            self._failed[node] = self._failed.get(node, False) or len(transfer.host_pages) > 0
            node, pages = node.parent, pages - node.size

    def forget_all(self) -> None:
        """Start over: no copies are left. Pending drops remain."""
        self._noted.clear()
        self._failed.clear()
        self._breaker = CircuitBreaker()
        if self._states is not None:
            self._states.forget_all()

    def faults(self) -> list[str]:
        """Return inconsistencies, for audits."""
        nodes = (*self._noted, *self._failed)
        found = ["a node that is gone is to be stored"] if any(node.is_dead for node in nodes) else []
        return found if self._states is None else [*found, *self._states.faults()]

    def _may_store(self, node: Node, owner: Account) -> bool:
        return node.pinned or not owner.is_public or self._is_shared

    def _drop(self, node: Node) -> None:
        self._noted.pop(node, None)
        hashes = self._hashes(node)
        self._dropped += self._names.keys(node.owner_id, hashes).names
        if self._states is not None:
            # Also where the host has none any more.
            self._dropped += state_keys(self._names, node.owner_id, hashes).names

    def _hashes(self, node: Node) -> list[bytes]:
        tree = self._store.tree
        return chain_hashes(tree.path_key(node), tree.page_bytes)[-node.size :]

"""The storage tier as the cache and the scheduler see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.transfers import TransferDirection
from services.scheduler.cache.tiers.storage_config import PrefetchPolicy
from services.scheduler.cache.tiers.storage_reads import StorageReads
from services.scheduler.cache.tiers.storage_writes import StorageWrites

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.transfers import Transfer, TransferAck
    from common.types import Subject, TokenIds
    from services.scheduler.cache.node import Account, Node
    from services.scheduler.cache.store import NodeStore
    from services.scheduler.cache.tiers.host_pages import HostPages
    from services.scheduler.cache.tiers.ledger import OpenTransfer, TransferLedger
    from services.scheduler.cache.tiers.storage_config import PageNames, StorageConfig
    from services.scheduler.cache.tiers.storage_reads import Fetch


class StorageTier:
    """Pages that outlive the host tier, and may be shared with other schedulers.

    Nothing is known here of what is there: everything is asked for, and not to get it is always right.
    """

    def __init__(
        self, store: NodeStore, host: HostPages, ledger: TransferLedger, config: StorageConfig, names: PageNames
    ) -> None:
        """Work on the host's pages, with transfers in `ledger`; `names` says what pages are called in storage."""
        self.config = config
        self.stored_pages = 0
        self.fetched_pages = 0
        # Look-ups that did not bring all that was asked for, as it is missing or damaged, or storage failed.
        self.misses = 0
        self._store = store
        self._names = names
        self._writes = StorageWrites(store, ledger, names)
        self._reads = StorageReads(store, host, ledger, config, names)
        # Transfers keep pages where they are: leave most of a small tier alone.
        self._window = max(1, min(config.window_pages, host.allocator.capacity // 4))
        # Under way now.
        self.reading_pages = 0
        self.writing_pages = 0

    # --- what the scheduler asks for ---

    def prefetch(self, viewer: Account, token_ids: TokenIds) -> Fetch | None:
        """Begin to look for what a view lacks of a request's tokens."""
        if self.config.policy is PrefetchPolicy.OFF:
            return None
        return self._reads.begin(viewer, token_ids)

    def is_awaited(self, fetch: Fetch, now: float) -> bool:
        """Whether a request that could start now waits for its pages nevertheless."""
        if fetch.is_done or self.config.policy is PrefetchPolicy.BEST_EFFORT:
            return False
        if fetch.awaited_since is None:
            fetch.awaited_since = now
        return self.config.policy is PrefetchPolicy.WAIT_COMPLETE or now < fetch.awaited_since + self.config.wait_s

    def give_up(self, fetch: Fetch) -> None:
        """Ask for nothing more: the request has started, or ended. What is under way is kept when it comes."""
        self._reads.give_up(fetch)

    def find(self, number: int) -> Fetch | None:
        """Return the look-up with this number, if it goes on."""
        return self._reads.find(number)

    @property
    def is_reading(self) -> bool:
        """Whether pages are under way that somebody may be waiting for."""
        return self.reading_pages > 0

    def has_work(self, now: float) -> bool:
        """Whether `plan` has something to begin, now or when there is room."""
        return self._writes.has_work or self._reads.has_work(now)

    def plan(self, now: float) -> Iterable[Transfer]:
        """Begin what there is room for: reads, then writes."""
        for transfer in self._reads.plan(self._window - self.reading_pages, now):
            self.reading_pages += transfer.pages
            yield transfer
        for transfer in self._writes.plan(max(self._window // 2, 1) - self.writing_pages):
            self.writing_pages += len(transfer.host_pages)
            yield transfer

    def finish(self, opened: OpenTransfer, ack: TransferAck) -> None:
        """Take in that all ranks are done with a transfer; the caller closes it."""
        transfer = opened.transfer
        if transfer.direction is TransferDirection.STORAGE_TO_HOST:
            self.reading_pages -= transfer.pages
            self.misses += ack.done_pages < transfer.pages
            self.fetched_pages += self._reads.finish(opened, ack)
        elif transfer.direction is TransferDirection.HOST_TO_STORAGE:
            self.writing_pages -= transfer.pages
            self.stored_pages += ack.done_pages

    def forget_all(self) -> None:
        """Start over: the workers are gone, and the host tier with them; storage is not."""
        self.reading_pages = self.writing_pages = 0
        self._reads.forget_all()
        self._writes.forget_all()

    # --- what the cache tells ---

    def note(self, node: Node) -> None:
        """A node has got a copy on the host, or another owner."""
        if self.config.writes:
            self._writes.note(node)

    def distrust(self, fingerprints: Iterable[int]) -> None:
        """Some subjects seem to have probed shared prompts."""
        self._reads.distrust(fingerprints)

    def demote(self, account: Account) -> None:
        """Destroy the key of what was stored as a tenant's or the public's, as some of it turned out to be private.

        What they still have is stored again, under new names and a new key.
        """
        self._names.revoke(account.scope)
        if account.is_public:
            self._note_all(self._store.tree.walk_owned(account))
        else:
            self.renew((account,))

    def renew(self, accounts: Iterable[Account]) -> None:
        """Store what these owners have left under their new names and keys."""
        for account in accounts:
            for top in account.tops:
                self._note_all((top, *self._store.tree.walk_owned(account, top=top)))

    def forget(self, subject: Subject, accounts: Iterable[Account]) -> None:
        """Destroy the key of what is stored of a subject, in any view; `accounts` are those of its views in memory."""
        for account in accounts:
            self._writes.drop(account)
        self._names.revoke((subject.tenant, subject.name))

    def _note_all(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node.host_pages is not None:
                self.note(node)

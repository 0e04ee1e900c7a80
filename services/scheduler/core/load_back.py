"""Decides whether a waiting sequence loads its prefix from host memory or storage before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.transfers import TransferDirection
from common.types import CacheMode
from services.scheduler.cache.tiers.config import PrefetchPolicy
from services.scheduler.cache.tiers.peer_reads import PromptUse
from services.scheduler.cache.tiers.storage_reads import reads_of
from services.scheduler.cache.tiers.stored_states import READS
from services.scheduler.core.costs import LEAST_PEER_TOKENS
from services.scheduler.core.sequence import Wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.steps import PageIds
    from common.transfers import Transfer, TransferAck, TransferId
    from common.types import TokenIds
    from services.scheduler.cache.tiers.host_tier import HostTier
    from services.scheduler.cache.tiers.peer_reads import ArrivalPlace, PeerFetch
    from services.scheduler.core.costs import LoadCosts
    from services.scheduler.core.sequence import Sequence

# Maximum number of loads a sequence waits for before it starts with the pages there are, as loaded pages may be evicted
# again.
MAX_LOADS = 3
# Of the lookups in storage that would not pay, one in so many is made nonetheless, for so many pages, to measure the
# rate of storage again; the request does not wait for it.
MEASURED_ONE_IN = 32
MEASURED_PAGES = 8
# The same for prompts that another group could compute; these requests wait for it. One is also left to it if none has
# been for a while, so that few prompts do not take long to end what an overload has left: at first for so many seconds,
# and for twice as many each time that it has not paid, up to the second number.
PEER_MEASURED_ONE_IN = 8
PEER_MEASURED_S = 5.0
PEER_MEASURED_MOST_S = 320.0


@dataclass(frozen=True, slots=True)
class Moved:
    """Finished transfers, their pages, and the copy time of the slowest rank in seconds."""

    transfers: int = 0
    pages: int = 0
    seconds: float = 0.0

    def plus(self, pages: int, seconds: float) -> Moved:
        """Return the sum with one more transfer."""
        return Moved(self.transfers + 1, self.pages + pages, self.seconds + seconds)


class LoadBack:
    """Owns the host tier's traffic: the transfers for the next plan, and the start times of open ones.

    A sequence waits for its load outside the batch, so decoding continues. Loaded pages can be evicted like any others
    once they have arrived.
    """

    def __init__(
        self, host: HostTier, costs: LoadCosts, page_size: int, place_for: Callable[[Sequence, TokenIds], ArrivalPlace]
    ) -> None:
        """Use a tier on which nothing else starts transfers; `place_for` returns where pages of a prompt may arrive."""
        self.host = host
        self.costs = costs
        # Tokens recomputed although the host had them, as that was estimated to be faster.
        self.skipped_tokens = 0
        # Tokens that were not looked up in storage for the same reason.
        self.unread_tokens = 0
        self.loading_tokens = 0
        # Totals since the start, by direction.
        self.moved: dict[TransferDirection, Moved] = {}
        self._page_size = page_size
        self._place_for = place_for
        self._started: list[Transfer] = []
        self._started_at: dict[TransferId, float] = {}
        self._skipped_lookups = 0
        self._skipped_peers = 0
        # When a prompt was last left to another group, and how long after that the next one is, if that does not pay.
        self._asked_peer_at = 0.0
        self._peer_pause_s = PEER_MEASURED_S
        # Sequences whose prompts other groups compute, by handle.
        self._remote: dict[int, Sequence] = {}

    @property
    def is_loading(self) -> bool:
        """Whether a sequence may be waiting for a load."""
        storage = self.host.storage
        is_reading = storage is not None and storage.is_reading
        return self.loading_tokens > 0 or is_reading or self.host.peers.is_reading

    def is_busy(self, now: float) -> bool:
        """Whether a plan is needed, if only to learn of open transfers."""
        storage = self.host.storage
        return self.is_copying or self.host.peers.has_work or (storage is not None and storage.has_work(now))

    @property
    def is_copying(self) -> bool:
        """Whether transfers are open, or copies have yet to begin that were asked for or have room only now."""
        return len(self.host.ledger) > 0 or self.host.has_backups_to_begin

    def prefetch(self, sequence: Sequence) -> None:
        """Start to look for the prefix of a new sequence in storage, if reading it is faster than computing it."""
        if self.host.storage is None or sequence.request.options.cache_mode is CacheMode.NONE:
            return
        view, token_ids = sequence.request.view, sequence.cacheable_ids
        match = self.host.find(view, token_ids)
        missing = max(len(token_ids) - 1, 0) // self._page_size
        missing -= (match.device_tokens + match.host_tokens) // self._page_size
        tokens = missing * self._page_size
        is_wanted = self.host.storage.config.policy is PrefetchPolicy.WAIT_COMPLETE
        # A snapshot of recurrent states is read with them, and the pages before it at once.
        states = self.host.states
        more = 0 if states is None else states.host.interval * self._page_size
        reads = reads_of(missing) if states is None else READS
        if is_wanted or self.costs.storage_pays(tokens, reads, more):
            least = 0 if is_wanted or states is None else self.costs.least_stored(reads, more)
            least_pages = -(-least // self._page_size)
            sequence.fetch = self.host.prefetch(view, token_ids, least_pages=least_pages, is_batch=sequence.is_batch)
            return
        if missing < self.host.storage.config.min_pages:
            return
        self.unread_tokens += tokens
        if self._skipped_lookups % MEASURED_ONE_IN == MEASURED_ONE_IN - 1:
            self.host.prefetch(view, token_ids, MEASURED_PAGES)
        self._skipped_lookups += 1

    def await_peer(self, sequence: Sequence, min_tokens: int | None) -> PeerFetch | None:
        """Let a waiting sequence wait for pages of a peer, if its view lacks at least `min_tokens` that can come so.

        None: as many as has been measured to pay. It waits until the fetch is done, whose owner must see to that.
        Returns None if computing is faster. Images that the view lacks are always left to the peer, as all rows would
        wait for the encoder here.
        """
        if sequence.request.options.cache_mode is CacheMode.NONE:
            return None
        request, options = sequence.request, sequence.request.options
        lacks_images = self._lacks_images(sequence)
        wanted = 1 if lacks_images else self._wanted_of_peer(sequence, min_tokens)
        if wanted is None:
            return None
        use = PromptUse(options.cache_mode is not CacheMode.PRIVATE, options.session)
        # Not what has been generated before a resume, which is no evidence.
        prompt = sequence.key_of(request.token_ids)
        place = self._place_for(sequence, prompt)
        # The states after a tail are not kept.
        has_tail = lacks_images and self.host.states is None and sequence.has_image_tail(self._page_size)
        sequence.remote = self.host.await_peer(request.view, prompt, wanted, use, place, has_tail=has_tail)
        if sequence.remote is not None:
            sequence.remote.lookup = sequence.fetch
            self._remote[sequence.handle] = sequence
            self._asked_peer_at, self._skipped_peers = sequence.arrived_at, 0
            sequence.waits_for = Wait.LOAD
        return sequence.remote

    def has_tail(self, sequence: Sequence, matched: int) -> bool:
        """Return whether the page after the first `matched` tokens has come from a peer; see `take_tail`."""
        fetch = sequence.remote
        return fetch is not None and matched == fetch.whole * self._page_size and self.host.peers.has_tail(fetch)

    def take_tail(self, sequence: Sequence) -> PageIds:
        """Return that page, [1] int32, with a reference that is the caller's now."""
        assert sequence.remote is not None, "it has a tail"
        return self.host.peers.take_tail(sequence.remote)

    def _lacks_images(self, sequence: Sequence) -> bool:
        """Return whether an image of a sequence, or its end, is cached neither on the device nor on the host."""
        if not sequence.image_spans:
            return False
        match = self.host.find(sequence.request.view, sequence.cacheable_ids)
        return sequence.image_spans[-1][1] > match.device_tokens + match.host_tokens

    def _wanted_of_peer(self, sequence: Sequence, min_tokens: int | None) -> int | None:
        """Return the number of tokens a prompt must lack in its view to be left to another group; None: it is not left.

        It is where that pays, and now and then to measure it again.
        """
        floor = LEAST_PEER_TOKENS if min_tokens is None else min_tokens
        ids = sequence.cacheable_ids
        if len(ids) < floor:
            return None
        match = self.host.find(sequence.request.view, ids)
        missing = len(ids) - match.device_tokens - match.host_tokens
        if missing < floor:
            return None
        least = self.costs.least_peer_tokens() if min_tokens is None else min_tokens
        if missing >= least and self._peer_pays(missing, match.host_tokens):
            self._peer_pause_s = PEER_MEASURED_S
            return least
        if sequence.arrived_at - self._asked_peer_at >= self._peer_pause_s:
            self._peer_pause_s = min(2 * self._peer_pause_s, PEER_MEASURED_MOST_S)
            return floor
        self._skipped_peers += 1
        return floor if self._skipped_peers >= PEER_MEASURED_ONE_IN else None

    def _peer_pays(self, missing: int, host_tokens: int) -> bool:
        if self.host.states is None:
            return self.costs.peer_pays()
        # What only the host has is read again.
        copied = missing + host_tokens + self.host.snapshot_pages * self._page_size
        return self.costs.peer_pays(missing, copied)

    @property
    def reserved(self) -> list[Sequence]:
        """Waiting sequences that have device pages for their prompts, which other groups compute."""
        return [each for each in self._remote.values() if each.remote is not None and each.remote.holds_place]

    def end_prefetch(self, sequence: Sequence) -> None:
        """Stop looking in storage or at a peer for a sequence that has started or ended."""
        self._remote.pop(sequence.handle, None)
        if sequence.remote is not None:
            self.host.peers.give_up(sequence.remote)
        if sequence.fetch is not None:
            sequence.storage_tokens = sequence.fetch.found_pages * self._page_size
            self.host.end_prefetch(sequence.fetch)
            sequence.fetch = None

    def may_load(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence's prefix may be loaded before it starts."""
        if sequence.request.options.cache_mode is CacheMode.NONE or sequence.loads >= MAX_LOADS:
            return False
        if sequence.fetch is not None or sequence.awaits_arrival:
            return True
        return self.host.find(sequence.request.view, sequence.cacheable_ids).host_tokens > 0

    def holds_back(
        self, sequence: Sequence, now: float, room: tuple[int, int], allocate: Callable[[int], PageIds | None]
    ) -> bool:
        """Return whether a waiting sequence must wait for pages being loaded; start a load if that pays.

        Args:
            sequence: The sequence that would start otherwise.
            now: Seconds of the scheduler's clock.
            room: Device pages that a sequence may take, and how many of them are left to others that are held back.
            allocate: Allocates device pages, or returns None.
        """
        if sequence.awaited_load is not None and self.host.ledger.get(sequence.awaited_load) is not None:
            return True
        sequence.awaited_load = None
        if sequence.awaits_arrival:
            return True
        storage, fetch = self.host.storage, sequence.fetch
        if storage is not None and fetch is not None and storage.is_awaited(fetch, now):
            return True
        if sequence.loads >= MAX_LOADS or sequence.request.options.cache_mode is CacheMode.NONE:
            return False
        match = self.host.find(sequence.request.view, sequence.cacheable_ids)
        if not match.host_tokens:
            return False
        if match.loading is not None:
            self._await(sequence, match.loading, match.host_tokens)
            return True
        # What a request had to wait for is used.
        is_wanted = fetch is not None and storage is not None and storage.config.policy is PrefetchPolicy.WAIT_COMPLETE
        if not (is_wanted or self.costs.pays(match.host_tokens, match.copied_tokens + self.loading_tokens)):
            self.skipped_tokens += match.host_tokens
            sequence.loads = MAX_LOADS
            return False
        pages = -(-len(sequence.token_ids) // self._page_size) - match.device_tokens // self._page_size
        if pages > room[0] - room[1]:
            # It must not compute, in the room that is left to others, what could be loaded after them.
            return pages <= room[0]
        transfer = self.host.load(sequence.request.view, sequence.cacheable_ids, allocate)
        if transfer is None:
            # Other copies may take up the slots for snapshots of recurrent states.
            return sequence.patience.lasts(self.host.ledger)
        sequence.patience.end()
        self._await(sequence, transfer.transfer_id, match.host_tokens)
        self.loading_tokens += self.host.weight(transfer) * self._page_size
        self._start(transfer, now)
        return True

    def take_transfers(self, now: float) -> tuple[Transfer, ...]:
        """Return the transfers of the next plan: started loads, then backups and others that are due."""
        for transfer in (*self.host.plan_backups(), *self.host.peers.plan(), *self.host.plan_storage(now)):
            self._start(transfer, now)
        started, self._started = tuple(self._started), []
        return started

    def finish(self, ack: TransferAck, now: float) -> None:
        """Record that all ranks have finished a transfer."""
        started_at = self._started_at.pop(ack.transfer_id, None)
        if started_at is not None:
            self.host.peers.note_times(ack.transfer_id, started_at, now)
        transfer = self.host.finish(ack, now)
        if transfer is None or started_at is None:
            return
        moved, done = self.moved.get(transfer.direction, Moved()), ack.done_pages
        if len(transfer.host_snapshots) and transfer.direction.uses_storage:
            done = done * self.host.weight(transfer) // transfer.pages
        elif transfer.direction is TransferDirection.FIND_IN_STORAGE:
            done = 0
        self.moved[transfer.direction] = moved.plus(done, ack.duration_us / 1e6)
        if transfer.direction is TransferDirection.HOST_TO_DEVICE:
            tokens = self.host.weight(transfer) * self._page_size
            self.loading_tokens -= tokens
            self.costs.saw_load(tokens, ack.duration_us / 1e6, now - started_at)
        elif transfer.direction.is_from_peer:
            pages = ack.done_pages + ack.done_snapshots * self.host.snapshot_pages
            tokens, beside_others = pages * self._page_size, self.host.peers.is_reading
            self.costs.saw_peer_read(tokens, ack.duration_us / 1e6, beside_others=beside_others)
        elif transfer.direction is TransferDirection.STORAGE_TO_HOST:
            pages = self.host.weight(transfer)
            self.costs.saw_storage_read(done * self._page_size, pages, ack.duration_us / 1e6, now - started_at)

    def forget_all(self) -> None:
        """Start over: the workers are gone, and both tiers with them."""
        self._started.clear()
        self._started_at.clear()
        self.loading_tokens = 0
        self.host.forget_all()

    def _start(self, transfer: Transfer, now: float) -> None:
        self._started.append(transfer)
        self._started_at[transfer.transfer_id] = now

    def _await(self, sequence: Sequence, transfer_id: TransferId, tokens: int) -> None:
        sequence.host_tokens = max(sequence.host_tokens, tokens)
        sequence.awaited_load = transfer_id
        sequence.loads += 1

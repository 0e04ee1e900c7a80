"""Reads pages that another scheduler group computes for a waiting request, to the device or the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from common.steps import NO_PAGES
from common.transfers import PeerPages, TransferDirection
from common.types import Sharing, SnapshotSlot
from services.scheduler.cache.config import Mode
from services.scheduler.cache.keys import PagedKey
from services.scheduler.cache.tiers.arrivals import Arrivals, can_grow
from services.scheduler.cache.tree import Reach

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from common.steps import PageIds
    from common.transfers import Transfer, TransferAck, TransferId
    from common.types import TokenIds
    from services.scheduler.cache.node import Account, Node
    from services.scheduler.cache.store import NodeStore
    from services.scheduler.cache.tiers.host_pages import HostPages
    from services.scheduler.cache.tiers.ledger import OpenTransfer, TransferLedger
    from services.scheduler.cache.tiers.state_copies import StateCopies
    from services.scheduler.cache.tiers.storage_reads import Fetch
    from services.scheduler.cache.tree import PrefixMatch
    from services.scheduler.cache.types import Scope


@dataclass(frozen=True, slots=True)
class PromptUse:
    """A request as the pages of its prompt are marked with: whether they may be shared, and its session, if any."""

    may_promote: bool = True
    session: str | None = None


class ArrivalPlace(Protocol):
    """Device pages for one prompt, by their places in it; a row of it would have them, too."""

    table: PageIds
    """Pages to which references are held, [pages] int32; empty unless it is open."""
    snapshot: SnapshotSlot | None
    """Where the states after them arrive; None: it is not open, has them, or there are no recurrent layers."""

    @property
    def is_open(self) -> bool:
        """Whether it has pages."""

    def open(self, first: int, end: int, spare_pages: int) -> bool:
        """Allocate the pages [first, end) of the prompt, and lock those before them, which the view has cached.

        Return false, and change nothing, if `spare_pages` would not be left, some of those before are not on the
        device, or the states have no slot.
        """

    def pages(self, first: int, end: int) -> PageIds:
        """Return the pages [first, end)."""

    def attach(self, end: int) -> int:
        """Insert what has arrived into the cache, up to page `end`; return how many more pages it has."""

    def attach_snapshot(self, pages: int) -> None:
        """Let the filled slot `snapshot` belong to the last of the first `pages` pages, in the view of the prompt."""

    def close(self) -> None:
        """Release lock and references; what the cache has may be evicted from then on."""


@dataclass(slots=True, eq=False, repr=False)
class PeerFetch:
    """One request's pages at a peer: `offered` are all pages of its prompt that the peer has computed so far.

    The view `scope` has the first `position` pages; of the offered ones, the first `requested` are read, in transfer or
    have come from storage. With a tail, the last one is the page that the prompt does not fill. It belongs to the
    request alone, and only arrives on the device.

    With recurrent layers (`needs_states`), rows can continue after the last offered page only, and from the peer's
    snapshot of the states there. It is offered with that page, read after it, and only arrives on the device.
    """

    scope: Scope
    key: PagedKey
    page_size: int
    # Whole pages of the prompt.
    whole: int
    # Pages that may be fetched, and those that the view had at the beginning or got from storage.
    end: int
    first: int
    position: int
    requested: int
    # If storage leaves fewer missing, they are computed here.
    min_tokens: int
    use: PromptUse
    # Pages after which a row could have continued at the beginning: fewer than `first` if states after it were missing.
    resumable: int
    # Where pages arrive, unless on the host, and whether those after the transfer in progress do not.
    place: ArrivalPlace | None = None
    leaves_device: bool = False
    workers: tuple[str, ...] = ()
    lease: bytes = b""
    offered: list[int] = field(default_factory=list)
    # Tokens that the peer found in its cache.
    found_tokens: int = 0
    needs_states: bool = False
    # The request's lookup in storage; see `_waits_for_storage`.
    lookup: Fetch | None = None
    # The peer's slot for the states after the offered pages, until it is requested.
    snapshot: SnapshotSlot | None = None
    has_states: bool = False
    # Nothing more will be offered.
    is_complete: bool = False
    is_transferring: bool = False
    # Pages of the peer have arrived.
    has_read: bool = False
    # Its request has started, or has ended.
    is_given_up: bool = False
    # It was stopped before all of its pages had arrived.
    is_cut: bool = False
    # Seconds in which its pages were in transfer, one transfer after the other.
    transfer_s: float = 0.0
    # By the scheduler's clock: when the peer had computed the prompt, and when the last page arrived.
    computed_at: float | None = None
    arrived_at: float | None = None

    @property
    def has_arrived(self) -> bool:
        """Whether all pages that the view lacked at the beginning have arrived, and the states after them."""
        return not self.is_cut and self.position == self.end and self.has_states == self.needs_states

    @property
    def exposed_s(self) -> float:
        """Seconds between the computation of the prompt and the arrival of its last page; 0 if it arrived before."""
        if self.computed_at is None or self.arrived_at is None:
            return 0.0
        return max(0.0, self.arrived_at - self.computed_at)

    @property
    def ready_at(self) -> float | None:
        """When the prompt was computed, and its last page had arrived; None if no page has come from the peer."""
        if self.computed_at is None or self.arrived_at is None:
            return None
        return max(self.computed_at, self.arrived_at)

    @property
    def is_done(self) -> bool:
        """Whether no more pages will arrive."""
        return self.is_complete and not self.is_transferring and not self.is_due

    @property
    def is_due(self) -> bool:
        """Whether offered pages, or the states after them, can be requested now."""
        has_more = self.requested < min(len(self.offered), self.end) or self.snapshot is not None
        return not self.is_transferring and not self._waits_for_storage and has_more

    @property
    def _waits_for_storage(self) -> bool:
        """Whether pages are left with the peer for now.

        If it fails later, they are of no use without states, and pages from storage have no place below those of the
        device.
        """
        return self.needs_states and not self.is_complete and self.lookup is not None and not self.lookup.is_done

    @property
    def holds_place(self) -> bool:
        """Whether it has pages of the device for what has not arrived yet."""
        return self.place is not None and self.place.is_open

    @property
    def held_pages(self) -> int:
        """Pages of the device that it has, those of what the view had before included."""
        return 0 if self.place is None else len(self.place.table)

    @property
    def can_leave_device(self) -> bool:
        """Whether it has pages of the device, and none of them is in transfer."""
        return self.holds_place and not self.is_transferring

    @property
    def wants_place(self) -> bool:
        """Whether it could have pages of the device now, as its first ones have been offered."""
        return self.is_due and self.place is not None and not self.place.is_open

    @property
    def comes_outside(self) -> bool:
        """Whether pages are awaited that neither have a place on the device nor could have one now."""
        return not (self.is_done or self.holds_place or self.wants_place)

    @property
    def pages_to_come(self) -> int:
        """Pages that have not arrived."""
        return self.end - self.position

    @property
    def cached_tokens(self) -> int:
        """Most tokens that count as cached of those that the view has: what this group or the peer had before."""
        if not self.has_read:
            # Whatever the view has, it has from here, also if storage has brought it since the fetch was stopped.
            return self.key.pages * self.page_size
        return max(self.resumable * self.page_size, self.found_tokens)

    @property
    def arrived_tokens(self) -> int:
        """Tokens of the pages that have arrived."""
        return (self.position - self.first) * self.page_size

    @property
    def missing_tokens(self) -> int:
        """Tokens of the pages that this group did not have."""
        return (self.end - self.first) * self.page_size

    def offer(self, workers: Sequence[str], lease: bytes, pages: Iterable[int]) -> None:
        """Add pages that the peer has computed, under a lease that its workers know."""
        self.workers, self.lease = tuple(workers), lease
        self.offered.extend(pages)

    def offer_snapshot(self, slot: int) -> None:
        """Add the peer's snapshot of the states after all offered pages, to which no more are added."""
        if self.needs_states and self.offered and not self.is_complete:
            self.snapshot = SnapshotSlot(slot)

    def complete(self, now: float) -> None:
        """Record that the peer has computed the prompt, and has offered all pages of it."""
        self.is_complete = True
        self.computed_at = now
        if self.snapshot is not None:
            # The last pages may have been left out, as no states are known after them.
            self.end = min(self.end, max(len(self.offered), self.position))
        elif self.needs_states:
            self.stop()

    def note_transfer(self, started_at: float, now: float) -> None:
        """Add the time of a transfer that has ended."""
        self.transfer_s += now - started_at
        self.arrived_at = now

    def leave_device(self) -> None:
        """Release the device pages, none of which may be in transfer.

        What has arrived remains in the cache, where it can be evicted, and the rest is read to the host, if it can be
        attached there, and needs no states.
        """
        if self.place is not None:
            self.place.close()
            self.place = None
        self.leave_tail()
        if self.needs_states:
            self.stop()

    def leave_tail(self) -> None:
        """Do not fetch the tail, which has not arrived."""
        self.end = min(self.end, self.whole)
        self.requested = min(self.requested, self.end)

    def stop(self) -> None:
        """Request nothing more; a transfer in progress continues."""
        self.is_cut = self.is_cut or self.position < self.end
        self.is_complete = True
        self.end = self.requested
        self.snapshot = None


class PeerReads:
    """Reads pages of peers, which become private to the view that asked for them.

    They arrive on the device, where a request starts with them at once, if its owner opens a place for them when the
    first ones are offered, and until it takes that back; else in new nodes on the host. They are evidence, and
    belong to a session, as if they had been computed here. Storage is looked up at the same time; pages that it had are
    not requested from the peer. Tails are kept beside the cache until their requests start or end. With recurrent
    layers, all that the device lacks arrive there or not at all, also beside reads from storage, and the slot for the
    states is given to no other until its transfer has been acknowledged.
    """

    def __init__(
        self,
        store: NodeStore,
        host: HostPages,
        ledger: TransferLedger,
        note: Callable[[Node], None],
        states: StateCopies | None = None,
    ) -> None:
        """`note` is called with each new node; `states` are those of recurrent layers, if there are any."""
        self._store = store
        self._arrivals = Arrivals(store)
        self._note = note
        self._host = host
        self._ledger = ledger
        self._states = states
        self._fetches: dict[PeerFetch, None] = {}
        self._open: dict[OpenTransfer, PeerFetch] = {}
        # Pages with a reference each.
        self._tails: dict[PeerFetch, PageIds] = {}

    def tables(self) -> dict[str, PageIds]:
        """Return the device pages of prompts that arrive there, by a readable name."""
        places = (fetch.place for fetch in self._fetches if fetch.place is not None)
        tables = {f"arrivals {number}": place.table for number, place in enumerate(places)}
        return tables | {f"tail {number}": page for number, page in enumerate(self._tails.values())}

    @property
    def is_reading(self) -> bool:
        """Whether pages are in flight that a request may be waiting for."""
        return bool(self._open)

    @property
    def awaited_tokens(self) -> int:
        """Tokens that requests wait for."""
        return sum((fetch.end - fetch.position) * fetch.page_size for fetch in self._fetches)

    @property
    def has_work(self) -> bool:
        """Whether there are offered pages to request."""
        return any(fetch.is_due for fetch in self._fetches)

    @property
    def wants_places(self) -> bool:
        """Whether pages have been offered that could arrive on the device."""
        return any(fetch.wants_place for fetch in self._fetches)

    def begin(
        self,
        viewer: Account,
        token_ids: TokenIds,
        min_tokens: int,
        use: PromptUse,
        place: ArrivalPlace | None = None,
        *,
        has_tail: bool = False,
    ) -> PeerFetch | None:
        """Return an empty fetch for a prompt's pages that its view lacks, with at least `min_tokens` tokens.

        They are the whole ones, and with `has_tail` and a place the one after them. None if there are fewer, or if they
        could neither arrive in `place` nor be attached on the host. With recurrent layers, pages after which no row can
        continue count as lacking.
        """
        tree = self._store.tree
        key, whole = PagedKey(token_ids, tree.page_size), max(len(token_ids) - 1, 0) // tree.page_size
        match = tree.match(tree.root, viewer, key, 0, whole, Reach.HOST)
        end = whole + (has_tail and place is not None)
        resumable = match.pages if self._states is None else self._states.resumable(match, viewer).pages
        if (end - resumable) * tree.page_size < max(min_tokens, 1):
            return None
        if place is None and (self._states is not None or not can_grow(match.partial or match.node)):
            return None
        first = match.pages
        fetch = PeerFetch(
            viewer.scope, key, tree.page_size, whole, end, first, first, first, min_tokens, use, resumable, place,
            needs_states=self._states is not None,
        )  # fmt: skip
        self._fetches[fetch] = None
        return fetch

    def give_up(self, fetch: PeerFetch) -> None:
        """Stop requesting pages; those in transfer are kept when they arrive, and a tail is not."""
        fetch.stop()
        fetch.is_given_up = True
        self._release_tail(fetch)
        self._forget_if_done(fetch)

    def has_tail(self, fetch: PeerFetch) -> bool:
        """Return whether a fetch's tail has arrived, and is kept."""
        return fetch in self._tails

    def take_tail(self, fetch: PeerFetch) -> PageIds:
        """Return a fetch's tail, [1] int32, whose reference is the caller's now."""
        return self._tails.pop(fetch)

    def drop_tails(self) -> bool:
        """Release the tails of all requests that have not started; return whether there were any."""
        fetches = list(self._tails)
        for fetch in fetches:
            self._release_tail(fetch)
        return bool(fetches)

    def open_place(self, fetch: PeerFetch, spare_pages: int) -> bool:
        """Let pages arrive on the device, if that leaves `spare_pages` pages there; return whether they will."""
        if fetch.needs_states:
            self._begin_on_device(fetch)
        return fetch.place is not None and fetch.place.open(fetch.position, fetch.end, spare_pages)

    def plan(self) -> Iterable[Transfer]:
        """Start the transfers that are due, one at a time for each request: on the host unless its place is open."""
        for fetch in list(self._fetches):
            if fetch.is_due:
                transfer = self._ask(fetch)
                if transfer is not None:
                    yield transfer
            self._forget_if_done(fetch)

    def note_times(self, transfer_id: TransferId, started_at: float, now: float) -> None:
        """Record when a transfer was started, and that it ends now, if it is one from a peer; call `finish` next."""
        opened = self._ledger.get(transfer_id)
        if opened is not None and opened in self._open:
            self._open[opened].note_transfer(started_at, now)

    def finish(self, opened: OpenTransfer, ack: TransferAck) -> int:
        """Attach the pages that arrived; return their number."""
        fetch = self._open.pop(opened)
        fetch.is_transferring = False
        kept = 0
        if ack.done_pages:
            if fetch.place is not None:
                kept = self._attach_in_place(fetch, fetch.place, fetch.position + ack.done_pages)
            else:
                pages = opened.transfer.host_pages[: ack.done_pages]
                mark = partial(self._mark, fetch.use)
                kept = self._arrivals.attach(fetch.scope, fetch.key, fetch.position, pages, fetch.scope, mark)
            fetch.position += kept
            fetch.has_read = fetch.has_read or kept > 0
        if kept < opened.transfer.pages:
            fetch.stop()
        elif len(opened.transfer.device_snapshots):
            self._attach_states(fetch, ack)
        if fetch.leaves_device:
            fetch.leave_device()
        self._skip_present(fetch)
        self._forget_if_done(fetch)
        return kept

    def skip_present(self) -> None:
        """Do not request pages that have come from storage; what those leave is fetched only if it is enough."""
        for fetch in list(self._fetches):
            self._skip_present(fetch)
            self._forget_if_done(fetch)

    def leave_device(self) -> None:
        """Stop reading to the device; no transfer is open."""
        for fetch in list(self._fetches):
            if fetch.holds_place:
                fetch.stop()
                self._forget_if_done(fetch)
        self.drop_tails()

    def forget_all(self) -> None:
        """Start over: the transfers are cancelled."""
        for fetch in list(self._fetches):
            fetch.is_transferring = False
            fetch.stop()
            self._forget_if_done(fetch)
        self._open.clear()
        self.drop_tails()

    def _attach_in_place(self, fetch: PeerFetch, place: ArrivalPlace, end: int) -> int:
        """Attach the pages before `end` that have arrived on the device, and keep a tail; return their number."""
        kept = place.attach(min(end, fetch.whole)) if fetch.position < fetch.whole else 0
        if end > fetch.whole and fetch.position + kept == fetch.whole and not fetch.is_given_up:
            tail = place.pages(fetch.whole, end)
            self._store.allocator.retain(tail)
            self._tails[fetch] = tail
            kept += len(tail)
        return kept

    def _attach_states(self, fetch: PeerFetch, ack: TransferAck) -> None:
        """Keep the states after the offered pages, all of which have arrived, if they have, too."""
        if not ack.done_snapshots or fetch.place is None:
            fetch.is_cut = True
            return
        fetch.place.attach_snapshot(len(fetch.offered))
        fetch.has_states = fetch.has_read = True

    def _release_tail(self, fetch: PeerFetch) -> None:
        if fetch in self._tails:
            self._store.allocator.release(self._tails.pop(fetch))

    def _mark(self, use: PromptUse, node: Node) -> None:
        node.no_promote = not use.may_promote
        if use.session is not None:
            node.sessions = frozenset((use.session,))
            node.owner.has_sessions = True
        if self._store.config.mode is Mode.USER_AWARE:
            may_share = use.may_promote and node.owner.tenant.sharing is not Sharing.NONE
            node.prompt_epoch = self._store.epoch if may_share else None
            self._store.fresh[node] = None
        self._note(node)

    def _forget_if_done(self, fetch: PeerFetch) -> None:
        if fetch.is_done and fetch in self._fetches:
            del self._fetches[fetch]
            if fetch.place is not None:
                fetch.place.close()

    def _begin_on_device(self, fetch: PeerFetch) -> None:
        """Have all pages read that the device lacks, those on the host included, before any are requested."""
        tree, viewer = self._store.tree, self._store.accounts.view(fetch.scope)
        match = tree.match(tree.root, viewer, fetch.key, 0, min(fetch.end, fetch.whole))
        fetch.first = fetch.position = fetch.requested = match.pages

    def _skip_present(self, fetch: PeerFetch) -> None:
        if fetch.holds_place and not fetch.needs_states:
            return
        tree, viewer = self._store.tree, self._store.accounts.view(fetch.scope)
        match = tree.match(tree.root, viewer, fetch.key, 0, min(fetch.end, fetch.whole), Reach.HOST)
        if fetch.needs_states:
            self._skip_resumable(fetch, match, viewer)
            return
        present = match.pages
        has_begun = fetch.position > fetch.first or len(fetch.offered) > present
        if fetch.position <= fetch.first:
            fetch.first = max(fetch.first, present)
            fetch.resumable = fetch.first
        if fetch.is_transferring:
            return
        fetch.position = max(fetch.position, present)
        fetch.requested = max(fetch.requested, present)
        missing = (fetch.end - fetch.position) * fetch.page_size
        if not missing or (missing < fetch.min_tokens and not has_begun):
            fetch.stop()

    def _skip_resumable(self, fetch: PeerFetch, match: PrefixMatch, viewer: Account) -> None:
        """Request nothing more if a row can continue after all pages."""
        assert self._states is not None, "the fetch needs them"
        # Pages alone that have come from the peer do not change after which ones rows can continue.
        if not fetch.has_states:
            fetch.resumable = max(fetch.resumable, self._states.resumable(match, viewer).pages)
            if fetch.resumable >= fetch.end:
                fetch.stop()

    def _ask(self, fetch: PeerFetch) -> Transfer | None:
        """Request the offered pages; None, and nothing more is requested, if there is no room for them."""
        if not fetch.holds_place:
            fetch.leave_device()
            if not fetch.is_due:
                return None
        wanted = np.array(fetch.offered[fetch.requested : fetch.end], np.int32)
        if fetch.place is not None:
            slots, into = _slots(fetch.snapshot), NO_PAGES if fetch.snapshot is None else _slots(fetch.place.snapshot)
            fetch.snapshot = None
            peer = PeerPages(fetch.workers, fetch.lease, wanted, slots)
            pages = fetch.place.pages(fetch.requested, fetch.requested + len(wanted))
            self._store.allocator.retain(pages)
            root = self._store.tree.root
            return self._started(
                fetch, self._ledger.open_from_peer(TransferDirection.PEER_TO_DEVICE, root, pages, peer, into)
            )
        peer = PeerPages(fetch.workers, fetch.lease, wanted)
        above = self._arrivals.find(fetch.scope, fetch.key, fetch.requested)
        if above is None:
            fetch.stop()
            return None
        # Prevents that making room drops the path that they will be attached to.
        self._ledger.need(above, 1)
        host_pages = self._host.try_allocate(len(wanted))
        transfer = None
        if host_pages is None:
            fetch.stop()
        else:
            transfer = self._started(
                fetch, self._ledger.open_from_peer(TransferDirection.PEER_TO_HOST, above, host_pages, peer)
            )
        self._ledger.need(above, -1)
        return transfer

    def _started(self, fetch: PeerFetch, transfer: Transfer) -> Transfer:
        """Record a fetch's new transfer."""
        opened = self._ledger.get(transfer.transfer_id)
        assert opened is not None, "it was opened just now"
        self._open[opened] = fetch
        fetch.requested += transfer.pages
        fetch.is_transferring = True
        return transfer


def _slots(slot: SnapshotSlot | None) -> PageIds:
    """Return the slot alone, [1] int32, or none."""
    return NO_PAGES if slot is None else np.array([slot], np.int32)

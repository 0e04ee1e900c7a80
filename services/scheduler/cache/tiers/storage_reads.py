"""Loads pages from storage to the host, for waiting requests: lookup by runs, under the names of several scopes.

With recurrent layers, pages are of use up to a snapshot only, which is searched for when the first page is there; see
`stored_states.py`. The others are read in a turn, and are held until the request starts; see `read_turns.py`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.transfers import TransferDirection
from common.types import Sharing
from services.scheduler.cache.config import Mode
from services.scheduler.cache.keys import PagedKey, chain_hashes
from services.scheduler.cache.tiers.arrivals import Arrivals, can_grow
from services.scheduler.cache.tiers.copies import weight_of
from services.scheduler.cache.tiers.ledger import Patience
from services.scheduler.cache.tiers.rate_limit import RateLimit
from services.scheduler.cache.tiers.read_turns import ReadTurns, TurnOrder
from services.scheduler.cache.tiers.stored_states import StateSearch, Step
from services.scheduler.cache.tree import Reach
from services.scheduler.cache.types import PUBLIC_SCOPE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from common.transfers import Transfer, TransferAck
    from common.types import TokenIds
    from services.scheduler.cache.node import Account, Node
    from services.scheduler.cache.store import NodeStore
    from services.scheduler.cache.tiers.config import PageNames, StorageConfig
    from services.scheduler.cache.tiers.host_pages import HostPages
    from services.scheduler.cache.tiers.ledger import OpenTransfer, TransferLedger
    from services.scheduler.cache.tiers.read_turns import Turn
    from services.scheduler.cache.tiers.stored_states import StateReads
    from services.scheduler.cache.types import Scope

# Number of suspects that are remembered.
REMEMBERED_SUSPECTS = 65_536
# Factor between a complete run and the next one: few round trips where much is stored, and where nothing is, one page
# of the host tier was reserved in vain.
GROWTH = 8
# Seconds after which a request that has not started gives its turn to others that wait for one, though its pages are
# there. It starts when the device has room, which other requests may take before it.
LONGEST_HOLD_S = 10.0


@dataclass(slots=True, eq=False, repr=False)
class Fetch:
    """One request's lookup in storage. `hashes` are the chained hashes of all pages that may be found."""

    scope: Scope
    key: PagedKey
    hashes: list[bytes]
    prefetch: Prefetch
    # Sequential number of the lookup.
    number: int
    # Of a snapshot of recurrent states; None: the model has none, or only pages are looked up.
    search: StateSearch | None = None
    # Whether it is for a batch, which leaves its place to others.
    is_batch: bool = False
    # Time from which its request could have started.
    awaited_since: float | None = None
    # Holds what has been read from the search on, until the request starts or ends.
    turn: Turn | None = None
    # Of a turn in which everything has arrived: when that was noticed.
    complete_since: float | None = None
    patience: Patience = field(default_factory=Patience)
    # Whether the host had no room for the next transfer, but may have some later.
    is_refused: bool = False
    # The node that the last pages that were asked for were to be attached to.
    above: Node | None = None

    @property
    def is_done(self) -> bool:
        """Whether no more pages will arrive, and no snapshot."""
        return self.prefetch.is_done and (self.search is None or self.search.is_done)

    @property
    def is_due(self) -> bool:
        """Whether there is a transfer to begin."""
        return self.prefetch.peek_run() is not None or (self.search is not None and self.search.step is not None)

    @property
    def awaits_turn(self) -> bool:
        """Whether a snapshot was found, and what is missing is read as soon as there is room for all of it."""
        return self.search is not None and self.search.has_found and self.turn is None

    @property
    def waits_before_turns(self) -> bool:
        """Whether the host had no room for a transfer before its turn, as others have theirs."""
        return self.is_refused and self.turn is None and not self.is_done

    @property
    def awaits_room(self) -> bool:
        """Whether it waits for others to leave room on the host."""
        return not self.is_done and (self.is_refused or self.awaits_turn)

    @property
    def found_pages(self) -> int:
        """Pages that have arrived and are of use."""
        found = self.prefetch.position if self.search is None else min(self.prefetch.position, self.search.arrived)
        return max(found - self.prefetch.first, 0)

    def settle(self) -> None:
        """Choose what to do next about snapshots, if no pages are requested or in flight."""
        prefetch = self.prefetch
        if self.search is None or not prefetch.is_done or self.awaits_turn:
            return
        lacks_pages = prefetch.first < len(self.hashes)
        self.search.settle(prefetch.position, has_pages=prefetch.position > prefetch.first or not lacks_pages)

    def read_pages_of_snapshot(self) -> None:
        """Request the missing pages before a snapshot that was found."""
        search = self.search
        if self.turn is not None and search is not None and search.found is not None and search.has_found:
            self.prefetch.extend(search.found[0])


class StorageReads:
    """Loads pages into new nodes on the host, in the requester's view.

    They are looked up under the names of the requester's view, its tenant and the public, never of other views. Pages
    stored as the tenant's or the public's become so here as well, unless this would hide other owners' nodes: then they
    become one more private copy, and promotion by evidence proceeds as if they had not been found.
    """

    def __init__(
        self,
        store: NodeStore,
        host: HostPages,
        ledger: TransferLedger,
        config: StorageConfig,
        names: PageNames,
        states: StateReads | None = None,
    ) -> None:
        # Pages that have arrived without a snapshot after them, which would have made them of use.
        self.unused_pages = 0
        self._states = states
        self._turns = None if states is None else ReadTurns(host, states.pool)
        self._store = store
        self._arrivals = Arrivals(store)
        self._host = host
        self._ledger = ledger
        self._min_pages = config.min_pages
        self._names = names
        self._has_public = store.config.mode.allows_pins
        self._has_tenants = store.config.mode is Mode.USER_AWARE
        self._rate = RateLimit(config.pages_per_s)
        self._begun = 0
        self._fetches: dict[Fetch, None] = {}
        self._order = TurnOrder()
        # Complete ones that hold what they have brought.
        self._holding: dict[Fetch, None] = {}
        self._runs: dict[OpenTransfer, tuple[Fetch, Run]] = {}
        self._steps: dict[OpenTransfer, Fetch] = {}
        self._suspects: OrderedDict[int, None] = OrderedDict()

    def has_work(self, now: float) -> bool:
        """Whether there are pages to request that the rate allows, or turns to begin or end."""
        if self._rate.available(now) >= 1 and any(self._is_due(fetch) for fetch in self._fetches):
            return True
        return self._next_turn() is not None or self._next_to_end(now) is not None

    def _is_due(self, fetch: Fetch) -> bool:
        """Whether a transfer may begin now, or never: a first page without room waits until turns leave it some."""
        above = fetch.above
        if not fetch.is_due or above is None or not (fetch.waits_before_turns and self._turns):
            return fetch.is_due
        return above.is_dead or not can_grow(above) or self._host.has_room(1, above)

    @property
    def needs_room(self) -> bool:
        """Whether transfers in the other direction must not take up what becomes free, as a turn waits for that."""
        return any(fetch.turn is not None and fetch.is_refused for fetch in self._fetches)

    def distrust(self, fingerprints: Iterable[int]) -> None:
        """Look up no shared pages for subjects that appear to have probed: nodes hidden from them stay hidden."""
        for fingerprint in fingerprints:
            self._suspects[fingerprint] = None
            self._suspects.move_to_end(fingerprint)
        while len(self._suspects) > REMEMBERED_SUSPECTS:
            self._suspects.popitem(last=False)

    def begin(
        self,
        viewer: Account,
        token_ids: TokenIds,
        max_pages: int | None,
        least_pages: int = 0,
        *,
        is_batch: bool = False,
    ) -> Fetch | None:
        """Start to look up a request's pages missing in a view; None if they are too few, or cannot be attached.

        With `max_pages`, only so many of them are requested, at once, without asking for a single page first.
        Otherwise, with recurrent layers, they are as far as there is a snapshot that saves computing `least_pages`.
        """
        tree = self._store.tree
        key, end = PagedKey(token_ids, tree.page_size), max(len(token_ids) - 1, 0) // tree.page_size
        match = tree.match(tree.root, viewer, key, 0, end, Reach.HOST)
        scopes, search, first_run, end_of_pages = self._scopes(viewer), None, 1, end
        if max_pages is not None:
            end = end_of_pages = min(end, match.pages + max_pages)
            first_run = end - match.pages
        elif self._states is not None:
            if not self._states.has_slots:
                return None
            least = self._states.resumable_pages(viewer, key, end) + max(self._min_pages, least_pages)
            search = StateSearch(scopes, least, end, self._states.interval)
            end_of_pages = min(end, match.pages + 1)
        is_of_use = end - match.pages >= self._min_pages if search is None else not search.is_done
        if not is_of_use or not can_grow(match.partial or match.node):
            return None
        hashes = chain_hashes(key.slice(0, end), tree.page_bytes)
        self._begun += 1
        prefetch = Prefetch(scopes, match.pages, end_of_pages, first_run)
        fetch = Fetch(viewer.scope, key, hashes, prefetch, self._begun, search, is_batch)
        fetch.settle()
        self._fetches[fetch] = None
        return fetch

    def _scopes(self, viewer: Account) -> list[Scope]:
        """Return the scopes under whose names a view's pages may be stored."""
        scopes = [viewer.scope]
        if viewer.fingerprint in self._suspects:
            return scopes
        if self._has_tenants and self._store.accounts.sharing_of(viewer.scope[0]) is not Sharing.NONE:
            scopes.append(viewer.tenant.scope)
        if self._has_public:
            scopes.append(PUBLIC_SCOPE)
        return scopes

    def find(self, number: int) -> Fetch | None:
        """Return the lookup with this number, if it is in progress or holds what it has brought."""
        return next((fetch for fetch in (*self._fetches, *self._holding) if fetch.number == number), None)

    def end(self, fetch: Fetch) -> None:
        """Stop requesting pages, and hold none any more."""
        self._give_up(fetch)
        self._end_turn(fetch)

    def _end_turn(self, fetch: Fetch) -> None:
        self._holding.pop(fetch, None)
        if fetch.turn is not None:
            assert self._turns is not None, "it has begun the turn"
            self._turns.end(fetch.turn)
            fetch.turn = None

    def _give_up(self, fetch: Fetch) -> None:
        """Stop requesting pages; those in flight are kept when they arrive."""
        fetch.prefetch.stop()
        if fetch.search is not None:
            fetch.search.stop()
        self._forget_if_done(fetch)

    def _forget_if_done(self, fetch: Fetch) -> None:
        if not fetch.is_done or fetch not in self._fetches:
            return
        del self._fetches[fetch]
        if self._states is not None:
            arrived = fetch.prefetch.position - fetch.prefetch.first
            self.unused_pages += arrived - (0 if fetch.search is None else fetch.found_pages)
        if fetch.turn is not None and fetch.turn.snapshot is not None:
            self._holding[fetch] = None
        else:
            self._end_turn(fetch)

    def plan(self, room: int, now: float) -> Iterable[Transfer]:
        """Start the transfers that `room` pages and the rate allow, oldest request first."""
        self._change_turns(now)
        for fetch in list(self._fetches):
            while (run := fetch.prefetch.peek_run()) is not None:
                pages = int(min(run.pages, room, self._rate.available(now)))
                if pages < 1:
                    return
                transfer = self._ask(fetch, pages)
                if transfer is None:
                    break
                room -= pages
                self._rate.take(pages, now)
                yield transfer
            if fetch.search is None or fetch.search.step is None:
                continue
            if min(room, self._rate.available(now)) < 1:
                return
            transfer = self._begin_step(fetch, fetch.search)
            if transfer is None:
                continue
            weight = weight_of(transfer, self._store)
            room -= max(weight, 1)
            self._rate.take(weight, now)
            yield transfer

    def _change_turns(self, now: float) -> None:
        """Begin the turns that have room, then end those that must leave room to others, and begin these."""
        self._begin_turns()
        for holding in self._holding:
            if holding.complete_since is None:
                holding.complete_since = now
        while (fetch := self._next_to_end(now)) is not None:
            self._end_turn(fetch)
            self._begin_turns()

    def _begin_turns(self) -> None:
        """Begin all turns that can, in their order."""
        oldest_refused = self._oldest_refused()
        has_begun = False
        for fetch in self._order.by_place(fetch for fetch in self._fetches if fetch.awaits_turn):
            if not self._can_begin(fetch, oldest_refused):
                break
            self._begin_turn(fetch)
            has_begun = True
        if has_begun:
            self._order.forget_others(fetch.scope for fetch in self._fetches)

    def _next_turn(self) -> Fetch | None:
        """Return the lookup whose turn is next, if it can begin."""
        following = next(self._order.by_place(fetch for fetch in self._fetches if fetch.awaits_turn), None)
        can_begin = following is not None and self._can_begin(following, self._oldest_refused())
        return following if can_begin else None

    def _can_begin(self, fetch: Fetch, oldest_refused: float) -> bool:
        """Whether the turn of a lookup can begin, if it is the next one.

        Those that found more, or whose first page has no room, must not wait for ever for those that found less, so
        none begins before the next one, or before an older one of them.
        """
        assert self._turns is not None, "it has found a snapshot"
        return fetch.number < oldest_refused and self._turns.has_room(_depth(fetch))

    def _oldest_refused(self) -> float:
        """Return the number of the oldest lookup whose first page has no room; infinity: there is none."""
        return min((fetch.number for fetch in self._fetches if fetch.waits_before_turns), default=math.inf)

    def _begin_turn(self, fetch: Fetch) -> None:
        """Let a lookup read what it has found, or give up if that is more than the host has."""
        assert self._turns is not None
        depth = _depth(fetch)
        if depth > self._host.allocator.capacity:
            self._give_up(fetch)
            return
        fetch.turn = self._turns.begin(depth)
        self._order.note(fetch.scope, self._begun + 1)
        # What was there, or has arrived, may have been evicted.
        fetch.prefetch.rewind(self._hold(fetch))
        fetch.read_pages_of_snapshot()
        fetch.settle()

    def _next_to_end(self, now: float) -> Fetch | None:
        """Return a request that has everything, but has not started for long: it must leave its turn to one that waits.

        A batch must do so at once for one that is none. O(lookups), as this is asked in every step.
        """
        waiting = [other.is_batch for other in self._fetches if other.awaits_room] if self._holding else []
        are_batches = all(waiting)
        for fetch in self._holding if waiting else ():
            since = fetch.complete_since
            if (fetch.is_batch and not are_batches) or since is None or now - since >= LONGEST_HOLD_S:
                return fetch
        return None

    def _hold(self, fetch: Fetch) -> int:
        """Hold what the host has of a lookup's prompt up to where it has arrived, but no more than the turn is for.

        Return the number of pages up to which the lookup has arrived.
        """
        position = fetch.prefetch.position
        if fetch.turn is None:
            return position
        assert self._turns is not None, "it has begun the turn"
        tree, viewer, wanted = self._store.tree, self._store.accounts.view(fetch.scope), min(position, fetch.turn.pages)
        match = tree.match(tree.root, viewer, fetch.key, 0, wanted, Reach.HOST)
        end: Node | None = match.partial or match.node
        while end is not None and end.host_pages is None:
            end = end.parent
        # A longer prompt may go on after it. A soft-free node is held whole, as only used ones are cut, and counts so.
        if end is not None and end is match.partial and not end.is_soft_free:
            end = self._store.split(end, match.partial_pages)
        self._turns.hold(fetch.turn, end)
        return match.pages if match.pages < wanted else position

    def _refuse(self, fetch: Fetch) -> None:
        """Let a lookup without room on the host wait for some if transfers take it up, or turns; otherwise give up.

        In a turn of its own, it does not wait for other turns, which leave it room.
        """
        may_wait = fetch.search is not None and fetch.patience.lasts(self._ledger)
        is_before_turns = fetch.search is not None and fetch.turn is None and bool(self._turns)
        fetch.is_refused = may_wait or is_before_turns
        if not fetch.is_refused:
            self._give_up(fetch)

    def _note_room(self, fetch: Fetch, transfer: Transfer) -> OpenTransfer:
        """Note that there was room for a transfer."""
        fetch.is_refused = False
        fetch.patience.end()
        opened = self._ledger.get(transfer.transfer_id)
        assert opened is not None, "it was opened just now"
        return opened

    def _begin_step(self, fetch: Fetch, search: StateSearch) -> Transfer | None:
        """Start to search for a snapshot, or to read it; None if there is no slot for it on the host, maybe for now."""
        assert self._states is not None, "it has begun the search"
        if search.step is Step.SEARCH:
            transfer: Transfer | None = self._states.search(search, fetch.hashes)
        elif not self._states.has_page(search, fetch.scope, fetch.key):
            self._give_up(fetch)
            return None
        else:
            transfer = self._states.read(search, fetch.scope, fetch.key, fetch.hashes)
        if transfer is None:
            self._refuse(fetch)
        else:
            self._steps[self._note_room(fetch, transfer)] = fetch
        return transfer

    def finish_states(self, opened: OpenTransfer, ack: TransferAck) -> int:
        """Record the end of a search or of the read of a snapshot; return the number of snapshots that arrived."""
        assert self._states is not None, "it has begun the transfer"
        fetch = self._steps.pop(opened)
        arrived = self._states.finish(opened, ack)
        if fetch.turn is not None and fetch.search is not None and fetch.search.entry is not None:
            assert self._turns is not None, "it has begun the turn"
            self._turns.keep(fetch.turn, fetch.search.entry)
        fetch.read_pages_of_snapshot()
        fetch.settle()
        self._forget_if_done(fetch)
        return arrived

    def revoke(self, is_meant: Callable[[Scope], bool]) -> None:
        """Let snapshots that are being read be dropped when they arrive, if their names or readers are meant."""
        if self._states is not None:
            self._states.revoke(is_meant)

    def faults(self) -> list[str]:
        """Return inconsistencies, for audits."""
        of_states = [] if self._states is None else self._states.faults()
        return of_states if self._turns is None else [*of_states, *self._turns.faults()]

    def finish(self, opened: OpenTransfer, ack: TransferAck) -> int:
        """Attach the pages that arrived; return the number of new ones on the host."""
        fetch, run = self._runs.pop(opened)
        position = fetch.prefetch.position
        new = fetch.prefetch.arrive(run, ack.done_pages)
        kept = 0
        if new:
            pages = opened.transfer.host_pages[ack.done_pages - new : ack.done_pages]
            kept = self._arrivals.attach(fetch.scope, fetch.key, position, pages, run.scope)
        if new and not kept:
            self._give_up(fetch)
        self._hold(fetch)
        fetch.settle()
        self._forget_if_done(fetch)
        return kept

    def forget_all(self) -> None:
        """Start over: the transfers are cancelled."""
        for fetch in (*self._fetches, *self._holding):
            self._end_turn(fetch)
            fetch.prefetch.abandon()
            if fetch.search is not None:
                fetch.search.abandon()
        self._fetches.clear()
        self._runs.clear()
        self._steps.clear()
        if self._states is not None:
            self._states.forget_all()

    def _ask(self, fetch: Fetch, pages: int) -> Transfer | None:
        """Request the first `pages` pages of a lookup's next run; None if there is no place for them, maybe for now."""
        above = self._arrivals.find(fetch.scope, fetch.key, fetch.prefetch.position)
        if above is None:
            self._give_up(fetch)
            return None
        fetch.above = above
        # Prevents that making room drops the path that they will be attached to.
        self._ledger.need(above, 1)
        host_pages = self._host.try_allocate(pages)
        transfer = None
        if host_pages is not None:
            run = fetch.prefetch.take_run(pages)
            keys = self._names.keys(run.scope, fetch.hashes[run.first : run.first + pages])
            transfer = self._ledger.open_stored(TransferDirection.STORAGE_TO_HOST, above, host_pages, keys)
            self._runs[self._note_room(fetch, transfer)] = fetch, run
        self._ledger.need(above, -1)
        if transfer is None:
            self._refuse(fetch)
        return transfer


def _depth(fetch: Fetch) -> int:
    """Return the depth of the snapshot that a lookup has found."""
    assert fetch.search is not None
    assert fetch.search.found is not None
    return fetch.search.found[0]


def reads_of(pages: int) -> int:
    """Return the number of reads, one after another, that a lookup of `pages` stored pages takes."""
    reads, run, covered = 0, 1, 0
    while covered < pages:
        reads, covered, run = reads + 1, covered + run, run * GROWTH
    return reads


@dataclass(frozen=True, slots=True)
class Run:
    """Pages [first, first + pages) of a prompt, as stored under the name of `scope`."""

    scope: Scope
    first: int
    pages: int


class Prefetch:
    """Progress of loading one prompt, and the next runs to request.

    Pages of one prompt may be stored partly as public and partly as the user's own. Where this is unknown, one page is
    requested under each name; a hit is continued under the same name. The lookup ends at a page that is under none of
    the names.
    """

    def __init__(self, scopes: Sequence[Scope], position: int, end: int, first_run: int = 1) -> None:
        """Look for pages [position, end), all of which are missing, under the names of `scopes`.

        The first run under each name has `first_run` pages.
        """
        assert position <= end
        self.first = position
        self.position = position
        self._scopes = scopes
        self._end = end
        self._open = 0
        self._missed: set[Scope] = set()
        self._next = [Run(scope, position, first_run) for scope in scopes] if position < end else []
        # The name under which the last pages were found.
        self._found_as = scopes[0]

    @property
    def is_done(self) -> bool:
        """Whether nothing more is requested or in flight."""
        return not self._next and not self._open

    def peek_run(self) -> Run | None:
        """Return the next run to request, if there is one."""
        return self._next[0] if self._next else None

    def take_run(self, pages: int) -> Run:
        """Take the run of `peek_run`, shortened to `pages`."""
        run = self._next.pop(0)
        assert 0 < pages <= run.pages
        self._open += 1
        return Run(run.scope, run.first, pages)

    def extend(self, end: int) -> None:
        """Look for pages up to `end`, too, which are there: all at once, under the name of those before."""
        assert self.is_done
        if end > self.position:
            self._end = end
            self._missed.clear()
            self._next = [Run(self._found_as, self.position, end - self.position)]

    def rewind(self, position: int) -> None:
        """Go back to `position` if pages after it are missing again; nothing is requested or in flight."""
        assert self.is_done
        self.first, self.position = min(self.first, position), min(self.position, position)

    def stop(self) -> None:
        """Request nothing more."""
        self._next = []
        self._end = self.position

    def abandon(self) -> None:
        """Finish at once: nothing in flight will arrive."""
        self.stop()
        self._open = 0

    def arrive(self, run: Run, done: int) -> int:
        """Record that the first `done` pages of a run arrived; return the number of new ones at its end."""
        self._open -= 1
        new = max(run.first + done - self.position, 0)
        if new:
            self.position += new
            self._found_as = run.scope
            self._missed.clear()
        if done < run.pages:
            if run.first + done == self.position:
                self._missed.add(run.scope)
        elif new and self.position < self._end:
            pages = min(run.pages * GROWTH, self._end - self.position)
            self._next.append(Run(run.scope, self.position, pages))
        if self.is_done and self.position < self._end:
            untried = [scope for scope in self._scopes if scope not in self._missed]
            self._next += [Run(scope, self.position, 1) for scope in untried[:1]]
        return new

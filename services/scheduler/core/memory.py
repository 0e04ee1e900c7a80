"""KV memory of the device as the core uses it: the page allocator and the prefix cache over it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np

from common.steps import NO_PAGES, PageReplacement
from common.types import CacheMode
from services.scheduler.cache.debug.audit import AuditReport, account, audit, repair
from services.scheduler.cache.encoder_outputs import EncoderOutputs
from services.scheduler.cache.types import Accounting
from services.scheduler.core.device_place import DevicePlace
from services.scheduler.core.image_work import ImageWork
from services.scheduler.core.load_back import LoadBack
from services.scheduler.core.row_snapshots import RowSnapshots
from services.scheduler.core.rows import RowWindows

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.steps import PageIds
    from common.types import RowImage, RowSlot, SnapshotSlot, Subject, TokenIds, View
    from services.scheduler.cache.interface import PrefixCache
    from services.scheduler.cache.pages import PageAllocator
    from services.scheduler.cache.state_snapshots import SnapshotEntry
    from services.scheduler.cache.types import Insertion, LockId, PrefixLock
    from services.scheduler.core.costs import LoadCosts, OperationTimes
    from services.scheduler.core.rows import RowSlots
    from services.scheduler.core.sequence import Sequence
    from services.scheduler.core.step_limits import VisionLimits

P = ParamSpec("P")
R = TypeVar("R")


class KvMemory:
    """Allocates pages to rows, evicting from the cache as needed, and inserts the pages of rows into the cache."""

    def __init__(
        self,
        allocator: PageAllocator,
        cache: PrefixCache,
        costs: LoadCosts,
        times: OperationTimes | None = None,
        *,
        vision: VisionLimits,
        has_pages: bool = True,
    ) -> None:
        """Use an allocator and a cache over the same pages.

        `costs` decides which loads from the host tier are worthwhile.

        `times`, if given, measures the duration of cache operations. With `has_pages` False, as for an encoder, rows
        need no pages. `vision` bounds the encoding of images.
        """
        self.allocator = allocator
        self.cache = cache
        self._has_pages = has_pages
        # None if all layers share one pool.
        self.windows = RowWindows(allocator.windows) if allocator.windows is not None else None
        # None if the model has no recurrent layers, or nothing is cached.
        self.states = RowSnapshots(cache.snapshots, cache.page_size) if cache.snapshots is not None else None
        self.images = ImageWork(EncoderOutputs(vision.kept_embeddings, vision.first_output), vision)
        timed = times.timed if times is not None else _untimed
        self._peek = timed("peek", cache.peek)
        self._commit_prefix = timed("commit", cache.commit)
        self._insert = timed("insert", cache.insert)
        self._release = timed("release", cache.release)
        self._evict = timed("evict", cache.evict)
        self.loads: LoadBack | None = None
        if cache.host is not None:
            self.loads = LoadBack(cache.host, costs, cache.page_size, partial(DevicePlace, self))
        self.retractions = 0
        self.leaked_pages = 0
        # Prefixes locked by sessions between their turns, with the references that a row would hold.
        self._pins: dict[LockId, PrefixLock] = {}
        # Snapshots from which the sessions' next turns will continue.
        self._pinned_states: dict[LockId, SnapshotEntry] = {}
        # Pages beside the cache that other groups read, by lease.
        self._held: dict[bytes, PageIds] = {}

    @property
    def available_pages(self) -> int:
        """Pages that an allocation could get now, evictable and soft-free ones included."""
        return self.allocator.free_pages + self.cache.soft_free_pages + self.cache.evictable_pages

    @property
    def room(self) -> int:
        """Pages that rows could get now; with a sliding-window pool each of them needs a window page, too."""
        if self.windows is None:
            return self.available_pages
        return min(self.available_pages, self.windows.pool.available_pages)

    @property
    def room_for_requests(self) -> int:
        """Pages for further requests; with a sliding-window pool, no larger share of all than are free of that pool.

        It is not `room`: a long request needs few of its window pages at a time.
        """
        if self.windows is None:
            return self.available_pages
        pool = self.windows.pool
        return min(self.available_pages, pool.available_pages * self.allocator.capacity // pool.capacity)

    @property
    def has_changes(self) -> bool:
        """Whether the workers keep outputs of the vision encoder that they have to drop."""
        return self.images.outputs.has_dropped

    def count_retraction(self) -> None:
        """Count a row that had to give its pages back."""
        self.retractions += 1

    def pages_of(self, tokens: int) -> int:
        """Return the number of pages that a row of `tokens` tokens needs."""
        return -(-tokens // self.cache.page_size) if self._has_pages else 0

    def match(self, sequence: Sequence) -> int:
        """Return the number of tokens of a waiting sequence that are cached in its view; changes nothing."""
        if sequence.request.options.cache_mode is CacheMode.NONE:
            return 0
        return self._peek(sequence.request.view, self.matchable_ids(sequence))

    def matchable_ids(self, sequence: Sequence) -> TokenIds:
        """Return a sequence's ids that may be matched: a match ends before an image or after it.

        Only all ids of an image together are long enough that no other image has them. Where another group has computed
        the image for this sequence up to the prompt's end, a match may end where that page begins.
        """
        ids = sequence.cacheable_ids
        while sequence.image_spans:
            matched = self._peek(sequence.request.view, ids)
            first = sequence.image_at(matched)
            if first is None or self._has_tail(sequence, matched):
                break
            # The last of the ids is never matched.
            ids = ids[: first + 1]
        return ids

    def _has_tail(self, sequence: Sequence, matched: int) -> bool:
        """Return whether the page after `matched` tokens has come from the group that has computed the prompt."""
        return self.loads is not None and self.loads.has_tail(sequence, matched)

    def holds_back(self, sequence: Sequence, spare_pages: int, held_back: int, now: float) -> bool:
        """Return whether a waiting sequence must wait for pages from the host; start to load them if that pays.

        `held_back` other sequences wait for theirs, each of which will need another spare page.
        """
        if self.loads is None:
            return False
        room = self.available_pages - spare_pages, held_back
        return self.loads.holds_back(sequence, now, room, self.try_allocate)

    def begin_encodings(self, sequence: Sequence) -> int:
        """Have images of a waiting sequence encoded outside the group, if there are encoders for that.

        Return the number of embeddings that are to be computed for it; see `awaits_images`.
        """
        encodings = self.images.encodings
        if sequence.request.options.cache_mode is CacheMode.NONE or not encodings.has_more(sequence):
            return 0
        scope, matched = self.cache.view_of(sequence.request.view), self.match(sequence)
        known = sequence.prompt_tokens if self._has_tail(sequence, matched) else matched
        return 0 if scope is None else encodings.begin(sequence, known, scope)

    def may_load(self, sequence: Sequence) -> bool:
        """Return whether a part of a waiting sequence's prefix is in a lower tier, or may come from there."""
        return self.loads is not None and self.loads.may_load(sequence)

    def awaits_images(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence must wait for images that are encoded outside the group."""
        return self.images.encodings.holds_back(sequence)

    def leave_queue(self, sequence: Sequence) -> None:
        """Give up what a sequence waited for, as it has ended without a row."""
        self.end_prefetch(sequence)
        self.images.encodings.leave(sequence.handle)

    def prefetch(self, sequence: Sequence) -> None:
        """Start to look for a new sequence's prefix in storage, if there is a storage tier."""
        if self.loads is not None:
            self.loads.prefetch(sequence)

    def end_prefetch(self, sequence: Sequence) -> None:
        """Stop looking for a sequence's prefix in storage."""
        if self.loads is not None:
            self.loads.end_prefetch(sequence)

    def try_admit(self, sequence: Sequence, spare_pages: int) -> PrefixLock | None:
        """Lock the cached prefix if pages for the other tokens and `spare_pages` fit; else change nothing."""
        pages = self.pages_of(len(sequence.token_ids))
        spare_pages = spare_pages if self._has_pages else 0
        matched = self.match(sequence)
        if not self._fits(pages - matched // self.cache.page_size - self._has_tail(sequence, matched), spare_pages):
            return None
        lock = self._commit(sequence)
        if self.windows is not None:
            self.windows.enter(lock)
        # Only after the lock is it known how much of the prefix counted as evictable before.
        has_tail = self._has_tail(sequence, lock.matched_tokens)
        if not self._fits(pages - len(lock.pages) - has_tail, spare_pages):
            self._give_up(lock)
            return None
        sequence.lock = lock
        if has_tail and self.loads is not None:
            sequence.tail = self.loads.take_tail(sequence)
        self.end_prefetch(sequence)
        return lock

    def _fits(self, pages: int, spare_pages: int) -> bool:
        is_in_window = self.windows is None or self.windows.fits(pages, spare_pages)
        return is_in_window and pages + spare_pages <= self.available_pages

    def _give_up(self, lock: PrefixLock) -> None:
        """Undo a commit for which no row was opened."""
        self._release(lock)
        if self.windows is not None:
            self.windows.leave(lock)
        self.allocator.release(lock.pages)

    def _commit(self, sequence: Sequence) -> PrefixLock:
        view, options = sequence.request.view, sequence.request.options
        if options.cache_mode is CacheMode.NONE:
            return self.cache.commit_nothing(view)
        leader = sequence.leader
        # All choices of a request count as one use of its prefix.
        repeated = sequence.was_committed or (leader is not None and leader.was_committed)
        sequence.was_committed = True
        return self._commit_prefix(
            view,
            self.matchable_ids(sequence),
            repeated=repeated,
            may_promote=options.cache_mode is not CacheMode.PRIVATE,
            priority=options.priority,
            session=options.session,
        )

    def try_allocate(self, count: int, owner: int = -1) -> PageIds | None:
        """Allocate `count` pages, evicting as many as needed; None if even eviction does not free enough."""
        if self.windows is not None and count > self.windows.pool.available_pages:
            return None
        if count > self.allocator.free_pages:
            self._evict(count - self.allocator.free_pages)
        pages = self.allocator.try_allocate(count, owner)
        if pages is not None and self.windows is not None:
            self.windows.pool.pair(pages)
        return pages

    def window_pages_of(self, pages: PageIds) -> PageIds:
        """Return the window pages of a row's new pages; empty without a sliding-window pool."""
        return NO_PAGES if self.windows is None else self.windows.pool.window_pages_of(pages)

    def begin_window(self, sequence: Sequence, rows: RowSlots) -> PageIds:
        """Return the window pages at the end of an admitted row's prefix; empty without a sliding-window pool."""
        if self.windows is None:
            return NO_PAGES
        assert sequence.row is not None
        assert sequence.lock is not None
        return self.windows.begin(sequence.row, sequence.lock, rows)

    def begin_states(self, sequence: Sequence) -> SnapshotSlot | None:
        """Return the snapshot that an admitted row continues from; None without one."""
        assert sequence.lock is not None
        if self.states is None or sequence.request.options.cache_mode is CacheMode.NONE:
            return None
        return self.states.begin(sequence, sequence.lock, self.cache.view_of(sequence.request.view))

    def begin_images(self, sequence: Sequence) -> tuple[RowImage, ...]:
        """Return the images of an admitted row, with pixels where they have to be encoded."""
        if not sequence.request.images:
            return ()
        assert sequence.lock is not None
        is_cached = sequence.request.options.cache_mode is not CacheMode.NONE
        scope = self.cache.view_of(sequence.request.view) if is_cached else None
        return self.images.begin(sequence, sequence.start_tokens, scope)

    def slide_windows(self, rows: RowSlots) -> None:
        """Release window pages that have left the rows' windows; called before each plan."""
        if self.windows is not None:
            self.windows.slide(rows)

    def keep(self, sequence: Sequence, rows: RowSlots) -> list[PageReplacement]:
        """Insert the row's confirmed whole pages into the cache.

        If the cache already had the same tokens, the row switches to the cache's pages and its own duplicates are
        freed; the returned replacements inform the workers.
        """
        row, lock = sequence.row, sequence.lock
        assert row is not None
        assert lock is not None
        self.images.confirm(row, int(rows.computed[row]))
        if not self._has_pages:
            return []
        computed = int(rows.computed[row])
        table = rows.page_table(row)
        key = sequence.key_of(rows.tokens(row, computed))
        insertion = self._insert(lock, key, table, sequence.prompt_tokens)
        sequence.lock = insertion.lock
        replacements = self._repoint(row, insertion, rows)
        if self.states is not None:
            self.states.keep(row, computed, table)
        return replacements

    def _repoint(self, row: RowSlot, insertion: Insertion, rows: RowSlots) -> list[PageReplacement]:
        """Let a row use the pages that the cache already had instead of its duplicates."""
        if insertion.first_duplicate is None:
            return []
        table = rows.page_table(row)
        first = insertion.first_duplicate
        changed = insertion.pages[first:].copy()
        if self.windows is not None:
            self.windows.before_repointing(row, first, rows)
        table[first : first + len(changed)] = changed
        self.allocator.exchange(insertion.duplicates, insertion.canonical)
        if self.windows is None:
            return [PageReplacement(row, first, changed)]
        return [PageReplacement(row, first, changed, self.windows.after_repointing(row, first, len(changed), rows))]

    def free(self, sequence: Sequence, rows: RowSlots) -> None:
        """Release the row's references to its pages, and its prefix lock."""
        row, lock = sequence.row, sequence.lock
        assert row is not None
        assert lock is not None
        self.images.end(row)
        if self.states is not None:
            self.states.end(row, int(rows.computed[row]), rows.page_table(row))
        self._release(lock)
        if self.windows is not None:
            self.windows.end(row, rows)
        self.allocator.release(rows.page_table(row))
        rows.page_count[row] = 0
        sequence.lock = None

    def pin(self, view: View, token_ids: TokenIds, priority: int, session: str | None) -> PrefixLock | None:
        """Lock the cached part of a prefix that was just computed; return None if the view has none of it cached.

        Like a row, the pin holds a reference on each page, so it survives any change of the tree.
        """
        if len(token_ids) < 2:
            return None
        lock = self.cache.commit(view, token_ids, repeated=True, priority=priority, session=session)
        if not len(lock.pages):
            self._release(lock)
            return None
        if self.windows is not None:
            self.windows.enter(lock)
        self._pins[lock.lock_id] = lock
        scope = self.cache.view_of(view)
        if self.states is not None and scope is not None and (entry := self.states.pool.pin(lock.pages, scope)):
            self._pinned_states[lock.lock_id] = entry
        return lock

    def unpin(self, lock: PrefixLock) -> None:
        """Release a lock that `pin` returned."""
        del self._pins[lock.lock_id]
        entry = self._pinned_states.pop(lock.lock_id, None)
        if entry is not None and self.states is not None:
            self.states.pool.unpin(entry)
        self._give_up(lock)

    def try_lend_state(self, lock: PrefixLock) -> SnapshotEntry | None:
        """Let others read the states after a pin's pages until `take_back_state`; None: no snapshot has them."""
        scope = self.cache.view_of(lock.view)
        if self.states is None or scope is None:
            return None
        return self.states.pool.try_lend_last(lock.pages, scope)

    def take_back_state(self, entry: SnapshotEntry) -> None:
        """Undo `try_lend_state`."""
        assert self.states is not None, "it was lent"
        self.states.pool.give_back(entry)

    def hold(self, name: bytes, pages: PageIds) -> None:
        """Hold a reference on each of some pages that a row has, until `let_go`."""
        assert name not in self._held, "pages are held once under a name"
        self.allocator.retain(pages)
        self._held[name] = pages.copy()

    def let_go(self, name: bytes) -> None:
        """Release the references that are held under a name, if there are any."""
        self.allocator.release(self._held.pop(name, NO_PAGES))

    @property
    def pinned_pages(self) -> int:
        """Number of page references held by all pins, and for other groups."""
        return sum(len(lock.pages) for lock in self._pins.values()) + sum(map(len, self._held.values()))

    def account(self, rows: RowSlots) -> Accounting:
        """Account for the device's pages in O(rows)."""
        held = int(rows.page_count.sum()) + self.pinned_pages
        if self.loads is not None:
            host = self.loads.host
            held += host.ledger.device_references + sum(map(len, host.peers.tables().values()))
        return account(self.allocator, self.cache, held)

    def account_windows(self, rows: RowSlots) -> Accounting | None:
        """Account for the pages of the sliding-window pool, if there is one; none of them is soft-free.

        Pages still protected while no row runs and nothing is pinned have leaked.
        """
        if self.windows is None:
            return None
        pool = self.windows.pool
        leaked = 0 if rows.running or self._pins else pool.protected_pages
        return Accounting(pool.capacity, pool.free_pages, 0, pool.evictable_pages, pool.protected_pages, leaked)

    def account_snapshots(self, rows: RowSlots) -> Accounting | None:
        """Account for the slots of recurrent states' snapshots, if there are any; those being filled are protected.

        Slots still protected while no row runs have leaked.
        """
        if self.states is None:
            return None
        pool = self.states.pool
        leaked = 0 if rows.running else pool.held
        used = pool.held + pool.moving
        return Accounting(pool.capacity, pool.capacity - pool.kept - used, 0, pool.kept, used, leaked)

    def repair_snapshots(self) -> None:
        """Free the slots that belong to no page; only while no row runs."""
        if self.states is not None:
            self.states.pool.repair()

    def repair_windows(self) -> None:
        """Drop all references to window pages; only while no row runs and no session has a pin."""
        if self.windows is not None:
            self.windows.pool.repair()

    def window_faults(self, rows: RowSlots) -> list[str]:
        """Recount the window pages that rows and sessions need, and return the differences found."""
        if self.windows is None:
            return []
        return self.windows.faults(rows, self._pins.values(), self.allocator.capacity)

    def audit(self, rows: RowSlots) -> AuditReport:
        """Recount the holders of every page."""
        tables = {
            f"{sequence.request.request_id}/{sequence.choice_index}": rows.page_table(sequence.row)
            for sequence in rows.occupants()
            if sequence.row is not None
        }
        tables |= {f"session lock {number}": lock.pages for number, lock in self._pins.items()}
        # By number, as who knows the name of a lease may read its pages.
        tables |= {f"lease {number}": pages for number, pages in enumerate(self._held.values())}
        return audit(self.allocator, self.cache, tables | self._moving_tables())

    def _moving_tables(self) -> dict[str, PageIds]:
        """Return the pages of transfers, and of prompts that arrive from other groups, by readable names."""
        return {} if self.loads is None else self.loads.host.ledger.tables() | self.loads.host.peers.tables()

    def repair(self) -> int:
        """Free leaked pages and return their number; only while no row runs and no pin exists."""
        freed = repair(self.allocator, self.cache, self._moving_tables())
        self.leaked_pages += max(freed, 0)
        return freed

    def flush(self) -> int:
        """Drop everything cached that no row needs; return the number of pages that became free."""
        self.images.outputs.flush()
        return self.cache.flush()

    def forget(self, subject: Subject, session: str | None) -> int:
        """Drop what is cached for a subject alone; return the number of freed pages.

        With `session`, KV is dropped that only this session has used, and all outputs of the vision encoder: these are
        not told apart by sessions.
        """
        self.images.outputs.forget(subject)
        return self.cache.forget(subject, session)

    def leave_device(self) -> None:
        """Drop what the device holds; copies on the host stay. No row may run, and no transfer be open."""
        self.images.forget_all()
        if self.loads is not None:
            self.loads.host.peers.leave_device()
        self.cache.evict(self.allocator.capacity + 1)
        assert not np.any(self.allocator.counts), "the cache holds pages of the device"

    def forget_all(self) -> None:
        """Drop the whole cache because the device memory is gone. No row may run."""
        if self.loads is not None:
            self.loads.forget_all()
        self.images.forget_all()
        self.cache.flush()
        assert not np.any(self.allocator.counts), "the cache holds pages after a flush"


def _untimed(_name: str, function: Callable[P, R]) -> Callable[P, R]:
    return function

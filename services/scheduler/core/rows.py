"""Row slots as arrays, so that a step of many rows takes a few numpy calls, and their sliding-window pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.steps import ALL_ROWS, NO_PAGES, JumpLimit, MicroBatch
from common.types import RowSlot, StepId, TokenIds
from services.scheduler.core.sequence import Census

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from common.steps import PageIds
    from services.scheduler.cache.types import PrefixLock
    from services.scheduler.cache.window_pages import WindowPages
    from services.scheduler.core.sequence import Sequence


class RowSlots:
    """Owns the row slots: the sequence that runs in each, its tokens, its pages, and its planned position.

    Per row, in tokens: `length` is the number of known ids; `planned` the KV that is computed once all plans sent so
    far have run; `computed` the KV that results have confirmed; `limit` the most KV that the row may ever need
    (max_total_tokens - 1, as the last token's KV is never read).

    For a row with jump-forward, the number of tokens from a pass is known only afterwards: `planned` is then the least
    number of known ids, less one, once all plans have run, and `reach` the largest. Pages are granted up to `reach`.
    """

    def __init__(self, max_rows: int, max_context: int, page_size: int, micro_batches: int = 1) -> None:
        """Allocate for `max_rows` rows of up to `max_context` tokens (memory is touched only as rows grow).

        Slots are given out such that the `micro_batches` have about as many rows each.
        """
        self.max_rows = max_rows
        self.page_size = page_size
        max_pages = -(-max_context // page_size)
        self.sequences: list[Sequence | None] = [None] * max_rows
        self.ids: NDArray[np.int32] = np.zeros((max_rows, max_context), np.int32)
        self.pages: NDArray[np.int32] = np.zeros((max_rows, max_pages), np.int32)
        self.page_count: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        # With a sliding-window pool: index of the first page whose window page the row still needs.
        self.window_first: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self.length: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self.planned: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self.computed: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self.limit: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        # For rows with jump-forward.
        self.reach: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self.may_jump: NDArray[np.bool_] = np.zeros(max_rows, np.bool_)
        self.jumping = 0
        self.handle: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        # Results of earlier steps belong to the slot's previous occupant.
        self.opened_step: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self.occupied: NDArray[np.bool_] = np.zeros(max_rows, np.bool_)
        self.decoding: NDArray[np.bool_] = np.zeros(max_rows, np.bool_)
        # Rows whose tokens are not sent to the detokenizer.
        self.silent: NDArray[np.bool_] = np.zeros(max_rows, np.bool_)
        # Counts of the running sequences.
        self.census = Census()
        # Number of rows of batches.
        self.batch_rows = 0
        # Number of times that a row was closed.
        self.vacated = 0
        self.micro_batches = micro_batches
        # Of each micro-batch; see `MicroBatch`.
        self._free = [list(range(first, max_rows, micro_batches))[::-1] for first in range(micro_batches)]

    @property
    def free_slots(self) -> int:
        """Number of free rows."""
        return sum(map(len, self._free))

    @property
    def running(self) -> int:
        """Number of occupied rows."""
        return self.max_rows - self.free_slots

    def open(self, sequence: Sequence, step_id: StepId, pages: PageIds, computed_tokens: int) -> RowSlot:
        """Assign a slot to `sequence` as of plan `step_id`; KV of its first `computed_tokens` is in `pages`."""
        row = RowSlot(max(self._free, key=len).pop())
        count = len(sequence.token_ids)
        self.sequences[row] = sequence
        self.census.add(sequence.request.view.subject)
        self.batch_rows += sequence.is_batch
        self.ids[row, :count] = sequence.token_ids
        self.length[row] = count
        self.planned[row] = self.computed[row] = computed_tokens
        self.limit[row] = sequence.max_total_tokens - 1
        self.handle[row] = sequence.handle
        self.opened_step[row] = step_id
        self.occupied[row] = True
        self.decoding[row] = False
        self.silent[row] = sequence.is_silent
        self.may_jump[row] = sequence.sampling.may_jump
        self.jumping += sequence.sampling.may_jump
        self.page_count[row] = 0
        self.append_pages(row, pages)
        sequence.row = row
        return row

    def close(self, row: RowSlot) -> None:
        """Free a slot; the caller has released its pages."""
        sequence = self.sequences[row]
        assert sequence is not None, f"row {row} is free"
        sequence.row = None
        self.sequences[row] = None
        self.census.remove(sequence.request.view.subject)
        self.batch_rows -= sequence.is_batch
        self.occupied[row] = False
        self.decoding[row] = False
        self.jumping -= int(self.may_jump[row])
        self.may_jump[row] = False
        self.vacated += 1
        self._free[row % self.micro_batches].append(row)

    def append_pages(self, row: RowSlot, pages: PageIds) -> None:
        """Append pages to a row's page table."""
        first = int(self.page_count[row])
        self.pages[row, first : first + len(pages)] = pages
        self.page_count[row] = first + len(pages)

    def grant_pages(self, rows: NDArray[np.int64], counts: NDArray[np.int64], pages: PageIds) -> None:
        """Append the next counts[i] > 0 of `pages` to the page table of rows[i]; a row may occur only once."""
        first = self.page_count[rows]
        self.page_count[rows] = first + counts
        if len(rows) == len(pages):
            self.pages[rows, first] = pages
            return
        # For each page, its index among the pages that its row gets.
        numbers = np.arange(len(pages)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.pages[np.repeat(rows, counts), np.repeat(first, counts) + numbers] = pages

    def page_table(self, row: RowSlot) -> PageIds:
        """Return a view of the row's pages, [pages] int32."""
        return self.pages[row, : self.page_count[row]]

    def tokens(self, row: RowSlot, count: int | None = None) -> TokenIds:
        """Return a view of the row's first `count` known ids (all by default), [tokens] int32."""
        return self.ids[row, : self.length[row] if count is None else count]

    def live(self, part: MicroBatch = ALL_ROWS) -> NDArray[np.int64]:
        """Return the rows of `part` that decode and have not been planned to their limit, ascending."""
        return part.of((self.decoding & (self.planned < self.limit)).nonzero()[0])

    def next_micro_batch(self, after: MicroBatch) -> MicroBatch:
        """Return the first micro-batch after `after`, in turn, that has live rows; the next one if none has."""
        count = self.micro_batches
        if count == 1:
            return after
        live = self.live() % count
        turns = [MicroBatch((after.index + 1 + i) % count, count) for i in range(count)]
        return next((each for each in turns if (live == each.index).any()), turns[0])

    def reach_of(
        self, rows: NDArray[np.int64], planned: NDArray[np.int64], tokens: int, slack: int
    ) -> NDArray[np.int64]:
        """Return the reach of rows after `tokens` more passes, which advance them at least to `planned`."""
        reach = planned.copy()
        at = np.flatnonzero(self.may_jump[rows])
        of = rows[at]
        # Earlier plans may advance them to the old reach.
        further = np.maximum(self.reach[of] + tokens, planned[at] + slack)
        reach[at] = np.minimum(further, self.limit[of])
        return reach

    def reach_within_pages(self, row: RowSlot, slack: int) -> None:
        """Let a row whose prompt is fully planned reach `slack` tokens further, as far as its pages allow."""
        room = min(self.page_count[row] * self.page_size, self.limit[row])
        self.reach[row] = max(min(self.planned[row] + slack, room), self.planned[row])

    def jump_tokens(self) -> int:
        """Return the number of tokens that the next plan's first pass may compute beyond one for each decoding row."""
        if not self.jumping:
            return 0
        rows = (self.may_jump & self.decoding & (self.planned < self.limit)).nonzero()[0]
        known, planned = self.length[rows] - 1, self.planned[rows]
        # The tokens forced after the last sampled one if that is known, else the most that the pass of that one may
        # append.
        lacking = np.where(planned == known, known - self.computed[rows], self.reach[rows] - planned)
        return int(lacking.sum())

    def jumps(self) -> tuple[JumpLimit, ...]:
        """Return the jump-forward limits of rows for the plan that is being made."""
        if not self.jumping:
            return ()
        rows = np.flatnonzero(self.may_jump & self.decoding & (self.reach > self.planned))
        return tuple(
            JumpLimit(RowSlot(row), most + 1)
            for row, most in zip(rows.tolist(), self.reach[rows].tolist(), strict=True)
        )

    def occupants(self) -> list[Sequence]:
        """Return the running sequences by slot."""
        return [sequence for sequence in self.sequences if sequence is not None]


class RowWindows:
    """Tracks which pages lie in rows' windows; `RowSlots.window_first` is the index of each row's first one.

    Rows' window pages are released when a plan is made and can be granted again in the same plan: each of its passes
    reads from the first page that its first pass needs, earlier plans are computed before it, and the new owner of a
    page writes to it in this plan at the earliest.
    """

    def __init__(self, pool: WindowPages) -> None:
        """Use a pool from which nothing else allocates."""
        self.pool = pool

    def fits(self, pages: int, spare_pages: int) -> bool:
        """Return whether a row that needs `pages` new pages fits: it needs at most the pages of its window at once."""
        return min(pages, self.pool.row_pages(0)) + spare_pages <= self.pool.available_pages

    def enter(self, lock: PrefixLock) -> None:
        """Reference the window pages that the next token after a lock's pages attends to."""
        self.pool.need(lock.pages[self._first_seen(lock) :])

    def leave(self, lock: PrefixLock) -> None:
        """Undo `enter`."""
        self.pool.release(lock.pages[self._first_seen(lock) :])

    def begin(self, row: RowSlot, lock: PrefixLock, rows: RowSlots) -> PageIds:
        """Transfer the references of `enter` to a row; return the window pages."""
        rows.window_first[row] = first = self._first_seen(lock)
        return self.pool.window_pages_of(lock.pages[first:])

    def slide(self, rows: RowSlots) -> None:
        """Release the window pages that the next passes of running rows no longer need."""
        firsts = np.minimum(self.pool.first_page(rows.planned), rows.page_count)
        for row in np.flatnonzero(rows.occupied & (firsts > rows.window_first)).tolist():
            self.pool.release(rows.pages[row, rows.window_first[row] : firsts[row]])
            rows.window_first[row] = firsts[row]

    def end(self, row: RowSlot, rows: RowSlots) -> None:
        """Release all window pages of a row."""
        self.pool.release(self._needed(row, rows))
        rows.window_first[row] = rows.page_count[row]

    def before_repointing(self, row: RowSlot, first: int, rows: RowSlots) -> None:
        """Release the window pages of a row from page index `first` on, before its pages are replaced by duplicates."""
        self.pool.release(self._needed(row, rows, first))

    def after_repointing(self, row: RowSlot, first: int, count: int, rows: RowSlots) -> PageIds:
        """Reference the window pages of the new pages; return those the row needs of the `count` from `first` on."""
        self.pool.need(self._needed(row, rows, first))
        return self.pool.window_pages_of(rows.pages[row, max(first, int(rows.window_first[row])) : first + count])

    def faults(self, rows: RowSlots, locks: Iterable[PrefixLock], device_pages: int) -> list[str]:
        """Return inconsistencies of the pool; besides rows, `locks` hold the pages that their next token attends to."""
        tables = [self._needed(sequence.row, rows) for sequence in rows.occupants() if sequence.row is not None]
        tables += [lock.pages[self._first_seen(lock) :] for lock in locks]
        needed = np.bincount(np.concatenate([NO_PAGES, *tables]), minlength=device_pages)
        return self.pool.faults(needed)

    def _needed(self, row: RowSlot, rows: RowSlots, first: int = 0) -> PageIds:
        return rows.page_table(row)[max(first, int(rows.window_first[row])) :]

    def _first_seen(self, lock: PrefixLock) -> int:
        return self.pool.first_seen(lock.matched_tokens)

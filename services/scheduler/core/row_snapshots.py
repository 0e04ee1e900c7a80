"""Snapshots of the recurrent states of running rows: when they are taken, and which of them the cache keeps.

While a prompt is prefilled, its chunks end where a snapshot is of use: every `interval` pages, where other requests
were seen to diverge, and at its last whole page. These belong to the cached pages as soon as they are computed. While a
row decodes, the state at its last whole page is saved again and again, so that the next turn can continue after this
one; the first time at the end of the prompt, if that fills its last page. As a row may end in any pass, the newest
complete snapshot is never overwritten: two slots take turns, and the next save is planned when the last one is
confirmed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.steps import StateSave
from common.types import RowSlot

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from common.steps import PageIds
    from common.types import SnapshotSlot
    from services.scheduler.cache.state_snapshots import StateSnapshots
    from services.scheduler.cache.types import PrefixLock, Scope
    from services.scheduler.core.rows import RowSlots
    from services.scheduler.core.sequence import Sequence


@dataclass(slots=True)
class _RowState:
    """The snapshots of one row; numbers of tokens are those of its state."""

    scope: Scope
    public_pages: int
    tenant_pages: int
    # Ascending; the prompt's chunks end there.
    wanted: tuple[int, ...]
    # The prompt's, if it fills its last page. Only longer prompts can continue there, as those of later turns.
    whole_prompt: int | None = None
    # Planned, not confirmed, oldest first; and whether they are of the prompt.
    pending: list[tuple[int, SnapshotSlot, bool]] = field(default_factory=list)
    # The newest one that was confirmed while the row decodes.
    newest: tuple[int, SnapshotSlot] | None = None

    def scope_at(self, pages: int) -> Scope:
        """Return the owner of the row's page at that depth."""
        if pages <= self.public_pages:
            return ()
        return self.scope[:1] if pages <= self.public_pages + self.tenant_pages else self.scope


class RowSnapshots:
    """Owns the snapshot slots that rows fill, and orders the copies."""

    def __init__(self, pool: StateSnapshots, page_size: int) -> None:
        """Use the slots of `pool`."""
        self.pool = pool
        self._page_size = page_size
        self._rows: dict[RowSlot, _RowState] = {}
        self._saves: list[StateSave] = []

    def begin(self, sequence: Sequence, lock: PrefixLock, scope: Scope | None) -> SnapshotSlot | None:
        """Start to follow an admitted row whose private nodes have `scope`; return where its state is.

        Nothing of a row without `Resumption` is kept.
        """
        resumption, row = lock.resumption, sequence.row
        assert row is not None, "the row is open"
        if resumption is None or scope is None:
            return None
        start, last = len(lock.pages), (len(sequence.token_ids) - 1) // self._page_size
        shared, interval = resumption.public_pages + resumption.tenant_pages, self.pool.interval
        regular = set(range(interval * (start // interval + 1), last + 1, interval))
        # Elsewhere within shared pages, a snapshot would show other views where this request diverges.
        others = {depth for depth in (*resumption.ends, last) if depth > shared or depth in resumption.ends}
        depths = sorted(depth for depth in regular | others if start < depth <= last)
        self._rows[row] = _RowState(
            scope,
            resumption.public_pages,
            resumption.tenant_pages,
            tuple(depth * self._page_size for depth in depths),
            None if len(sequence.token_ids) % self._page_size else len(sequence.token_ids),
        )
        return resumption.snapshot

    def cut(self, row: RowSlot, start: int, length: int) -> int:
        """Return the length of a chunk from `start` that ends at the next wanted snapshot at the latest."""
        state = self._rows.get(row)
        end = next((tokens for tokens in state.wanted if tokens > start), None) if state else None
        return length if end is None else min(length, end - start)

    def plan_chunk(self, row: RowSlot, end: int) -> None:
        """Order a snapshot at the end of a chunk, if one is wanted there."""
        state = self._rows.get(row)
        if state is not None and end in state.wanted:
            self._order(row, state, end, of_prompt=True)
        elif state is not None and end == state.whole_prompt:
            # Gives way to the next one, as all that are taken while decoding.
            self._order(row, state, end, of_prompt=False)

    def plan_decoding(self, rows: RowSlots, decoding: NDArray[np.int64], before: NDArray[np.int64]) -> None:
        """Order snapshots of rows that complete a page; `before` [rows] is `RowSlots.planned` before this plan."""
        size = self._page_size
        ends = rows.planned[decoding] // size * size
        for row, end in zip(
            decoding[ends > before[decoding]].tolist(), ends[ends > before[decoding]].tolist(), strict=True
        ):
            state = self._rows.get(RowSlot(row))
            if state is None:
                continue
            self._confirm_decoded(state, int(rows.computed[row]))
            if not state.pending:
                self._order(RowSlot(row), state, end, of_prompt=False)

    def take_saves(self) -> tuple[StateSave, ...]:
        """Return the copies for a plan, and clear them."""
        saves, self._saves = tuple(self._saves), []
        return saves

    def wanted_within(self, row: RowSlot, tokens: int) -> int:
        """Return how many of a row's first `tokens` tokens others can continue after, once they are computed."""
        state = self._rows.get(row)
        return max((each for each in state.wanted if each <= tokens), default=0) if state else 0

    def keep(self, row: RowSlot, computed: int, pages: PageIds) -> None:
        """Let confirmed snapshots of the prompt belong to the row's pages, which the cache has."""
        state = self._rows.get(row)
        if state is None:
            return
        for tokens, slot, of_prompt in list(state.pending):
            if of_prompt and tokens <= computed:
                state.pending.remove((tokens, slot, of_prompt))
                self._attach(state, tokens, slot, pages)

    def end(self, row: RowSlot, computed: int, pages: PageIds) -> None:
        """Keep the newest snapshot of a row that ends, and free its other slots.

        A plan in flight may still write to these, but before any later plan uses them.
        """
        state = self._rows.pop(row, None)
        if state is None:
            return
        self._saves = [save for save in self._saves if save.row != row]
        self._confirm_decoded(state, computed)
        for _, slot, _ in state.pending:
            self.pool.release(slot)
        if state.newest is not None:
            self._attach(state, *state.newest, pages)

    def _order(self, row: RowSlot, state: _RowState, tokens: int, *, of_prompt: bool) -> None:
        slot = self.pool.try_allocate()
        if slot is not None:
            state.pending.append((tokens, slot, of_prompt))
            self._saves.append(StateSave(row, tokens, slot))

    def _confirm_decoded(self, state: _RowState, computed: int) -> None:
        for tokens, slot, of_prompt in list(state.pending):
            if not of_prompt and tokens <= computed:
                state.pending.remove((tokens, slot, of_prompt))
                if state.newest is not None:
                    self.pool.release(state.newest[1])
                state.newest = tokens, slot

    def _attach(self, state: _RowState, tokens: int, slot: SnapshotSlot, pages: PageIds) -> None:
        depth = tokens // self._page_size
        self.pool.attach(int(pages[depth - 1]), state.scope_at(depth), slot)

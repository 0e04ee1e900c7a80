"""The rows of a rank: ids, page tables and progress of every running sequence, as arrays indexed by row slot."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from common.steps import ALL_ROWS, MicroBatch, PageGrants, RowOpen, RowStop
from common.types import FinishReason, Pooling, RowSlot, TokenIds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.types import TokenIds


ScalarT = TypeVar("ScalarT", bound=np.generic)


class PaddedTable(Generic[ScalarT]):
    """`values[row]` is the row's list, followed by the row's padding; as wide as the longest list ever set."""

    def __init__(self, rows: int, dtype: type[ScalarT], fill: float) -> None:
        """Start with empty lists, padded with `fill`."""
        self.values: NDArray[ScalarT] = np.full((rows, 1), fill, dtype)
        self._padding: NDArray[ScalarT] = np.full(rows, fill, dtype)
        self._fill = fill

    def set(self, row: int, values: NDArray[ScalarT], padding: float | None = None) -> None:
        """Replace one row's list; `padding` follows it instead of the table's own."""
        if values.size > self.values.shape[1]:
            self._widen(values.size)
        self._padding[row] = self._fill if padding is None else padding
        self.values[row, : values.size] = values
        self.values[row, values.size :] = self._padding[row]

    def _widen(self, width: int) -> None:
        extra = np.repeat(self._padding[:, None], width - self.values.shape[1], axis=1)
        self.values = np.concatenate([self.values, extra], axis=1)


@dataclass(frozen=True, slots=True)
class FollowingTokens:
    """Tokens of rows after their first one of a pass, accepted or forced: rows[i] gets token_ids[i], [tokens] int32.

    Those of a row are neighbours, in their order; the last of them may stop it, none before.
    """

    rows: RowIndices
    token_ids: TokenIds

    def by_row(self) -> Iterator[tuple[int, TokenIds]]:
        """Yield each row with its tokens."""
        if self.rows.size:
            starts = np.flatnonzero(np.diff(self.rows, prepend=-1))
            for token_ids, first in zip(np.split(self.token_ids, starts[1:]), starts, strict=True):
                yield int(self.rows[first]), token_ids

    def of(self, rows: RowIndices) -> FollowingTokens:
        """Return the tokens of some rows."""
        if not self.rows.size:
            return self
        theirs = np.isin(self.rows, rows)
        return FollowingTokens(self.rows[theirs], self.token_ids[theirs])


NOTHING_FOLLOWS = FollowingTokens(np.empty(0, np.int64), np.empty(0, np.int32))


def concatenate_following(parts: list[FollowingTokens]) -> FollowingTokens:
    """Return the tokens of all parts of a pass."""
    if not any(part.rows.size for part in parts):
        return NOTHING_FOLLOWS
    return FollowingTokens(
        np.concatenate([part.rows for part in parts]), np.concatenate([part.token_ids for part in parts])
    )


RowIndices = NDArray[np.int64]
MAX_POSITION = np.iinfo(np.int64).max
NO_ADAPTER = -1


class RowPhase(IntEnum):
    """Where a row stands."""

    FREE = 0
    # Some of its ids are not computed yet.
    PREFILL = 1
    # All ids but the last one and forced ones are computed; every pass adds one.
    DECODE = 2
    # It stopped itself and waits for its close.
    STOPPED = 3


class RowStates:
    """State of all row slots. Methods trust their arguments; `plan.py` checks plans before they come here.

    Arrays have one entry per slot; those of free slots mean nothing. `lengths` counts the ids known (prompt and
    output), `computed` those whose KV is stored, which while decoding is one less, or more where tokens were forced.
    """

    def __init__(
        self,
        max_rows: int,
        max_context: int,
        page_size: int,
        *,
        has_window_pool: bool = False,
        has_states: bool = False,
        head_input: Pooling = Pooling.LAST,
    ) -> None:
        """Make `max_rows` free slots for up to `max_context` tokens each.

        With `has_states`, each slot keeps the recurrent states of its row.
        A classification head of whole prompts reads hidden states that are pooled as `head_input`.
        """
        self._head_input = head_input
        self.has_states = has_states
        self.page_size = page_size
        self.max_rows = max_rows
        self.max_context = max_context
        self.phase = np.zeros(max_rows, np.uint8)
        self.lengths = np.zeros(max_rows, np.int64)
        self.computed = np.zeros(max_rows, np.int64)
        self.prompt_tokens = np.zeros(max_rows, np.int64)
        self.max_total_tokens = np.zeros(max_rows, np.int64)
        # Absolute position from which on stop ids count.
        self.stops_from = np.zeros(max_rows, np.int64)
        self.stop_ids = PaddedTable(max_rows, np.int64, fill=-1)
        self.page_counts = np.zeros(max_rows, np.int64)
        # Most ids of each row after the running pass if it may jump forward; else 0.
        self.jump_limits = np.zeros(max_rows, np.int64)
        # Tokens of each row's draft in the next pass; they are in `token_ids` from the row's length on.
        self.draft_lengths = np.zeros(max_rows, np.int64)
        # The hidden states that are pooled of each row; None: it generates.
        self.pooling: list[Pooling | None] = [None] * max_rows
        # The slot of each row's adapter; NO_ADAPTER for none.
        self.adapters = np.full(max_rows, NO_ADAPTER, np.int32)
        # Added to the positions of tokens that are not known when the row is opened; see `RowOpen.position_offset`.
        self.position_offsets = np.zeros(max_rows, np.int64)
        # Of rows that hold two texts: position of the second one's first token; else MAX_POSITION.
        self.second_text_starts = np.full(max_rows, MAX_POSITION)
        # Never cleared, and the system commits only pages that are written: a large context costs what is used.
        self.token_ids = np.zeros((max_rows, max_context), np.int32)
        self.page_table = np.zeros((max_rows, -(-max_context // page_size)), np.int32)
        # The same for the layers that attend to a window only, where these have a pool of their own. What lies before a
        # row's window may name any page.
        self.window_table = np.zeros_like(self.page_table) if has_window_pool else None

    @property
    def open_count(self) -> int:
        return int(np.count_nonzero(self.phase))

    def decoding(self, part: MicroBatch = ALL_ROWS) -> RowIndices:
        """Return the rows of `part` that decode, in ascending order."""
        return part.of(np.flatnonzero(self.phase == RowPhase.DECODE))

    def reset(self) -> None:
        self.phase[:] = RowPhase.FREE
        self.jump_limits[:] = 0
        self.draft_lengths[:] = 0

    def open(self, opened: RowOpen) -> None:
        """Take a free slot."""
        row, length = opened.row, opened.token_ids.size
        self.phase[row] = RowPhase.PREFILL
        self.lengths[row] = length
        self.computed[row] = opened.computed_tokens
        self.prompt_tokens[row] = opened.prompt_tokens
        self.max_total_tokens[row] = opened.max_total_tokens
        # Below its minimum a row with a grammar samples a stop id only if the grammar allows nothing else.
        minimum = opened.min_new_tokens if opened.sampling.grammar is None else 0
        self.stops_from[row] = opened.prompt_tokens + minimum
        self.pooling[row] = self._head_input if opened.pooling is Pooling.CLASSIFY else opened.pooling
        self.adapters[row] = NO_ADAPTER if opened.adapter is None else opened.adapter
        self.position_offsets[row] = opened.position_offset
        start = opened.second_text_start
        self.second_text_starts[row] = MAX_POSITION if start is None else start
        self.stop_ids.set(row, np.array(opened.stop_token_ids, np.int64))
        self.token_ids[row, :length] = opened.token_ids
        self.page_counts[row] = 0
        self.append_pages(row, opened.pages, opened.window_pages)

    def close(self, row: RowSlot) -> None:
        self.phase[row] = RowPhase.FREE

    def append_pages(self, row: RowSlot, pages: NDArray[np.int32], window_pages: NDArray[np.int32]) -> None:
        """Put pages at the end of a row's page table; `window_pages` are the window pool's for the last of them."""
        start = int(self.page_counts[row])
        end = start + pages.size
        if end > self.page_table.shape[1]:
            self._widen_page_table(end)
        self.page_table[row, start:end] = pages
        if self.window_table is not None:
            self.window_table[row, end - window_pages.size : end] = window_pages
        self.page_counts[row] = end

    def grant_pages(self, grants: PageGrants) -> None:
        """Put pages at the end of rows' page tables."""
        order = np.argsort(grants.rows, kind="stable")
        rows = grants.rows[order]
        counts = np.bincount(rows, minlength=self.max_rows)
        # The index of each page among its row's granted pages.
        numbers = np.arange(rows.size) - (np.cumsum(counts) - counts)[rows]
        places = self.page_counts[rows] + numbers
        end = int(places.max()) + 1
        if end > self.page_table.shape[1]:
            self._widen_page_table(end)
        self.page_table[rows, places] = grants.pages[order]
        if self.window_table is not None:
            self.window_table[rows, places] = grants.window_pages[order]
        self.page_counts += counts

    def replace_pages(
        self, row: RowSlot, first: int, pages: NDArray[np.int32], window_pages: NDArray[np.int32]
    ) -> None:
        """Overwrite part of a row's page table."""
        end = first + pages.size
        self.page_table[row, first:end] = pages
        if self.window_table is not None:
            self.window_table[row, end - window_pages.size : end] = window_pages

    def advance_prefill(self, rows: RowIndices, lengths: NDArray[np.int64]) -> None:
        self.computed[rows] += lengths

    def finish_pooled(self, rows: RowIndices) -> tuple[RowStop, ...]:
        """Stop rows that generate nothing: their last id is computed."""
        self.phase[rows] = RowPhase.STOPPED
        return tuple(RowStop(RowSlot(row), FinishReason.STOP) for row in rows.tolist())

    def advance(self, rows: RowIndices) -> NDArray[np.bool_]:
        """Make room for the token that each row is about to get; return which have reached their length.

        Rows go on decoding, but those that are returned have stopped. `record` brings the tokens.
        """
        positions = self.lengths[rows]
        # Then every id before the new one is computed, by decoding, prefill or jump-forward.
        self.computed[rows] = positions
        self.lengths[rows] = positions + 1
        at_limit: NDArray[np.bool_] = positions + 1 >= self.max_total_tokens[rows]
        self.phase[rows] = np.where(at_limit, np.uint8(RowPhase.STOPPED), np.uint8(RowPhase.DECODE))
        return at_limit

    def record(self, rows: RowIndices, positions: NDArray[np.int64], token_ids: TokenIds) -> NDArray[np.bool_]:
        """Put tokens in the places that `advance` made; return which of them stop their row."""
        self.token_ids[rows, positions] = token_ids
        hits_stop: NDArray[np.bool_] = (self.stop_ids.values[rows] == token_ids[:, None]).any(axis=1)
        return hits_stop & (positions >= self.stops_from[rows])

    def jump_room(self, rows: RowIndices) -> NDArray[np.int64]:
        """Return the number of tokens that may be forced on each row after its next sampled one."""
        room: NDArray[np.int64] = np.maximum(self.jump_limits[rows] - self.lengths[rows] - 1, 0)
        return room

    def allow_one_more(self) -> None:
        """Let rows that may jump know one more id: a pass of the plan is over."""
        self.jump_limits[self.jump_limits > 0] += 1

    def set_draft(self, row: RowSlot, token_ids: TokenIds) -> None:
        """Let the next pass verify a draft of a row."""
        length = self.lengths[row]
        self.token_ids[row, length : length + token_ids.size] = token_ids
        self.draft_lengths[row] = token_ids.size

    def stopping(self, rows: RowIndices, token_ids: TokenIds) -> NDArray[np.bool_]:
        """Return which of `rows` would be stopped by a stop id if they got these tokens next."""
        hits: NDArray[np.bool_] = (self.stop_ids.values[rows] == token_ids[:, None]).any(axis=1)
        return hits & (self.lengths[rows] >= self.stops_from[rows])

    def ends_with(self, row: int, position: int, token_id: int) -> bool:
        """Return whether a token stops a row that gets it at `position`."""
        return bool(position >= self.stops_from[row] and (self.stop_ids.values[row] == token_id).any())

    def append_accepted(self, accepted: FollowingTokens) -> tuple[RowStop, ...]:
        """Append tokens that confirm a draft, whose KV is therefore stored; return the stops that they cause."""
        for slot, token_ids in accepted.by_row():
            self.computed[slot] += token_ids.size
        return self.append_following(accepted)

    def append_following(self, following: FollowingTokens) -> tuple[RowStop, ...]:
        """Append tokens after the token that was just sampled; return the stops that they cause."""
        stops = []
        for slot, token_ids in following.by_row():
            row, length = RowSlot(slot), int(self.lengths[slot]) + token_ids.size
            self.token_ids[row, self.lengths[row] : length] = token_ids
            self.lengths[row] = length
            last = int(token_ids[-1])
            if self.ends_with(row, length - 1, last):
                stops.append(RowStop(row, FinishReason.STOP, last))
            elif length >= self.max_total_tokens[row]:
                stops.append(RowStop(row, FinishReason.LENGTH))
        self.stop(np.array([stop.row for stop in stops], np.int64))
        return tuple(stops)

    def stop(self, rows: RowIndices) -> None:
        """Take rows out of decoding until they are closed."""
        self.phase[rows[self.phase[rows] == RowPhase.DECODE]] = RowPhase.STOPPED

    def append_tokens(self, rows: RowIndices, token_ids: TokenIds) -> tuple[RowStop, ...]:
        """Give each row its sampled token; rows go on decoding unless they are returned as stopped."""
        positions = self.lengths[rows]
        hits_length = self.advance(rows)
        hits_stop = self.record(rows, positions, token_ids)
        stopped = hits_stop | hits_length
        if not stopped.any():
            return ()
        self.phase[rows[stopped]] = RowPhase.STOPPED
        return tuple(
            RowStop(RowSlot(int(rows[i])), FinishReason.STOP, int(token_ids[i]))
            if hits_stop[i]
            else RowStop(RowSlot(int(rows[i])), FinishReason.LENGTH)
            for i in np.flatnonzero(stopped)
        )

    def _widen_page_table(self, width: int) -> None:
        extra = np.zeros((self.max_rows, width - self.page_table.shape[1]), np.int32)
        self.page_table = np.concatenate([self.page_table, extra], axis=1)
        if self.window_table is not None:
            self.window_table = np.concatenate([self.window_table, extra], axis=1)

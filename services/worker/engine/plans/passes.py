"""One forward pass: its rows and chunks, and its ragged input as host arrays."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from common.types import Pooling
from services.worker.engine.plans.rows import NO_ADAPTER

if TYPE_CHECKING:
    from services.worker.engine.plans.rows import RowIndices, RowStates

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunks:
    """Prefill chunks of a pass, one entry each; `completes` says which reach the end of their row's ids.

    `pools` says whose rows generate nothing: at their end nothing is sampled. The last `drafted` tokens are a draft of
    what the row may sample, after each of which the next token is sampled, too.
    """

    rows: RowIndices
    starts: IntArray
    lengths: IntArray
    completes: NDArray[np.bool_]
    pools: NDArray[np.bool_]
    drafted: IntArray

    @property
    def samples(self) -> NDArray[np.bool_]:
        """Which sample their row's next token."""
        return self.completes & ~self.pools


NO_INDICES: IntArray = np.empty(0, np.int64)
_NO_FLAGS = np.empty(0, np.bool_)
NO_CHUNKS = Chunks(NO_INDICES, NO_INDICES, NO_INDICES, _NO_FLAGS, _NO_FLAGS, NO_INDICES)


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """Rows that decode one token each, then chunks."""

    decode_rows: RowIndices
    chunks: Chunks

    @property
    def is_empty(self) -> bool:
        return self.decode_rows.size == 0 and self.chunks.rows.size == 0

    @property
    def tokens(self) -> int:
        return int(self.decode_rows.size + self.chunks.lengths.sum())

    @property
    def sampled_rows(self) -> RowIndices:
        """The rows that get tokens from this pass, in the order of its samples."""
        if self.chunks.rows.size == 0:
            return self.decode_rows
        return np.concatenate([self.decode_rows, self.chunks.rows[self.chunks.samples]])

    @property
    def drafted(self) -> IntArray:
        """Tokens of the drafts of `sampled_rows`; row i has drafted[i] + 1 samples, which are adjacent."""
        if self.chunks.rows.size == 0:
            return np.zeros(self.decode_rows.size, np.int64)
        no_drafts = np.zeros(self.decode_rows.size, np.int64)
        return np.concatenate([no_drafts, self.chunks.drafted[self.chunks.samples]])

    def without_drafts(self) -> ForwardPass:
        """Return the pass without the tokens of drafts."""
        chunks = self.chunks
        lengths = chunks.lengths - chunks.drafted
        return replace(self, chunks=replace(chunks, lengths=lengths, drafted=np.zeros_like(chunks.drafted)))

    @property
    def pooled_rows(self) -> RowIndices:
        """The rows that generate nothing and whose last id this pass computes."""
        return self.chunks.rows[self.chunks.completes & self.chunks.pools]


@dataclass(frozen=True, slots=True)
class HostBatch:
    """The fields of `ForwardBatch`, in numpy."""

    token_ids: IntArray  # [tokens]
    positions: IntArray  # [tokens], for rotary embedding
    query_starts: NDArray[np.int32]  # [rows + 1]
    key_lengths: NDArray[np.int32]  # [rows]
    page_table: NDArray[np.int32]  # [rows, max_pages]
    write_slots: IntArray  # [tokens]
    sample_indices: IntArray  # [samples]
    decode_rows: int
    max_query_length: int
    max_key_length: int
    # Tokens whose hidden states are pooled, and the row slot of each; a row's tokens are neighbours.
    pooled_indices: IntArray = field(default_factory=lambda: NO_INDICES)
    pooled_slots: IntArray = field(default_factory=lambda: NO_INDICES)
    # `page_table` and `write_slots` of the layers that attend to a window only; None: they share the others' pool.
    window_table: NDArray[np.int32] | None = None
    window_slots: IntArray | None = None
    # [rows] the slot of each sequence; None: nothing is kept by row.
    row_slots: IntArray | None = None
    # [tokens] the slot of each token's adapter, NO_ADAPTER for none; None: no token has one.
    adapters: NDArray[np.int32] | None = None


def make_pass(rows: RowStates, decoding: RowIndices, chunks: Chunks) -> ForwardPass:
    """Return the pass of decoding rows and chunks.

    Rows that jumped forward compute their new tokens as a chunk, and rows with drafts these tokens.
    """
    drafted = rows.draft_lengths[decoding]
    lacking = rows.lengths[decoding] - rows.computed[decoding] + drafted
    has_several = lacking > 1
    if not has_several.any():
        return ForwardPass(decoding, chunks)
    ahead = decoding[has_several]
    joined = Chunks(
        np.concatenate([ahead, chunks.rows]),
        np.concatenate([rows.computed[ahead], chunks.starts]),
        np.concatenate([lacking[has_several], chunks.lengths]),
        np.concatenate([np.ones(ahead.size, np.bool_), chunks.completes]),
        np.concatenate([np.zeros(ahead.size, np.bool_), chunks.pools]),
        np.concatenate([drafted[has_several], chunks.drafted]),
    )
    return ForwardPass(decoding[~has_several], joined)


def gather(rows: RowStates, forward: ForwardPass) -> HostBatch:
    """Return the model's input for a pass, without a loop over rows."""
    if forward.chunks.rows.size == 0:
        return _gather_decode(rows, forward.decode_rows)
    return _gather_mixed(rows, forward)


def _with_window(
    batch: HostBatch, rows: RowStates, taking_part: RowIndices, token_rows: RowIndices, positions: IntArray
) -> HostBatch:
    """Add page table and write slots of the sliding-window KV pool, if there is one."""
    if rows.window_table is None:
        return batch
    return replace(
        batch,
        window_table=rows.window_table[taking_part, : batch.page_table.shape[1]],
        window_slots=_slots(rows.window_table, rows.page_size, token_rows, positions),
    )


def _gather_decode(rows: RowStates, taking_part: RowIndices) -> HostBatch:
    count = taking_part.size
    key_lengths = rows.lengths[taking_part]
    positions = key_lengths - 1
    max_key_length = int(key_lengths.max())
    batch = HostBatch(
        token_ids=rows.token_ids[taking_part, positions].astype(np.int64),
        positions=positions + rows.position_offsets[taking_part],
        query_starts=np.arange(count + 1, dtype=np.int32),
        key_lengths=key_lengths.astype(np.int32),
        page_table=_page_table(rows, taking_part, max_key_length),
        write_slots=_slots(rows.page_table, rows.page_size, taking_part, positions),
        sample_indices=np.arange(count),
        decode_rows=count,
        max_query_length=1,
        max_key_length=max_key_length,
        row_slots=taking_part if rows.has_states else None,
        adapters=_adapters(rows, taking_part),
    )
    return _with_window(batch, rows, taking_part, taking_part, positions)


def _gather_mixed(rows: RowStates, forward: ForwardPass) -> HostBatch:
    decoding, chunks = forward.decode_rows, forward.chunks
    taking_part = np.concatenate([decoding, chunks.rows])
    first_positions = np.concatenate([rows.lengths[decoding] - 1, chunks.starts])
    query_lengths = np.concatenate([np.ones(decoding.size, np.int64), chunks.lengths])
    query_starts = np.concatenate([[0], np.cumsum(query_lengths)])
    # The row and the position of every token of the pass.
    token_rows = np.repeat(taking_part, query_lengths)
    positions = np.arange(query_starts[-1]) + np.repeat(first_positions - query_starts[:-1], query_lengths)
    key_lengths = first_positions + query_lengths
    max_key_length = int(key_lengths.max())
    pooled_indices, pooled_slots = _pooled_tokens(rows, chunks, query_starts[decoding.size :])
    batch = HostBatch(
        token_ids=rows.token_ids[token_rows, positions].astype(np.int64),
        positions=positions + rows.position_offsets[token_rows],
        query_starts=query_starts.astype(np.int32),
        key_lengths=key_lengths.astype(np.int32),
        page_table=_page_table(rows, taking_part, max_key_length),
        write_slots=_slots(rows.page_table, rows.page_size, token_rows, positions),
        sample_indices=_sampled_tokens(forward, query_starts),
        decode_rows=int(decoding.size),
        max_query_length=int(query_lengths.max()),
        max_key_length=max_key_length,
        pooled_indices=pooled_indices,
        pooled_slots=pooled_slots,
        row_slots=taking_part if rows.has_states else None,
        adapters=_adapters(rows, token_rows),
    )
    return _with_window(batch, rows, taking_part, token_rows, positions)


def _sampled_tokens(forward: ForwardPass, query_starts: IntArray) -> IntArray:
    """Return which of the pass's tokens are sampled after: each row's last one, and those that its draft follows."""
    samples = np.concatenate([np.ones(forward.decode_rows.size, np.bool_), forward.chunks.samples])
    last: IntArray = query_starts[1:][samples] - 1
    counts = forward.drafted + 1
    if last.size == counts.sum():
        return last
    ends = np.cumsum(counts)
    sampled: IntArray = np.arange(ends[-1]) + np.repeat(last - ends + 1, counts)
    return sampled


def _adapters(rows: RowStates, token_rows: RowIndices) -> NDArray[np.int32] | None:
    adapters = rows.adapters[token_rows]
    return adapters if (adapters != NO_ADAPTER).any() else None


def _pooled_tokens(rows: RowStates, chunks: Chunks, query_starts: IntArray) -> tuple[IntArray, IntArray]:
    """Return which of the pass's tokens are pooled, and the row of each; chunk i begins at query_starts[i]."""
    indices, slots = [NO_INDICES], [NO_INDICES]
    for i in np.flatnonzero(chunks.pools):
        row, first, last = int(chunks.rows[i]), int(query_starts[i]), int(query_starts[i + 1])
        match rows.pooling[row]:
            case Pooling.LAST:
                first = last - 1 if chunks.completes[i] else last
            case Pooling.FIRST:
                last = first + 1 if chunks.starts[i] == 0 else first
            case _:
                pass
        indices.append(np.arange(first, last))
        slots.append(np.full(last - first, row))
    return np.concatenate(indices), np.concatenate(slots)


def _page_table(rows: RowStates, taking_part: RowIndices, max_key_length: int) -> NDArray[np.int32]:
    return rows.page_table[taking_part, : -(-max_key_length // rows.page_size)]


def _slots(table: NDArray[np.int32], page_size: int, token_rows: RowIndices, positions: IntArray) -> IntArray:
    block, offset = np.divmod(positions, page_size)
    slots: IntArray = table[token_rows, block].astype(np.int64) * page_size + offset
    return slots

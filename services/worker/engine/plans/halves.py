"""Cutting a pass in two, where memory does not suffice for all of it at once."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np

from services.worker.engine.plans.passes import NO_CHUNKS, Chunks, ForwardPass

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from services.worker.engine.plans.rows import RowIndices


def halves(forward: ForwardPass) -> tuple[ForwardPass, ForwardPass] | None:
    """Return two smaller passes, to be computed in this order, or None for a pass of one token.

    Together they sample the rows of the whole in the same order. Prompts are cut first, as they take most memory.
    """
    decoding, chunks = forward.decode_rows, forward.chunks
    if chunks.lengths.sum() > 1:
        first, second = chunk_halves(chunks)
        return ForwardPass(decoding, first), ForwardPass(decoding[:0], second)
    if decoding.size > 1:
        middle = decoding.size // 2
        return ForwardPass(decoding[:middle], NO_CHUNKS), ForwardPass(decoding[middle:], chunks)
    if decoding.size and chunks.rows.size:
        return ForwardPass(decoding, NO_CHUNKS), ForwardPass(decoding[:0], chunks)
    return None


def row_halves(forward: ForwardPass) -> tuple[ForwardPass, ForwardPass] | None:
    """Return two passes with some of the rows' chunks each, all of them whole, or None for a pass of one chunk."""
    count = forward.chunks.rows.size
    if forward.decode_rows.size or count < 2:
        return None
    first, second = slice(0, count // 2), slice(count // 2, None)
    nobody = forward.decode_rows
    return ForwardPass(nobody, _part(forward.chunks, first)), ForwardPass(nobody, _part(forward.chunks, second))


def chunk_halves(chunks: Chunks) -> tuple[Chunks, Chunks]:
    """Return two parts of about equally many tokens, at least one each; one chunk may be cut.

    `chunks` has two tokens or more. The second part can be computed once the first one's KV is stored.
    """
    total = int(chunks.lengths.sum())
    ends = np.cumsum(chunks.lengths)
    middle = total // 2
    # The chunk that the middle falls into, or ends.
    cut = int(np.searchsorted(ends, middle))
    before = middle - int(ends[cut] - chunks.lengths[cut])
    first = _part(chunks, slice(0, cut + 1))
    first.lengths[-1] = before
    if before < chunks.lengths[cut]:
        first.completes[-1] = False
        second = _part(chunks, slice(cut, None))
        second.starts[0] += before
        second.lengths[0] -= before
        return first, second
    return first, _part(chunks, slice(cut + 1, None))


def without(forward: ForwardPass, rows: RowIndices) -> ForwardPass:
    """Return a pass without some rows' chunks."""
    left = ~np.isin(forward.chunks.rows, rows)
    return forward if left.all() else ForwardPass(forward.decode_rows, _part(forward.chunks, left))


def _part(chunks: Chunks, which: slice | NDArray[np.bool_]) -> Chunks:
    return Chunks(*(getattr(chunks, field.name)[which].copy() for field in fields(chunks)))

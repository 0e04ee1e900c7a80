"""Cutting a pass's prefill work in two."""

from __future__ import annotations

import numpy as np

from services.worker.engine.plans.passes import Chunks


def halves(chunks: Chunks) -> tuple[Chunks, Chunks]:
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


def _part(chunks: Chunks, which: slice) -> Chunks:
    return Chunks(
        chunks.rows[which].copy(), chunks.starts[which].copy(), chunks.lengths[which].copy(),
        chunks.completes[which].copy(),
    )  # fmt: skip

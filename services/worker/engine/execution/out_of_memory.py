"""Passes that do not fit in memory: computed in parts, and rows that do not fit alone are given up."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch

from services.worker.engine.execution.interface import OutOfMemoryError
from services.worker.engine.plans.passes import NO_CHUNKS, Chunks, ForwardPass

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from services.worker.engine.plans.rows import RowIndices


log = logging.getLogger(__name__)

T = TypeVar("T")

# Messages of libraries without an error type: torch's allocator on CPUs, the driver, and cuBLAS.
_CONSTRAINTS = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means lack of memory, on the host or a device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CONSTRAINTS)


def halves(forward: ForwardPass) -> tuple[ForwardPass, ForwardPass] | None:
    """Return two smaller passes, to be computed in this order, or None for a pass of one token.

    Together they sample the rows of the whole in the same order. Drafts are left out first (the second pass is empty
    then), and prompts are cut next, as they take most memory.
    """
    if forward.chunks.drafted.any():
        return forward.without_drafts(), ForwardPass(forward.decode_rows[:0], NO_CHUNKS)
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
    no_rows = forward.decode_rows
    return ForwardPass(no_rows, _part(forward.chunks, first)), ForwardPass(no_rows, _part(forward.chunks, second))


def chunk_halves(chunks: Chunks) -> tuple[Chunks, Chunks]:
    """Return two parts of about equally many tokens, at least one each; one chunk may be cut.

    `chunks` has two tokens or more. The second part can be computed once the first one's KV is stored.
    """
    total = int(chunks.lengths.sum())
    ends = np.cumsum(chunks.lengths)
    middle = total // 2
    # The chunk that contains the middle, or ends there.
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


@dataclass(frozen=True, slots=True)
class InParts(Generic[T]):
    """A pass that was computed in parts, in the order of its samples; `failed` rows got nothing."""

    parts: tuple[tuple[ForwardPass, T], ...]
    failed: RowIndices


def compute_in_parts(
    forward: ForwardPass,
    compute: Callable[[ForwardPass], T],
    *,
    is_shared: bool,
    cut: Callable[[ForwardPass], tuple[ForwardPass, ForwardPass] | None] = halves,
) -> InParts[T]:
    """Compute a pass at once, or if memory does not suffice in parts as small as need be.

    Args:
        forward: The pass.
        compute: Computes all or a part of it. May be called again with parts of what it has failed at, so it changes
            nothing that computing the same again would not make right.
        is_shared: Whether other ranks compute the same, or the pass advances states and cannot be repeated, or has
            images that cannot be cut. Others may have had the memory, and none knows of another's shortage before a
            collective times out: then the group starts again, with smaller steps.
        cut: Makes two smaller passes of one, or returns None where it cannot be smaller.

    Raises:
        OutOfMemoryError: memory did not suffice, and the pass is shared.
    """
    waiting, done = [forward], []
    failed: RowIndices = np.empty(0, np.int64)
    while waiting:
        # The rest of a prompt is useless without the part that failed.
        part = without(waiting.pop(), failed)
        if part.is_empty:
            continue
        result = _try(compute, part, is_shared=is_shared)
        if result is not None:
            done.append((part, result))
        elif (smaller := cut(part)) is not None:
            waiting += reversed(smaller)
        else:
            failed = np.concatenate([failed, part.decode_rows, part.chunks.rows])
            log.error("Memory does not suffice for %d tokens of row %d, which is given up", part.tokens, failed[-1])
    return InParts(tuple(done), failed)


def _try(compute: Callable[[ForwardPass], T], part: ForwardPass, *, is_shared: bool) -> T | None:
    try:
        return compute(part)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if is_shared:
            raise OutOfMemoryError(f"memory does not suffice for a step of {part.tokens} tokens: {error}") from error
    # After the except block: the error keeps the pass's allocations alive.
    log.warning("Memory does not suffice for a pass of %d tokens: it is computed in parts", part.tokens)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None

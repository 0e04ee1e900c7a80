"""What to do when memory does not suffice for a pass: compute it in parts, and give up rows that do not fit alone."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch

from services.worker.engine.execution.interface import OutOfMemoryError
from services.worker.engine.plans.halves import halves, without

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.worker.engine.plans.passes import ForwardPass
    from services.worker.engine.plans.rows import RowIndices

log = logging.getLogger(__name__)

T = TypeVar("T")

# How libraries say it that have no type for it: torch's allocator on CPUs, the driver, and the matrix library's own.
_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice, on whichever device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


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
        is_shared: Whether other ranks compute the same. They may have had the memory, and none knows of another's
            want until it waits in vain: then the group starts anew, with smaller steps.
        cut: Makes two smaller passes of one, or returns None where it cannot be smaller.

    Raises:
        OutOfMemoryError: memory did not suffice, and the pass is shared.
    """
    waiting, done = [forward], []
    failed: RowIndices = np.empty(0, np.int64)
    while waiting:
        # What follows in a prompt is worth nothing without what was to come before.
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
    # Only here: the error holds on to what the pass had allocated.
    log.warning("Memory does not suffice for a pass of %d tokens: it is computed in parts", part.tokens)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None

"""Ends that a row puts off while its grammar allows anything else: ignored ones, and all before its minimum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from common.steps import RowOpen
    from services.worker.engine.plans.rows import RowIndices, RowTable

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Row:
    """Ids that are put off while the row has fewer than `until` tokens, and those always put off."""

    early: NDArray[np.int64]
    until: int
    always: NDArray[np.int64]


class EndingTable:
    """What is put off in the rows that put anything off; only rows with grammars do."""

    def __init__(self, vocabulary_size: int) -> None:
        """Begin with no such row."""
        self._vocabulary_size = vocabulary_size
        self._rows: dict[int, _Row] = {}

    def open(self, opened: RowOpen) -> None:
        """Take note of what a row puts off; a slot forgets its last tenant's."""
        self._rows.pop(opened.row, None)
        if opened.sampling.grammar is None:
            return
        early = self._in_vocabulary(opened.stop_token_ids) if opened.min_new_tokens else _NONE
        always = self._in_vocabulary(opened.postponed_token_ids)
        if early.size or always.size:
            until = opened.prompt_tokens + opened.min_new_tokens
            self._rows[opened.row] = _Row(np.concatenate([early, always]), until, always)

    def put_off(self, masks: NDArray[np.int32], slots: RowIndices, rows: RowTable) -> None:
        """Take ends out of what rows `slots` may sample, in place, where that leaves anything.

        Args:
            masks: [slots, words] int32, as `RowMasks.masks` returns them.
            slots: [slots] the rows they belong to.
            rows: what the rows hold.
        """
        for mask, slot in zip(masks, slots.tolist(), strict=True):
            row = self._rows.get(slot)
            if row is not None:
                remaining = _without(mask, row.early if rows.lengths[slot] < row.until else row.always)
                if remaining.any():
                    mask[:] = remaining

    def _in_vocabulary(self, ids: Iterable[int]) -> NDArray[np.int64]:
        return np.array([id_ for id_ in ids if 0 <= id_ < self._vocabulary_size], np.int64)


def _without(mask: NDArray[np.int32], ids: NDArray[np.int64]) -> NDArray[np.int32]:
    words = mask.view(np.uint32).copy()
    # Unbuffered: several ids may be of one word.
    np.bitwise_and.at(words, ids >> 5, ~(np.uint32(1) << (ids & 31).astype(np.uint32)))
    return words.view(np.int32)

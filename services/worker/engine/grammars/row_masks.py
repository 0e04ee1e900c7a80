"""Grammars of the rows of a rank: which tokens each may sample next."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Protocol

import numpy as np

from services.worker.engine.grammars.matcher import mask_words

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from common.grammars import Grammar
    from common.steps import RowOpen
    from services.worker.engine.grammars.matcher import Mask
    from services.worker.engine.plans.rows import RowIndices, RowTable

log = logging.getLogger(__name__)

# What a row's mask may take of a pass, and how much more it may take over all of its output before the row has to end.
MASK_S = 0.005
OVERDRAFT_S = 1.0


class FollowsOutput(Protocol):
    """Where one output stands, as `Matcher` implements it."""

    @property
    def is_terminated(self) -> bool:
        """Whether nothing may follow."""

    def accept(self, token_id: int) -> bool:
        """Go on by a token; return whether the grammar allows it."""

    def mask(self) -> Mask:
        """Return which tokens may come next."""


class MakesMatchers(Protocol):
    """What rows need of `GrammarLibrary`."""

    def compiled(self, grammar: Grammar) -> object:
        """Begin to compile, unless that is done."""

    def matcher(self, grammar: Grammar) -> FollowsOutput:
        """Return a matcher at the start of an output; waits if the grammar is not compiled yet."""


class _Row:
    """A row's grammar, its matcher once there is one, and how many of the row's ids that has accepted."""

    def __init__(self, grammar: Grammar, prompt_tokens: int, end_ids: tuple[int, ...]) -> None:
        self.grammar = grammar
        self.accepted = prompt_tokens
        self.end_ids = end_ids
        self.matcher: FollowsOutput | None = None
        self.overdraft_s = 0.0
        self.has_failed = False


class RowMasks:
    """Follows rows by their ids, so that whatever made them (another process, before a retraction) does not matter."""

    def __init__(
        self, library: MakesMatchers, vocabulary_size: int, clock: Callable[[], float] = time.thread_time
    ) -> None:
        """Take compiled grammars from `library`; `clock` counts seconds of work."""
        self._library = library
        self._vocabulary_size = vocabulary_size
        self._clock = clock
        self._rows: dict[int, _Row] = {}

    def open(self, opened: RowOpen) -> None:
        """Take note of a row's grammar; a slot without one forgets its last tenant's."""
        grammar = opened.sampling.grammar
        if grammar is None:
            self._rows.pop(opened.row, None)
            return
        # Normally it is there. After a restart it is compiled while the row's prompt is computed.
        self._library.compiled(grammar)
        ends = tuple(id_ for id_ in opened.stop_token_ids if 0 <= id_ < self._vocabulary_size)
        self._rows[opened.row] = _Row(grammar, opened.prompt_tokens, ends)

    def masks(self, slots: RowIndices, rows: RowTable) -> NDArray[np.int32]:
        """Return which tokens rows `slots`, all with grammars, may sample next, [slots, words] int32 (see `Mask`)."""
        masks = np.empty((slots.size, mask_words(self._vocabulary_size)), np.int32)
        for index, slot in enumerate(slots.tolist()):
            row = self._rows[slot]
            started = self._clock()
            self._catch_up(row, rows.token_ids[slot, row.accepted : rows.lengths[slot]])
            masks[index] = self._mask(row)
            row.overdraft_s += max(0.0, self._clock() - started - MASK_S)
            if row.overdraft_s > OVERDRAFT_S:
                self._fail(row, "where its grammar is too ambiguous to follow")
        return masks

    def _catch_up(self, row: _Row, token_ids: NDArray[np.int32]) -> None:
        if row.matcher is None:
            row.matcher = self._library.matcher(row.grammar)
        row.accepted += token_ids.size
        for token_id in token_ids.tolist():
            if not row.has_failed and not row.matcher.is_terminated and not row.matcher.accept(token_id):
                self._fail(row, "a token that its grammar does not allow")

    def _mask(self, row: _Row) -> Mask | int:
        assert row.matcher is not None, "made when it caught up"
        if row.matcher.is_terminated and not row.has_failed:
            # On a GPU a row takes part once more after its last token; what it samples then is dropped.
            return -1
        if not row.has_failed:
            mask = row.matcher.mask()
            if mask.any():
                return mask
            self._fail(row, "nothing that its grammar would allow")
        only_ends = np.zeros(mask_words(self._vocabulary_size) * 32, np.uint8)
        only_ends[list(row.end_ids)] = 1
        return np.packbits(only_ends, bitorder="little").view(np.int32)

    def _fail(self, row: _Row, what: str) -> None:
        """Let a row end that cannot go on: the trial of its grammar has not come across that."""
        if not row.has_failed:
            log.warning("A row came to %s (%s); it ends there", what, row.grammar.param)
        row.has_failed = True

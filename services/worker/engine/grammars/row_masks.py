"""Grammars of the rows of a rank: which tokens each may sample next."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Protocol

import numpy as np

from services.worker.engine.grammars.matcher import mask_words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from common.grammars import Grammar
    from common.steps import RowOpen
    from services.worker.engine.grammars.matcher import Mask
    from services.worker.engine.plans.rows import RowIndices, RowStates

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

    def only(self) -> int | None:
        """Return the token that alone may come next, if it is one."""

    def spelling(self) -> int | None:
        """Return the token that a text goes on with which is certain, though not in which tokens."""


class MakesMatchers(Protocol):
    """A source of matchers, as `GrammarLibrary` is."""

    def begin(self, grammar: Grammar) -> None:
        """Begin to compile, unless that is done."""

    def matcher(self, grammar: Grammar) -> FollowsOutput | None:
        """Return a matcher at the start of an output; None if its grammar cannot be had in time."""


class _Row:
    """A row's grammar, its matcher once there is one, and how many of the row's ids that has accepted."""

    def __init__(self, opened: RowOpen, grammar: Grammar, end_ids: tuple[int, ...]) -> None:
        self.grammar = grammar
        self.accepted = self.start = opened.prompt_tokens
        self.end_ids = end_ids
        # With banned sequences, a text that is certain may have to be spelled in other tokens.
        self.spells_alike = not opened.sampling.banned_sequences
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
        # Normally it is there. One that was dropped meanwhile is compiled while the row's prompt is computed.
        self._library.begin(grammar)
        ends = tuple(id_ for id_ in opened.stop_token_ids if 0 <= id_ < self._vocabulary_size)
        self._rows[opened.row] = _Row(opened, grammar, ends)

    def masks(self, slots: RowIndices, rows: RowStates) -> NDArray[np.int32]:
        """Return which tokens rows `slots`, all with grammars, may sample next, [slots, words] int32 (see `Mask`)."""
        masks = np.empty((slots.size, mask_words(self._vocabulary_size)), np.int32)
        for index, slot in enumerate(slots.tolist()):
            row = self._rows[slot]
            started = self._clock()
            if row.accepted > rows.lengths[slot]:
                # A pass that ran out of memory after it had accepted tokens of a draft is computed again.
                row.matcher, row.accepted = None, row.start
            self._catch_up(row, rows.token_ids[slot, row.accepted : rows.lengths[slot]].tolist())
            masks[index] = self._mask(row)
            self._charge(row, self._clock() - started, masks=1)
        return masks

    def forced(self, slot: int, sampled: int, room: int, rows: RowStates) -> list[int]:
        """Return the ids that must follow the token that row `slot` has just sampled, up to `room` ids or its end.

        They are what it would sample, one after the other, as its masks leave nothing else.
        """
        row, length = self._rows[slot], int(rows.lengths[slot])
        found = [sampled]
        started = self._clock()
        self._catch_up(row, found)
        while len(found) <= room and not rows.ends_with(slot, length + len(found) - 1, found[-1]):
            only = self._only(row)
            if only is None:
                break
            found.append(only)
            self._catch_up(row, [only])
        self._charge(row, self._clock() - started, masks=len(found))
        return found[1:]

    def _charge(self, row: _Row, seconds: float, masks: int) -> None:
        row.overdraft_s += max(0.0, seconds - masks * MASK_S)
        if row.overdraft_s > OVERDRAFT_S:
            self._fail(row, "where its grammar is too ambiguous to follow")

    def _catch_up(self, row: _Row, token_ids: Sequence[int]) -> None:
        if row.matcher is None and not row.has_failed:
            row.matcher = self._library.matcher(row.grammar)
            if row.matcher is None:
                self._fail(row, "its start without its compiled grammar")
        row.accepted += len(token_ids)
        for token_id in token_ids:
            if row.matcher is None or row.has_failed:
                return
            if not row.matcher.is_terminated and not row.matcher.accept(token_id):
                self._fail(row, "a token that its grammar does not allow")

    def _mask(self, row: _Row) -> Mask | int:
        if not row.has_failed:
            assert row.matcher is not None, "made when it caught up"
            if row.matcher.is_terminated:
                # On a GPU a row takes part once more after its last token; what it samples then is dropped.
                return -1
            only = self._only(row)
            mask = row.matcher.mask() if only is None else self._mask_of(only)
            if mask.any():
                return mask
            self._fail(row, "nothing that its grammar would allow")
        return self._mask_of(*row.end_ids)

    def _only(self, row: _Row) -> int | None:
        """Return the token that alone may come next, or that must as there is one way to write what is certain."""
        if row.has_failed:
            return None
        assert row.matcher is not None, "made when it caught up"
        if row.matcher.is_terminated:
            return None
        only = row.matcher.only()
        if only is None and row.spells_alike:
            only = row.matcher.spelling()
            if only in row.end_ids:
                # Another spelling does not end the row.
                return None
        return only

    def _mask_of(self, *token_ids: int) -> Mask:
        mask = np.zeros(mask_words(self._vocabulary_size), np.uint32)
        for token_id in token_ids:
            mask[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        return mask.view(np.int32)

    def _fail(self, row: _Row, what: str) -> None:
        """Let a row end that cannot go on: the trial of its grammar has not come across that."""
        if not row.has_failed:
            log.warning("A row came to %s (%s); it ends there", what, row.grammar.param)
        row.has_failed = True

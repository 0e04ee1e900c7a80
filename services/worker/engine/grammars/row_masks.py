"""Grammars of the rows of a rank: which tokens each may sample next."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from services.worker.engine.grammars.matcher import mask_words, only_token
from services.worker.engine.grammars.spellings import MAX_SPELLINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from common.grammars import Grammar
    from common.steps import RowOpen
    from services.worker.engine.grammars.matcher import Mask
    from services.worker.engine.plans.rows import RowIndices, RowStates

log = logging.getLogger(__name__)

# What a row's mask may take of a pass, and how much more it may take over all of its output before the row has to end.
MASK_S = 0.005
OVERDRAFT_S = 1.0
# What a mask takes of a thread at most for grammars that are computed together.
USUAL_S = 0.0002


class FollowsOutput(Protocol):
    """Where one output stands, as `Matcher` implements it."""

    @property
    def is_terminated(self) -> bool:
        """Whether nothing may follow."""

    def accept(self, token_id: int) -> bool:
        """Go on by a token; return whether the grammar allows it."""

    def mask(self) -> Mask:
        """Return which tokens may come next."""

    def spelling(self, mask: Mask) -> int | None:
        """Return the token of `mask` that a text goes on with which is certain, though not in which tokens."""


class MakesMatchers(Protocol):
    """A source of matchers, as `GrammarLibrary` is."""

    def begin(self, grammar: Grammar) -> None:
        """Begin to compile, unless that is done."""

    def matcher(self, grammar: Grammar) -> FollowsOutput | None:
        """Return a matcher at the start of an output; None if its grammar cannot be had in time."""

    @property
    def threads(self) -> int:
        """How many compute the masks of several outputs."""

    def fill(self, matchers: Sequence[Any], masks: NDArray[np.int32], lines: Sequence[int]) -> None:
        """Write the masks of several of its matchers into their lines of `masks`, [rows, words] int32."""


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
        # Whether its masks are computed apart from the others', as it may be the one that takes long.
        self.is_apart = False
        self.has_failed = False

    @property
    def may_end_only(self) -> bool:
        """Whether no mask says what comes next: it has failed, or its output is complete."""
        return self.has_failed or (self.matcher is not None and self.matcher.is_terminated)


class RowMasks:
    """Follows rows by their ids, so that whatever made them (another process, before a retraction) does not matter."""

    def __init__(
        self,
        library: MakesMatchers,
        vocabulary_size: int,
        clock: Callable[[], float] = time.thread_time,
        wall: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take compiled grammars from `library`; `clock` counts seconds of this thread's work, `wall` all seconds."""
        self._library = library
        self._vocabulary_size = vocabulary_size
        self._clock = clock
        self._wall = wall
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
        together: dict[int, _Row] = {}
        for line, slot in enumerate(slots.tolist()):
            row = self._rows[slot]
            started = self._clock()
            if row.accepted > rows.lengths[slot]:
                # A pass that ran out of memory after it had accepted tokens of a draft is computed again.
                row.matcher, row.accepted = None, row.start
            self._catch_up(row, rows.token_ids[slot, row.accepted : rows.lengths[slot]].tolist())
            if row.is_apart or row.may_end_only:
                self._fill_one(row, masks[line])
            else:
                together[line] = row
            self._charge(row, self._clock() - started, masks=1)
        if together:
            self._fill(together, masks)
        return masks

    def _fill(self, rows: dict[int, _Row], masks: NDArray[np.int32]) -> None:
        """Compute the masks of several rows at once, each into its line; if that takes long, see whose time it was."""
        started = self._wall()
        self._library.fill([row.matcher for row in rows.values()], masks, list(rows))
        if self._wall() - started > MASK_S + len(rows) * USUAL_S / self._library.threads:
            self._find_slow(rows.values())
        words = np.count_nonzero(masks, axis=1)
        for line, row in rows.items():
            if words[line] <= MAX_SPELLINGS:
                self._narrow(row, masks[line])

    def _find_slow(self, rows: Iterable[_Row]) -> None:
        """Compute masks once more, one by one, charge each row for its own, and keep the slow ones apart.

        At once, not in the next pass: a row could take long in every other pass only, and never be charged for it.
        """
        for row in rows:
            started = self._clock()
            self._matcher_of(row).mask()
            row.is_apart = True
            self._charge(row, self._clock() - started, masks=1)

    def forced(self, slot: int, sampled: int, room: int, rows: RowStates) -> list[int]:
        """Return the ids that must follow the token that row `slot` has just sampled, up to `room` ids or its end.

        They are what it would sample, one after the other, as its masks leave nothing else.
        """
        row, length = self._rows[slot], int(rows.lengths[slot])
        found = [sampled]
        started = self._clock()
        self._catch_up(row, found)
        while len(found) <= room and not rows.ends_with(slot, length + len(found) - 1, found[-1]):
            only = None if row.may_end_only else self._only(row, self._matcher_of(row).mask())
            if only is None:
                break
            found.append(only)
            self._catch_up(row, [only])
        self._charge(row, self._clock() - started, masks=len(found))
        return found[1:]

    def _charge(self, row: _Row, seconds: float, masks: int) -> None:
        row.overdraft_s += max(0.0, seconds - masks * MASK_S)
        if seconds < USUAL_S * masks:
            row.is_apart = False
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

    def _fill_one(self, row: _Row, mask: Mask) -> None:
        """Write a row's mask into `mask`, whatever is known of the row."""
        if row.has_failed:
            _allow(mask, row.end_ids)
        elif row.may_end_only:
            # On a GPU a row takes part once more after its last token; what it samples then is dropped.
            mask[:] = -1
        else:
            mask[:] = self._matcher_of(row).mask()
            self._narrow(row, mask)

    def _narrow(self, row: _Row, mask: Mask) -> None:
        """Remove the tokens among which a row is not to choose from its mask; without any, it has to end."""
        only = self._only(row, mask)
        if only is not None:
            _allow(mask, (only,))
        elif not mask.any():
            self._fail(row, "nothing that its grammar would allow")
            _allow(mask, row.end_ids)

    def _only(self, row: _Row, mask: Mask) -> int | None:
        """Return the token that alone may come next, or that must as there is one way to write what is certain."""
        only = only_token(mask)
        if only is None and row.spells_alike:
            only = self._matcher_of(row).spelling(mask)
            if only in row.end_ids:
                # Another spelling does not end the row.
                return None
        return only

    def _matcher_of(self, row: _Row) -> FollowsOutput:
        assert row.matcher is not None, "made when it caught up"
        return row.matcher

    def _fail(self, row: _Row, what: str) -> None:
        """Let a row end that cannot go on: the trial of its grammar has not come across that."""
        if not row.has_failed:
            log.warning("A row came to %s (%s); it ends there", what, row.grammar.param)
        row.has_failed = True


def _allow(mask: Mask, token_ids: Iterable[int]) -> None:
    """Let a mask allow these tokens and no others."""
    bits = mask.view(np.uint32)
    bits[:] = 0
    for token_id in token_ids:
        bits[token_id >> 5] |= np.uint32(1 << (token_id & 31))

"""Verifying drafts: a row samples after each token of its draft, for as long as the draft is what it has sampled.

Every token is chosen as it would be in a pass of its own: by the row's seed, the token's position and the row's ids up
to there. So drafts change the number of passes and never the tokens.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

import numpy as np

from services.worker.engine.plans.rows import NOTHING_FOLLOWS, FollowingTokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from common.types import RowSlot, TokenIds, TokenLogprob
    from services.worker.engine.plans.passes import ForwardPass, IntArray
    from services.worker.engine.plans.rows import RowIndices, RowStates

# Padding in place of a token.
NO_TOKEN = -1
RowLogprobs = tuple[tuple["RowSlot", "TokenLogprob"], ...]


class ChoosesTokens(Protocol):
    """Samples the next token of rows."""

    def __call__(self, samples: IntArray, slots: RowIndices) -> tuple[TokenIds, RowLogprobs]:
        """Return the next token of each of `slots`, from the pass's samples of these indices, and log probabilities."""


def verify(forward: ForwardPass, rows: RowStates, choose: ChoosesTokens) -> tuple[IntArray, RowLogprobs]:
    """Choose the tokens of a pass.

    Args:
        forward: The pass, some of whose rows have drafts.
        rows: What rows know. Lengths are advanced while tokens are chosen, and are the same afterwards as before.
        choose: Chooses the next token of some rows.

    Returns:
        [sampled rows, 1 + longest draft] int64: each row's tokens, padded with NO_TOKEN; and their log probabilities.
    """
    slots, drafted = forward.sampled_rows, forward.drafted
    first = np.cumsum(drafted + 1) - drafted - 1
    tokens = np.full((slots.size, 1 + int(drafted.max(initial=0))), NO_TOKEN, np.int64)
    logprobs: list[tuple[RowSlot, TokenLogprob]] = []
    active, lengths = np.arange(slots.size), rows.lengths[slots].copy()
    try:
        for number in range(tokens.shape[1]):
            of = slots[active]
            chosen, reported = choose(first[active] + number, of)
            tokens[active, number] = chosen
            logprobs += reported
            # Beyond a draft's end, this compares with ids that mean nothing, which the first condition excludes.
            guessed = rows.token_ids[of, np.minimum(rows.lengths[of], rows.max_context - 1)]
            goes_on = (number < drafted[active]) & (guessed == chosen) & ~rows.stopping(of, chosen)
            active = active[goes_on]
            if not active.size:
                break
            rows.lengths[slots[active]] += 1
    finally:
        rows.lengths[slots] = lengths
    return tokens, tuple(logprobs)


@contextlib.contextmanager
def as_accepted(rows: RowStates, slots: RowIndices, accepted: IntArray) -> Iterator[None]:
    """Extend rows `slots` by `accepted` tokens of their drafts, [slots], within the context."""
    rows.lengths[slots] += accepted
    try:
        yield
    finally:
        rows.lengths[slots] -= accepted


def split_tokens(tokens: NDArray[np.int32], slots: RowIndices) -> tuple[TokenIds, FollowingTokens]:
    """Return the first token of each row, and those after it, from an array like that of `verify`."""
    return tokens[:, 0], following_of(tokens[:, 1:], slots)


def join_tokens(
    first: TokenIds, accepted: FollowingTokens, slots: RowIndices, shape: tuple[int, int]
) -> NDArray[np.int64]:
    """Return an array of `shape` from which `split_tokens` reads the tokens of rows `slots`, padded with NO_TOKEN."""
    tokens = np.full(shape, NO_TOKEN, np.int64)
    tokens[: slots.size, 0] = first
    for row, token_ids in accepted.by_row():
        tokens[np.flatnonzero(slots == row)[0], 1 : 1 + token_ids.size] = token_ids
    return tokens


def following_of(tokens: NDArray[np.int32], slots: RowIndices) -> FollowingTokens:
    """Return the tokens of rows `slots`, [slots, most] padded with NO_TOKEN."""
    which, _ = there = np.nonzero(tokens != NO_TOKEN)
    return FollowingTokens(slots[which], tokens[there]) if which.size else NOTHING_FOLLOWS

"""Sources of drafts: the request's prediction, the row's own tokens, and what its view holds in the cache.

A draft never changes which tokens are sampled, only how many in a pass. A row is offered nothing but its own tokens and
what a request of its view may read from the cache, as otherwise acceptance would show what others have asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from common.types import CacheMode
from services.scheduler.cache.keys import plain_ids, text_tokens

if TYPE_CHECKING:
    from common.types import RowSlot, TokenIds
    from services.scheduler.cache.interface import PrefixCache
    from services.scheduler.core.rows import RowSlots
    from services.scheduler.core.sequence import Sequence

# Shortest and longest repetition, in tokens, that is looked for.
LEAST_MATCH = 2
MOST_MATCH = 32
# Number of the latest tokens of a row that are searched.
SEARCHED_TOKENS = 32_768


class Origin(IntEnum):
    """Where a draft comes from; drafts of one origin are about equally likely to be right."""

    # Repetitions within the row, by their length.
    SHORT_MATCH = 0
    MEDIUM_MATCH = 1
    LONG_MATCH = 2
    # The tokens after the same prefix in the cache.
    CACHE = 3
    # What follows the row's last output tokens in the text that the request predicts.
    PREDICTION = 4


# Lengths from which on a repetition is a medium and a long one.
MEDIUM_MATCH, LONG_MATCH = 4, 8


@dataclass(frozen=True, slots=True)
class Guess:
    """Guess of a row's next tokens, [tokens] int32, of which the first ones may be used."""

    token_ids: TokenIds
    origin: Origin


class DraftSources:
    """Guesses the next tokens of rows."""

    def __init__(self, rows: RowSlots, cache: PrefixCache) -> None:
        """Read `rows` and `cache`; neither is changed."""
        self._rows = rows
        self._cache = cache

    def guess(self, row: RowSlot, most: int) -> Guess | None:
        """Return up to `most` tokens that may come next in a row, from the source that is most likely right."""
        sequence = self._rows.sequences[row]
        assert sequence is not None, "only running rows have drafts"
        known = self._rows.tokens(row)
        return (
            self._from_prediction(sequence, known, most)
            or _text_of(self._from_cache(sequence, known, most))
            or _text_of(repetition(known, most))
        )

    def _from_prediction(self, sequence: Sequence, known: TokenIds, most: int) -> Guess | None:
        predicted, output = sequence.request.prediction_ids, known[sequence.prompt_tokens :]
        if not predicted or not output.size:
            return None
        ids = np.array(predicted, np.int32)
        end, length = find_end(ids, output)
        # At the beginning, a single token is all that there is to go by.
        if length < min(LEAST_MATCH, output.size) or end == ids.size:
            return None
        return Guess(ids[end : end + most], Origin.PREDICTION)

    def _from_cache(self, sequence: Sequence, known: TokenIds, most: int) -> Guess | None:
        if sequence.request.options.cache_mode is CacheMode.NONE:
            return None
        found = self._cache.continuation(sequence.request.view, sequence.key_of(known), most)
        return Guess(plain_ids(found.tobytes()), Origin.CACHE) if found.size else None


def _text_of(guess: Guess | None) -> Guess | None:
    """Return the part of a guess before its first image; None: there is none."""
    if guess is None:
        return None
    ids = guess.token_ids[: text_tokens(guess.token_ids)]
    return Guess(ids, guess.origin) if ids.size else None


def repetition(known: TokenIds, most: int) -> Guess | None:
    """Return the tokens after the longest and latest earlier occurrence of the end of `known`: prompt lookup.

    `known` is [tokens] int32.
    """
    known = known[-SEARCHED_TOKENS:]
    end, length = find_end(known[:-1], known)
    if length < LEAST_MATCH:
        return None
    # A text that repeats itself up to its end goes on doing so.
    origin = Origin((length >= MEDIUM_MATCH) + (length >= LONG_MATCH))
    return Guess(np.resize(known[end:], most), origin)


def find_end(searched: TokenIds, known: TokenIds) -> tuple[int, int]:
    """Find the latest of the longest runs in `searched` that equal the end of `known`, up to MOST_MATCH tokens.

    Returns:
        The position after the run in `searched`, and the run's length.
    """
    last = known.size - 1
    if last < 0:
        return 0, 0
    places = np.flatnonzero(searched == known[last])
    if not places.size:
        return 0, 0
    length = 1
    while length < min(MOST_MATCH, known.size):
        longer = places[(places >= length) & (searched[places - length] == known[last - length])]
        if not longer.size:
            break
        places = longer
        length += 1
    return int(places[-1]) + 1, length

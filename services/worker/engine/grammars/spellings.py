"""The tokens in which a text can begin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

# A text has no more beginnings than that which are tokens.
MAX_SPELLINGS = 64


class Spellings:
    """A vocabulary's tokens by their bytes."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """Take the bytes of each token."""
        self._first: dict[bytes, int] = {}
        # Further tokens of equal bytes.
        self._others: dict[bytes, list[int]] = {}
        for id_, piece in enumerate(pieces):
            if self._first.setdefault(piece, id_) != id_:
                self._others.setdefault(piece, []).append(id_)
        self._longest = max(map(len, self._first), default=0)

    def longest(self, text: bytes, mask: NDArray[np.int32]) -> int | None:
        """Return the longest token of a `Matcher`'s mask that begins a text, the first of equal ones.

        None if a token of `mask` does not begin the text, or if there is none.
        """
        bits = mask.view(np.uint32)
        beginnings, longest = 0, None
        for ids in self._beginnings(text):
            allowed = [id_ for id_ in ids if int(bits[id_ >> 5]) >> (id_ & 31) & 1]
            beginnings += len(allowed)
            longest = allowed[0] if allowed else longest
        if not 0 < beginnings <= MAX_SPELLINGS or beginnings < np.bitwise_count(bits).sum():
            return None
        return longest

    def _beginnings(self, text: bytes) -> Iterator[list[int]]:
        """Yield the tokens that a text begins with, shorter ones first, those of equal bytes together."""
        for length in range(min(len(text), self._longest) + 1):
            piece = text[:length]
            first = self._first.get(piece)
            if first is not None:
                yield [first, *self._others.get(piece, ())]

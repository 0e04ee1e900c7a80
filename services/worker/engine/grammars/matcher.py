"""Where one output stands in its grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import xgrammar

# [ceil(vocabulary / 32)] int32: bit i of word w says whether token 32 w + i may come next.
Mask = NDArray[np.int32]


def mask_words(vocabulary_size: int) -> int:
    """Return the length of a mask."""
    return -(-vocabulary_size // 32)


class Matcher:
    """Follows an output token by token. End-of-sequence tokens are allowed once the grammar is complete."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocabulary_size: int) -> None:
        """Start before the first token."""
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._mask: Mask = np.zeros((1, mask_words(vocabulary_size)), np.int32)
        # The last word's bits that are tokens: the library sets others, too.
        self._last_bits = np.uint32(0xFFFFFFFF) >> np.uint32(-vocabulary_size % 32)

    @property
    def is_terminated(self) -> bool:
        """Whether the end of the sequence was accepted: nothing may follow."""
        return bool(self._matcher.is_terminated())

    def accept(self, token_id: int) -> bool:
        """Go on by a token; return whether the grammar allows it. If not, nothing has changed."""
        return bool(self._matcher.accept_token(token_id))

    def mask(self) -> Mask:
        """Return which tokens may come next; valid until the next call. Not to be asked once terminated."""
        if not self._matcher.fill_next_token_bitmask(self._mask, 0):
            self._mask.fill(-1)
        self._mask.view(np.uint32)[0, -1] &= self._last_bits
        first: Mask = self._mask[0]
        return first

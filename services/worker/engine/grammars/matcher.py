"""Where one output stands in its grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xgrammar

# A text has no more beginnings than that which are tokens.
MAX_SPELLINGS = 64
# [ceil(vocabulary / 32)] int32: bit i of word w says whether token 32 w + i may come next.
Mask = NDArray[np.int32]


def mask_words(vocabulary_size: int) -> int:
    """Return the length of a mask."""
    return -(-vocabulary_size // 32)


class Matcher:
    """Follows an output token by token. End-of-sequence tokens are allowed once the grammar is complete."""

    def __init__(
        self, compiled: xgrammar.CompiledGrammar, vocabulary_size: int, pieces: Sequence[bytes] | None = None
    ) -> None:
        """Start before the first token. `pieces` are the bytes of each token; without, no spelling is known."""
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._pieces = pieces
        self._mask: Mask = np.zeros((1, mask_words(vocabulary_size)), np.int32)
        # Whether `_mask` is of where the output stands.
        self._is_current = False
        # The last word's bits that are tokens: the library sets others, too.
        self._last_bits = np.uint32(0xFFFFFFFF) >> np.uint32(-vocabulary_size % 32)

    @property
    def is_terminated(self) -> bool:
        """Whether the end of the sequence was accepted: nothing may follow."""
        return bool(self._matcher.is_terminated())

    def accept(self, token_id: int) -> bool:
        """Go on by a token; return whether the grammar allows it. If not, nothing has changed."""
        self._is_current = False
        return bool(self._matcher.accept_token(token_id))

    def mask(self) -> Mask:
        """Return which tokens may come next; valid until the next call. Not to be asked once terminated."""
        if not self._is_current:
            if not self._matcher.fill_next_token_bitmask(self._mask, 0):
                self._mask.fill(-1)
            self._mask.view(np.uint32)[0, -1] &= self._last_bits
            self._is_current = True
        first: Mask = self._mask[0]
        return first

    def only(self) -> int | None:
        """Return the token that alone may come next; None where there are several, or none."""
        allowed = self._few_allowed()
        return allowed[0] if len(allowed) == 1 else None

    def spelling(self) -> int | None:
        """Return the longest token that may come next, where it is certain what follows, but not in which tokens.

        That is so where each token that may come next begins the text that must follow, and none goes on beyond it. Of
        several equal tokens it is the first.
        """
        allowed = self._few_allowed()
        if self._pieces is None or not allowed:
            return None
        pieces, text = [self._pieces[id_] for id_ in allowed], self._certain_text()
        if not text or not all(text.startswith(piece) for piece in pieces):
            return None
        return max(zip(allowed, pieces, strict=True), key=lambda pair: len(pair[1]))[0]

    def _few_allowed(self) -> list[int]:
        """Return the tokens that may come next, in order; none if they are more than a text has beginnings."""
        mask = self.mask()
        words = np.flatnonzero(mask)
        if words.size > MAX_SPELLINGS:
            return []
        bits = np.flatnonzero(np.unpackbits(mask[words].view(np.uint8), bitorder="little"))
        return [] if bits.size > MAX_SPELLINGS else (words[bits >> 5] * 32 + (bits & 31)).tolist()

    def _certain_text(self) -> bytes:
        try:
            return str(self._matcher.find_jump_forward_string()).encode()
        except UnicodeDecodeError:
            # It begins or ends within a character.
            return b""

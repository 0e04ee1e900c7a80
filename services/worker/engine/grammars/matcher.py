"""Where one output stands in its grammar, and the masks of several outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xgrammar

    from services.worker.engine.grammars.spellings import Spellings

# [ceil(vocabulary / 32)] int32: bit i of word w says whether token 32 w + i may come next.
Mask = NDArray[np.int32]


def mask_words(vocabulary_size: int) -> int:
    """Return the length of a mask."""
    return -(-vocabulary_size // 32)


def only_token(mask: Mask) -> int | None:
    """Return the token that alone may come next; None where there are several, or none."""
    words = np.flatnonzero(mask)
    if words.size != 1:
        return None
    bits = int(mask.view(np.uint32)[words[0]])
    return None if bits & (bits - 1) else int(words[0]) * 32 + bits.bit_length() - 1


class Matcher:
    """Follows an output token by token. End-of-sequence tokens are allowed once the grammar is complete."""

    def __init__(
        self, compiled: xgrammar.CompiledGrammar, vocabulary_size: int, spellings: Spellings | None = None
    ) -> None:
        """Start before the first token. `spellings` are those of the vocabulary; without, no spelling is known."""
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._spellings = spellings
        self._vocabulary_size = vocabulary_size

    @property
    def is_terminated(self) -> bool:
        """Whether the end of the sequence was accepted: nothing may follow."""
        return bool(self._matcher.is_terminated())

    def accept(self, token_id: int) -> bool:
        """Go on by a token; return whether the grammar allows it. If not, nothing has changed."""
        return bool(self._matcher.accept_token(token_id))

    def mask(self) -> Mask:
        """Return which tokens may come next. Not to be asked once terminated."""
        masks = np.empty((1, mask_words(self._vocabulary_size)), np.int32)
        self._matcher.fill_next_token_bitmask(masks, 0)
        _clear_rest(masks, self._vocabulary_size)
        first: Mask = masks[0]
        return first

    def spelling(self, mask: Mask) -> int | None:
        """Return the longest token that may come next, where it is certain what follows, but not in which tokens.

        That is so where each token that may come next, all of which are in `mask`, begins the text that must follow,
        and none goes on beyond it. Of several equal tokens it is the first.
        """
        if self._spellings is None or not (text := self._certain_text()):
            return None
        return self._spellings.longest(text, mask)

    def _certain_text(self) -> bytes:
        try:
            return str(self._matcher.find_jump_forward_string()).encode()
        except UnicodeDecodeError:
            # It begins or ends within a character.
            return b""


class MaskFiller:
    """Computes the masks of several outputs in threads, which the interpreter's lock does not hold up."""

    def __init__(self, threads: int) -> None:
        """Use up to `threads` threads."""
        import xgrammar

        self._batch = xgrammar.BatchGrammarMatcher(max_threads=threads)

    def fill(self, matchers: Sequence[Matcher], masks: NDArray[np.int32], lines: Sequence[int]) -> None:
        """Write which tokens may come next in each of `matchers`, none terminated, into its line.

        Args:
            matchers: of one vocabulary.
            masks: [rows, words] int32, filled in place.
            lines: [matchers] the line of each.
        """
        self._batch.batch_fill_next_token_bitmask([each._matcher for each in matchers], masks, list(lines))
        _clear_rest(masks, matchers[0]._vocabulary_size)


def _clear_rest(masks: NDArray[np.int32], vocabulary_size: int) -> None:
    """Clear the last word's bits that are no tokens, which the library sets, too."""
    masks.view(np.uint32)[:, -1] &= np.uint32(0xFFFFFFFF) >> np.uint32(-vocabulary_size % 32)

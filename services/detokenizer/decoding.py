"""Ids to text, one token at a time: what comes out is final, and never ends in half a character."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from common.tokenization.vocabulary import Pieces

# Tokens after which a text that still ends in half a character is taken as it is: no character is longer.
_PATIENCE: Final = 8
# Tokens before the undecided ones that are decoded along, because some decoders look at a token's neighbours.
_CONTEXT: Final = 4
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    """The text of one growing sequence of ids."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became certain."""

    def flush(self) -> str:
        """Return what was held back; nothing may be pushed afterwards."""


class ByteDecoder:
    """Decoder for vocabularies whose texts are the concatenation of their tokens' bytes.

    Bytes that are no UTF-8 become U+FFFD, one for each maximal part of a character (Unicode 15, section 3.9, and the
    practice of Python and Rust alike), as soon as it is certain that they are none.
    """

    __slots__ = ("_data", "_pending", "_texts")

    def __init__(self, pieces: Pieces) -> None:
        """Begin an empty text."""
        self._data = pieces.data
        self._texts = pieces.texts
        # The start of a character, at most three bytes.
        self._pending = b""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became certain."""
        if token_id >= len(self._data):
            return ""
        if not self._pending:
            text = self._texts[token_id]
            if text is not None:
                return text
        data = self._pending + self._data[token_id]
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        """Return what was held back: at most one U+FFFD."""
        text, _ = codecs.utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text


class WindowDecoder:
    """Decoder for all others: decodes the last few tokens again with each new one and takes what is more.

    The window has a fixed size, so that the cost stays linear in the length of the text.
    """

    __slots__ = ("_context", "_pending", "_skip_special_tokens", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        """Begin an empty text."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became certain."""
        self._pending.append(token_id)
        text = self._undecided()
        if (not text or text.endswith(_REPLACEMENT)) and len(self._pending) < _PATIENCE:
            return ""
        self._settle()
        return text

    def flush(self) -> str:
        """Return what was held back."""
        text = self._undecided()
        self._settle()
        return text

    def _undecided(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]

    def _settle(self) -> None:
        self._context = (self._context + self._pending)[-_CONTEXT:]
        self._pending = []

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

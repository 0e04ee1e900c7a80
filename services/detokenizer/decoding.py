"""Incremental decoding of ids to text: the output is final and never ends within a character."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Final, Protocol

from common.tokenization.vocabulary import is_bytewise, read_vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from common.tokenization import TextModel
    from common.tokenization.vocabulary import Pieces

# Tokens after which a text that still ends within a character is output as it is: no character is longer.
_PATIENCE: Final = 8
# Number of earlier tokens that are decoded again together with the pending ones, as some decoders depend on context.
_CONTEXT: Final = 4
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class IncrementalDecoder(Protocol):
    """An incremental decoder for one sequence of ids."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became final."""

    def flush(self) -> str:
        """Return the text that was held back; nothing may be pushed afterwards."""


class ByteDecoder:
    """Decoder for vocabularies whose texts are the concatenation of their tokens' bytes.

    Invalid UTF-8 becomes U+FFFD, one for each maximal subpart of a character (Unicode 15, section 3.9; as in Python and
    Rust), as soon as it cannot become valid any more.
    """

    __slots__ = ("_data", "_pending", "_texts")

    def __init__(self, pieces: Pieces) -> None:
        self._data = pieces.data
        self._texts = pieces.texts
        # The beginning of a character, at most three bytes.
        self._pending = b""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became final."""
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
        """Return the text that was held back: at most one U+FFFD."""
        text, _ = codecs.utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text


class WindowDecoder:
    """Decoder for all other vocabularies: decodes each new token together with the last few and outputs the difference.

    The window has a fixed size, so that the cost is linear in the length of the text.
    """

    __slots__ = ("_context", "_pending", "_skip_special_tokens", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became final."""
        self._pending.append(token_id)
        text = self._undecided()
        if (not text or text.endswith(_REPLACEMENT)) and len(self._pending) < _PATIENCE:
            return ""
        self._settle()
        return text

    def flush(self) -> str:
        """Return the text that was held back."""
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


class DecoderFactory:
    """Creates decoders that suit a model's vocabulary; its tables are built once for all choices."""

    def __init__(self, model: TextModel) -> None:
        self._tokenizer = model.tokenizer
        self._vocabulary = read_vocabulary(model.tokenizer, model.vocabulary_size)
        self._is_bytewise = is_bytewise(model.tokenizer)

    def make(self, *, skip_special_tokens: bool) -> IncrementalDecoder:
        """Return a decoder for a new sequence."""
        if self._is_bytewise:
            return ByteDecoder(self._vocabulary.pieces(skip_special_tokens=skip_special_tokens))
        return WindowDecoder(self._tokenizer, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, special ones included."""
        return self._vocabulary.token_bytes(token_id)

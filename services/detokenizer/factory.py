"""Creation of decoders for one model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.tokenization.vocabulary import is_bytewise, read_vocabulary
from services.detokenizer.decoding import ByteDecoder, IncrementalDecoder, WindowDecoder

if TYPE_CHECKING:
    from common.tokenization import TextModel


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

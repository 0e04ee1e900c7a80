"""Makes decoders for one model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.tokenization.vocabulary import is_bytewise, read_vocabulary
from services.detokenizer.decoding import ByteDecoder, Decoder, WindowDecoder

if TYPE_CHECKING:
    from common.tokenization import TextModel


class DecoderFactory:
    """The vocabulary of a model, and the decoders that fit it."""

    def __init__(self, model: TextModel) -> None:
        """Build the tables, once for all choices."""
        self._tokenizer = model.tokenizer
        self._vocabulary = read_vocabulary(model.tokenizer, model.vocabulary_size)
        self._is_bytewise = is_bytewise(model.tokenizer)

    def make(self, *, skip_special_tokens: bool) -> Decoder:
        """Return a decoder for a text that begins."""
        if self._is_bytewise:
            return ByteDecoder(self._vocabulary.pieces(skip_special_tokens=skip_special_tokens))
        return WindowDecoder(self._tokenizer, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, also of a special one."""
        return self._vocabulary.token_bytes(token_id)

"""Conversion of token ids to text, and of positions in the text back to token indices."""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import TYPE_CHECKING, Protocol

import numpy as np

from common.tokenization.vocabulary import is_bytewise, read_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.tokenization import TextModel
    from common.types import TokenIds

_LONE_BYTES = re.compile("[\udc80-\udcff]")


class Transcript(Protocol):
    """A prompt as text."""

    @property
    def text(self) -> str:
        """The text for detectors; U+FFFD replaces each byte that is part of no character."""

    def token_of(self, start: int) -> int:
        """Return the index of the token in which a character begins."""


class Transcriber:
    """Creates transcripts for one model."""

    def __init__(self, model: TextModel) -> None:
        """Build the table of each id's bytes."""
        self._tokenizer = model.tokenizer
        self._data = read_vocabulary(model.tokenizer, model.vocabulary_size).all_pieces.data
        self._is_bytewise = is_bytewise(model.tokenizer)

    def readable_tokens(self, token_ids: TokenIds) -> int:
        """Return the number of leading ids that represent text, as unreadable ids cannot be judged."""
        for index, token in enumerate(token_ids.tolist()):
            if not 0 <= token < len(self._data) or not self._data[token]:
                return index
        return len(token_ids)

    def transcribe(self, token_ids: TokenIds) -> Transcript:
        """Return the text of ids that are all readable, with special tokens spelled out."""
        ids = token_ids.tolist()
        if self._is_bytewise:
            return ByteTranscript([self._data[token] for token in ids])
        return DecodedTranscript(len(ids), lambda end: self._tokenizer.decode(ids[:end], skip_special_tokens=False))


class ByteTranscript:
    """A text that is the concatenation of its tokens' bytes."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """Join `pieces`, one per token."""
        self._ends = np.cumsum([len(piece) for piece in pieces])
        # Each byte that is part of no character becomes one character, so that positions can be mapped back.
        self._exact = b"".join(pieces).decode("utf-8", "surrogateescape")

    @property
    def text(self) -> str:
        """The text for detectors."""
        return _LONE_BYTES.sub("\ufffd", self._exact)

    def token_of(self, start: int) -> int:
        """Return the index of the token in which a character begins."""
        place = len(self._exact[:start].encode("utf-8", "surrogateescape"))
        return int(np.searchsorted(self._ends, place, side="right"))


class DecodedTranscript:
    """A text whose tokens depend on their neighbours, as with word pieces."""

    def __init__(self, tokens: int, decode: Callable[[int], str]) -> None:
        """Decode a prompt; `decode` returns the text of the given number of leading tokens."""
        self._tokens = tokens
        self._decode = decode
        self._text = decode(tokens)

    @property
    def text(self) -> str:
        """The text for detectors."""
        return self._text

    def token_of(self, start: int) -> int:
        """Return the index of the first token after which the text is longer than `start`."""
        return bisect_right(range(1, self._tokens + 1), start, key=lambda end: len(self._decode(end)))

"""Prompts from segments: as token ids if the server accepts them, otherwise as words of measured length.

`Contents` generates ids fast enough not to affect measurements of the cache.
"""

from __future__ import annotations

import random
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from common.types import TokenIds
    from deploy.evaluation.bench.records import Segment

# Ids below are special tokens and single bytes in most vocabularies; ids above are words in every vocabulary.
LOWEST_ID = 256
DEFAULT_VOCABULARY = 10_000
# Short common words are one token with their leading space in nearly every vocabulary.
COMMON_WORDS = (
    "the of and to in is was for on that by this with from at his her not are but had have they you were their one all "
    "we can has there been if more when will would who so no said out up into than them only some could time these two "
    "may then do first any my now such like our over man me even most made after also did many before must through "
    "back years where much your way well down should because each just those people how too little state good very "
    "make world still own see men work long get here between both life being under never day same another know while "
    "last might us great old year off come since against go came right used take three house place part end home high "
    "water room small found again night war point left city side head set hand school light book story music river "
    "road table paper letter winter summer garden window morning evening family friend child mother father money"
)
WORDS = tuple(COMMON_WORDS.split())
LARGEST_SEGMENT = 1 << 17
_SPAN = (1 << 31) - LARGEST_SEGMENT


class PromptMaker:
    """Generates content from segments and a seed, deterministically, in the form that the server accepts.

    The content of a shorter segment is a prefix of that of a longer one with the same key.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        as_ids: bool = True,
        vocabulary: int = DEFAULT_VOCABULARY,
        tokens_per_word: float = 1.0,
    ) -> None:
        """Generate ids in [LOWEST_ID, vocabulary), or words with an average of `tokens_per_word` tokens."""
        self.as_ids = as_ids
        self._seed = seed
        self._vocabulary = max(vocabulary, LOWEST_ID + 1)
        self._tokens_per_word = tokens_per_word
        # Blocks of a trace and system prompts occur repeatedly.
        self._ids = lru_cache(maxsize=4096)(self._draw_ids)
        self._words = lru_cache(maxsize=4096)(self._draw_words)

    def prompt(self, segments: Sequence[Segment]) -> NDArray[np.int64] | str:
        """Return the `prompt` of a completion: ids as an array, or text."""
        if not self.as_ids or any(segment.text is not None for segment in segments):
            return "".join(self._text(segment) for segment in segments)
        return np.concatenate([self._segment_ids(segment) for segment in segments])

    def messages(self, segments: Sequence[Segment]) -> list[dict[str, str]]:
        """Return the `messages` of a chat; adjacent segments of one role are one message."""
        messages: list[dict[str, str]] = []
        for segment in segments:
            if not messages or messages[-1]["role"] != segment.role:
                messages.append({"role": segment.role, "content": ""})
            messages[-1]["content"] += self._text(segment)
        for message in messages:
            message["content"] = message["content"].lstrip(" ")
        return messages

    def _segment_ids(self, segment: Segment) -> NDArray[np.int64]:
        if segment.ids is not None:
            return np.array(segment.ids, dtype=np.int64)
        return self._ids(segment.key, segment.tokens)

    def _text(self, segment: Segment) -> str:
        if segment.text is not None:
            return segment.text
        return self._words(segment.key, segment.tokens)

    def _draw_ids(self, key: str, tokens: int) -> NDArray[np.int64]:
        generator = np.random.default_rng(self._number(key))
        return generator.integers(LOWEST_ID, self._vocabulary, size=tokens)

    def _draw_words(self, key: str, tokens: int) -> str:
        count = max(1, round(tokens / self._tokens_per_word))
        return "".join(" " + word for word in random.Random(self._number(key)).choices(WORDS, k=count))

    def _number(self, key: str) -> int:
        return int.from_bytes(blake2b(f"{self._seed}/{key}".encode(), digest_size=8).digest(), "big")


class Contents:
    """Maps each segment to ascending ids that start at a hash of its key.

    Segments with equal keys have a common prefix; others differ from their first token on. A radix tree only compares
    ids, so real text is not needed.
    """

    def __init__(self) -> None:
        self._ascending = np.arange(LARGEST_SEGMENT, dtype=np.int32)

    def ids(self, segments: Iterable[Segment]) -> TokenIds:
        """Return the ids of a prompt, [tokens] int32.

        Raises:
            ValueError: a segment is longer than `LARGEST_SEGMENT`.
        """
        return np.concatenate([self._segment(segment) for segment in segments])

    def _segment(self, segment: Segment) -> TokenIds:
        if segment.tokens > LARGEST_SEGMENT:
            raise ValueError(
                f"segment {segment.key} has {segment.tokens} tokens; at most {LARGEST_SEGMENT} are supported"
            )
        start = int.from_bytes(blake2b(segment.key.encode(), digest_size=8).digest(), "little") % _SPAN
        return self._ascending[: segment.tokens] + np.int32(start)

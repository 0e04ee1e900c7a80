"""Encoding of texts and pairs of texts for requests that generate nothing, and their truncation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from common.errors import InvalidRequestError
from common.tokenization.parts import PairStyle

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

    from common.requests import PooledText, Truncation
    from common.types import TokenIds
    from services.tokenizer.special_text import SpecialText

# The prompt of Qwen3-Reranker, as its model card has it.
_QWEN3_BEGINNING: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_QWEN3_END: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_QWEN3_INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """The ids of a pair; `second_start` is None if the tokens of both texts have the same type."""

    token_ids: TokenIds
    second_start: int | None


class PooledTextEncoder:
    """Encodes texts and pairs. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, special: SpecialText, style: PairStyle, longest_token: int) -> None:
        """Write pairs in the notation `style`; no token has more than `longest_token` characters."""
        self._tokenizer = tokenizer
        self._special = special
        self._style = style
        self._longest_token = longest_token

    def encode(self, pooled: PooledText) -> TokenIds | EncodedPair:
        """Return the ids of a text, or those of a pair.

        Raises:
            InvalidRequestError: the model's pairs have no instruction, or nothing would be left of the texts.
        """
        text, second = self._bounded(pooled.text, pooled.truncation), pooled.second
        if second is None:
            return self._single(text, pooled.truncation)
        second = self._beginning(self._bounded(second, pooled.truncation), pooled.max_second_tokens)
        match self._style:
            case PairStyle.QWEN3_RERANKER:
                body = f"<Instruct>: {pooled.instruction or _QWEN3_INSTRUCTION}\n<Query>: {text}\n<Document>: {second}"
                return EncodedPair(self._qwen3(body, pooled.truncation), None)
            case PairStyle.TOKENIZER:
                if pooled.instruction is not None:
                    message = "this model's pairs of texts have no instruction; put it into the query"
                    raise InvalidRequestError(message, param="instruction")
                return self._pair(text, second, pooled.truncation)

    def _single(self, text: str, cut: Truncation | None) -> TokenIds:
        encoding = self._plain(text)
        if cut is not None:
            room = _room(cut, self._tokenizer.num_special_tokens_to_add(is_pair=False))
            encoding.truncate(room, direction=_direction(cut))
        return _ids(self._tokenizer.post_process(encoding))

    def _pair(self, text: str, second: str, cut: Truncation | None) -> EncodedPair:
        one, other = self._plain(text), self._plain(second)
        if cut is not None:
            room = _room(cut, self._tokenizer.num_special_tokens_to_add(is_pair=True))
            lengths = longest_first(len(one), len(other), room)
            for encoding, length in zip((one, other), lengths, strict=True):
                encoding.truncate(length, direction=_direction(cut))
        joined = self._tokenizer.post_process(one, other)
        types = np.array(joined.type_ids)
        start = int(np.argmax(types)) if types.any() else None
        return EncodedPair(_ids(joined), start)

    def _qwen3(self, body: str, cut: Truncation | None) -> TokenIds:
        begin, end = (_ids(self._plain(text)) for text in (_QWEN3_BEGINNING, _QWEN3_END))
        # The texts of a pair cannot end the turn that they stand in.
        shield = self._special.shield()
        marked = shield(body)
        inner = self._special.encode(marked) if shield.is_used else _ids(self._plain(body))
        if cut is not None:
            room = _room(cut, len(begin) + len(end))
            inner = inner[-room:] if cut.drop_beginning else inner[:room]
        return np.concatenate([begin, inner, end])

    def _beginning(self, text: str, tokens: int | None) -> str:
        """Return the part of a text that its first `tokens` tokens cover; None: all."""
        if tokens is None:
            return text
        offsets = self._plain(text[: tokens * self._longest_token]).offsets
        return text[: offsets[tokens - 1][1]] if len(offsets) > tokens else text

    def _bounded(self, text: str, cut: Truncation | None) -> str:
        """Return the part of a text that can matter: encoding what is dropped would delay others."""
        if cut is None:
            return text
        most = cut.max_tokens * self._longest_token
        return text[-most:] if cut.drop_beginning else text[:most]

    def _plain(self, text: str) -> Encoding:
        return self._tokenizer.encode(text, add_special_tokens=False)


def longest_first(one: int, other: int, room: int) -> tuple[int, int]:
    """Return the lengths of two texts after tokens were dropped from whichever is longer until both fit in `room`."""
    if one + other <= room:
        return one, other
    short = min(one, other, room // 2)
    long = room - short
    return (short, long) if one <= other else (long, short)


def _room(cut: Truncation, special: int) -> int:
    room = cut.max_tokens - special
    if room < 1:
        message = f"truncation to {cut.max_tokens} tokens leaves nothing of the text: {special} are the model's own"
        raise InvalidRequestError(message, param="truncate_prompt_tokens")
    return room


def _direction(cut: Truncation) -> str:
    return "left" if cut.drop_beginning else "right"


def _ids(encoding: Encoding) -> TokenIds:
    return np.array(encoding.ids, dtype=np.int32)

"""The bytes that each token id stands for, so that decoding needs no look at the tokens around it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from common.tokenization.byte_alphabet import byte_alphabet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tokenizers import Tokenizer

# A tokenizer's description of its decoder, as JSON.
DecoderState: TypeAlias = dict[str, Any]

# Decoders that only join pieces, or only touch the start of a whole text. Generated text always continues a prompt,
# so nothing is stripped from its start: the blank before "Paris" in "The capital of France is Paris" is part of it.
_WITHOUT_EFFECT: Final = frozenset({"Fuse", "Strip"})


@dataclass(frozen=True, slots=True)
class Pieces:
    """What to write for each id: `data[i]` its bytes, `texts[i]` the same as text, None if no whole characters."""

    data: Sequence[bytes]
    texts: Sequence[str | None]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Every id's bytes, special tokens spelled out; ids that stand for nothing have none."""

    all_pieces: Pieces
    # The same with nothing for special tokens.
    plain_pieces: Pieces

    def pieces(self, *, skip_special_tokens: bool) -> Pieces:
        """Return what to write for each id."""
        return self.plain_pieces if skip_special_tokens else self.all_pieces

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, also of a special one."""
        data = self.all_pieces.data
        return data[token_id] if token_id < len(data) else b""


def read_vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """Build the tables for ids in [0, size) and the tokenizer's own."""
    to_bytes = _converter(tokenizer)
    added = tokenizer.get_added_tokens_decoder()
    tokens = tokenizer.get_vocab(with_added_tokens=True)
    data = [b""] * max(size, max(tokens.values(), default=-1) + 1)
    for token, i in tokens.items():
        data[i] = to_bytes(token)
    special = {i for i, token in added.items() if token.special}
    plain = [b"" if i in special else piece for i, piece in enumerate(data)]
    return Vocabulary(_pieces(data), _pieces(plain))


def is_bytewise(tokenizer: Tokenizer) -> bool:
    """Return whether a text is the concatenation of its tokens' bytes, whatever the order of the tokens."""
    return _steps(tokenizer) is not None


def _converter(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """Return what turns a vocabulary entry into bytes; without a known decoder, the entry's own spelling."""
    steps = _steps(tokenizer) or []
    if any(step["type"] == "ByteLevel" for step in steps):
        # Characters that are no letters of the alphabet become one that Latin-1 lacks.
        table = dict.fromkeys(range(256), 0xFFFD) | {ord(letter): byte for byte, letter in byte_alphabet().items()}
        return lambda token: _from_letters(token, table)
    replacements = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
    has_byte_tokens = any(step["type"] == "ByteFallback" for step in steps)
    return lambda token: _from_sentence_piece(token, replacements, has_byte_tokens=has_byte_tokens)


def _steps(tokenizer: Tokenizer) -> list[DecoderState] | None:
    """Return the decoder as steps that work on single tokens, or None if it has others."""
    decoder = tokenizer.decoder
    if decoder is None:
        return None
    state: DecoderState = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    known: list[DecoderState] = []
    for step in steps:
        match step["type"]:
            case "ByteLevel" | "ByteFallback":
                known.append(step)
            case "Metaspace":
                known.append({"type": "Replace", "pattern": {"String": step["replacement"]}, "content": " "})
            case "Replace" if "String" in step["pattern"]:
                known.append(step)
            case name if name not in _WITHOUT_EFFECT:
                return None
    return known


def _from_letters(token: str, table: Mapping[int, int]) -> bytes:
    try:
        return token.translate(table).encode("latin-1")
    except UnicodeEncodeError:  # an added token in clear text
        return token.encode()


def _from_sentence_piece(token: str, replacements: Sequence[tuple[str, str]], *, has_byte_tokens: bool) -> bytes:
    if has_byte_tokens and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    for pattern, content in replacements:
        token = token.replace(pattern, content)
    return token.encode()


def _pieces(data: Sequence[bytes]) -> Pieces:
    return Pieces(data, [_text(piece) for piece in data])


def _text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None

"""The bytes of each token id, so that a token can be decoded independently of its neighbours."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tokenizers import Tokenizer

# A tokenizer's description of its decoder, as JSON.
DecoderState: TypeAlias = dict[str, Any]

# Decoders that only join pieces, or only change the start of a whole text. Generated text always continues a prompt,
# so nothing is stripped from its start: the space before "Paris" in "The capital of France is Paris" belongs to it.
_WITHOUT_EFFECT: Final = frozenset({"Fuse", "Strip"})


@dataclass(frozen=True, slots=True)
class Pieces:
    """The output for each id: `data[i]` as bytes, `texts[i]` as text, or None if the bytes are not valid UTF-8."""

    data: Sequence[bytes]
    texts: Sequence[str | None]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of every id; ids without text have none."""

    # Special tokens have their own text.
    all_pieces: Pieces
    # Special tokens are empty.
    plain_pieces: Pieces

    def pieces(self, *, skip_special_tokens: bool) -> Pieces:
        """Return the output for each id, with or without special tokens."""
        return self.plain_pieces if skip_special_tokens else self.all_pieces

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, special ones included; empty for ids outside the vocabulary."""
        data = self.all_pieces.data
        return data[token_id] if token_id < len(data) else b""


def read_vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """Build the tables for all ids in [0, size) and all ids of the tokenizer."""
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
    """Whether decoded text is the concatenation of its tokens' bytes, for any sequence of tokens."""
    return _steps(tokenizer) is not None


def _converter(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """Return a function from vocabulary entries to bytes; with an unknown decoder, it encodes the entry as it is."""
    steps = _steps(tokenizer) or []
    if any(step["type"] == "ByteLevel" for step in steps):
        # Characters outside the alphabet are mapped to one that Latin-1 cannot encode.
        table = dict.fromkeys(range(256), 0xFFFD) | {ord(letter): byte for byte, letter in byte_alphabet().items()}
        return lambda token: _from_letters(token, table)
    replacements = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
    has_byte_tokens = any(step["type"] == "ByteFallback" for step in steps)
    return lambda token: _from_sentence_piece(token, replacements, has_byte_tokens=has_byte_tokens)


def _steps(tokenizer: Tokenizer) -> list[DecoderState] | None:
    """Return the decoder as steps that apply to single tokens; None if it has other steps."""
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
    except UnicodeEncodeError:  # an added token in plain text
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


def byte_alphabet() -> dict[int, str]:
    """Return GPT-2's table: for each byte, the printable character that stands for it in byte-level vocabularies."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}

"""An output as a sequence of blocks, the form of Anthropic's Messages API and OpenAI's Responses API."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from common.notations.pieces import CallArguments, CallStart, Reasoning

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.notations.pieces import Piece


class BlockKind(Enum):
    """Kinds of blocks."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """A part of an output; `text` is the arguments' JSON in a call."""

    kind: BlockKind
    # The part of this block's ids that distinguishes it from all others.
    key: str
    text: str = ""
    name: str = ""


class Opened(NamedTuple):
    """A block begins."""

    number: int
    block: Block


class Grown(NamedTuple):
    """A block has more text."""

    number: int
    block: Block
    text: str


class Closed(NamedTuple):
    """A block is complete."""

    number: int
    block: Block


BlockEvent: TypeAlias = Opened | Grown | Closed


class BlockWriter:
    """Collects pieces into blocks; at most one block is open at a time."""

    def __init__(self, answer_id: str) -> None:
        """The blocks' ids are derived from `answer_id`, so that an answer that is rendered again has the same ones."""
        self.blocks: list[Block] = []
        self._answer_id = answer_id
        self._is_open = False

    def write(self, pieces: Iterable[Piece]) -> list[BlockEvent]:
        """Add `pieces`; return the resulting events."""
        events: list[BlockEvent] = []
        for piece in pieces:
            match piece:
                case CallStart(_, name):
                    events += [*self.close(), self._open(BlockKind.CALL, name)]
                case CallArguments(_, text):
                    events.append(self._grow(text))
                case _:
                    kind = BlockKind.REASONING if isinstance(piece, Reasoning) else BlockKind.TEXT
                    if not self._is_open or self.blocks[-1].kind is not kind:
                        events += [*self.close(), self._open(kind)]
                    events.append(self._grow(piece.text))
        return events

    def close(self) -> list[BlockEvent]:
        """Complete the open block, if any."""
        if not self._is_open:
            return []
        self._is_open = False
        return [Closed(len(self.blocks) - 1, self.blocks[-1])]

    def _open(self, kind: BlockKind, name: str = "") -> Opened:
        self.blocks.append(Block(kind, derived_hex(self._answer_id, len(self.blocks)), name=name))
        self._is_open = True
        return Opened(len(self.blocks) - 1, self.blocks[-1])

    def _grow(self, text: str) -> Grown:
        block = self.blocks[-1]
        block.text += text
        return Grown(len(self.blocks) - 1, block, text)


def derived_hex(answer_id: str, *place: int) -> str:
    """Return 24 hexadecimal digits that belong to a place in an answer."""
    return hashlib.sha256(f"{answer_id}/{place}".encode()).hexdigest()[:24]

"""An output as a sequence of blocks, the form of Anthropic's Messages API and OpenAI's Responses API."""

from __future__ import annotations

import secrets
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
    text: str = ""
    name: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        """Draw the random part of this block's ids."""
        self.key = self.key or secrets.token_hex(12)


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

    def __init__(self) -> None:
        self.blocks: list[Block] = []
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
        self.blocks.append(Block(kind, name=name))
        self._is_open = True
        return Opened(len(self.blocks) - 1, self.blocks[-1])

    def _grow(self, text: str) -> Grown:
        block = self.blocks[-1]
        block.text += text
        return Grown(len(self.blocks) - 1, block, text)

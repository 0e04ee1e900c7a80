"""An answer as a row of blocks, one after the other: the form in which newer APIs show it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from gateway.parsing.pieces import CallArguments, CallStart, Reasoning

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gateway.parsing.pieces import Piece


class BlockKind(Enum):
    """What a block is."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """A part of an answer; `text` is the arguments' JSON in a call."""

    kind: BlockKind
    text: str = ""
    name: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        """Make what ids of this block are made of."""
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
    """Puts pieces into blocks; one is open at a time."""

    def __init__(self) -> None:
        """Begin without blocks."""
        self.blocks: list[Block] = []
        self._is_open = False

    def write(self, pieces: Iterable[Piece]) -> list[BlockEvent]:
        """Add `pieces`; return what happened to the blocks."""
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
        """Complete the open block, if there is one."""
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

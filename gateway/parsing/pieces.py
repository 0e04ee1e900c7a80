"""What an answer consists of, as parsers report it while it grows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Text(NamedTuple):
    """Words for the user."""

    text: str


class Reasoning(NamedTuple):
    """Words the model says to itself."""

    text: str


class CallStart(NamedTuple):
    """A tool call begins; calls are numbered from 0."""

    call: int
    name: str


class CallArguments(NamedTuple):
    """More of the JSON text of a call's arguments."""

    call: int
    text: str


Piece: TypeAlias = Text | Reasoning | CallStart | CallArguments


class Parser(Protocol):
    """Takes an answer's text as it comes. However the text is cut, the pieces add up to the same."""

    def feed(self, text: str) -> Sequence[Piece]:
        """Return what is certain by now."""

    def flush(self) -> Sequence[Piece]:
        """Return the rest: the text has ended."""


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Return `pieces` with neighbours of the same kind put together, and empty ones left out."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        match piece, last:
            case (Text(""), _) | (Reasoning(""), _) | (CallArguments(_, ""), _):
                continue
            case Text(more), Text(text):
                result[-1] = Text(text + more)
            case Reasoning(more), Reasoning(text):
                result[-1] = Reasoning(text + more)
            case CallArguments(call, more), CallArguments(same, text) if call == same:
                result[-1] = CallArguments(call, text + more)
            case _:
                result.append(piece)
    return result


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `mark`."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0

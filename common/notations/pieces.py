"""The pieces of a model's output, as parsers report them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class TextPiece(NamedTuple):
    """Text for the user."""

    text: str


class Reasoning(NamedTuple):
    """Reasoning text."""

    text: str


class CallStart(NamedTuple):
    """Start of a tool call; calls are numbered from 0."""

    call: int
    name: str
    # The call's id, in notations that write one.
    id: str | None = None


class CallArguments(NamedTuple):
    """More of the JSON text of a call's arguments."""

    call: int
    text: str


Piece: TypeAlias = TextPiece | Reasoning | CallStart | CallArguments


class Parser(Protocol):
    """Parses an output incrementally. The pieces add up to the same result however the text is divided."""

    def feed(self, text: str) -> Sequence[Piece]:
        """Process more text; return the pieces that are complete enough to be shown."""

    def flush(self) -> Sequence[Piece]:
        """Return the remaining pieces at the end of the text."""


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Return `pieces` without empty ones, with neighbours of the same kind joined."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        match piece, last:
            case (TextPiece(""), _) | (Reasoning(""), _) | (CallArguments(_, ""), _):
                continue
            case TextPiece(more), TextPiece(text):
                result[-1] = TextPiece(text + more)
            case Reasoning(more), Reasoning(text):
                result[-1] = Reasoning(text + more)
            case CallArguments(call, more), CallArguments(same, text) if call == same:
                result[-1] = CallArguments(call, text + more)
            case _:
                result.append(piece)
    return result


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `mark`."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0

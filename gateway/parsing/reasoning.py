"""Separates reasoning, in a <think> block, from the rest of an output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.parsing.pieces import Reasoning, Text, overlap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.parsing.pieces import Piece

OPENING = "<think>"
CLOSING = "</think>"


class ReasoningParser:
    """Parses one block at the beginning of an output; later blocks are left in the text.

    White space around the block belongs to neither part.
    """

    def __init__(self, *, begins_inside: bool) -> None:
        """`begins_inside`: the prompt has opened the block."""
        self._held = ""
        self._is_open = begins_inside
        # A model may repeat the opening mark that the prompt contains.
        self._may_open_again = begins_inside
        self._is_over = False
        self._is_at_edge = True

    @property
    def is_thinking(self) -> bool:
        """Whether the parser is inside the block."""
        return self._is_open

    def feed(self, text: str) -> Sequence[Piece]:
        """Return the pieces that are complete enough to be shown."""
        if self._is_over and not self._is_at_edge:
            return [Text(text)]
        self._held += text
        pieces: list[Piece] = []
        if not self._is_open and not self._is_over:
            self._look_for_opening()
        if self._is_open:
            self._take_reasoning(pieces)
        if self._is_over:
            self._held = self._held.lstrip() if self._is_at_edge else self._held
            self._is_at_edge = self._is_at_edge and not self._held
            pieces.append(Text(self._held))
            self._held = ""
        return pieces

    def flush(self) -> Sequence[Piece]:
        held, self._held = self._held, ""
        if self._is_open:
            return [Reasoning(held.rstrip())]
        return [Text(held)]

    def _look_for_opening(self) -> None:
        start = self._held.lstrip()
        if start.startswith(OPENING):
            self._held = start.removeprefix(OPENING)
            self._is_open = True
        elif not OPENING.startswith(start):
            # There is no block; leading white space belongs to the text.
            self._is_over, self._is_at_edge = True, False

    def _take_reasoning(self, pieces: list[Piece]) -> None:
        if self._is_at_edge:
            self._held = self._held.lstrip()
            if self._may_open_again and len(self._held) < len(OPENING) and OPENING.startswith(self._held):
                return
            if self._may_open_again:
                self._held, self._may_open_again = self._held.removeprefix(OPENING).lstrip(), False
            self._is_at_edge = not self._held
        thought, mark, rest = self._held.partition(CLOSING)
        if mark:
            pieces.append(Reasoning(thought.rstrip()))
            self._held, self._is_open, self._is_over, self._is_at_edge = rest, False, True, True
            return
        body = thought[: len(thought) - overlap(thought, CLOSING)].rstrip()
        pieces.append(Reasoning(body))
        self._held = thought[len(body) :]

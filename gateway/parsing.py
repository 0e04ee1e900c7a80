"""Parses a model's output: reasoning, then text and tool calls; and the prefix that makes an output call a tool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.notations.harmony import HarmonyParser
from common.notations.pieces import CallArguments, CallStart, Reasoning, TextPiece, merged
from common.notations.reasoning import MARKS, ReasoningParser
from common.notations.registry import NOTATIONS
from common.types import ReasoningStyle, ToolStyle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.notations.pieces import Parser, Piece
    from common.notations.schemas import Tools


@dataclass(frozen=True, slots=True)
class ParsingRules:
    """The rules for parsing the outputs of one request."""

    tool_style: ToolStyle | None = None
    # The schema of each tool's arguments.
    tools: Tools = field(default_factory=dict)
    reasoning_style: ReasoningStyle | None = None
    begins_with_reasoning: bool = False
    may_call_in_parallel: bool = True
    # The beginning of the output, which the prompt already contains.
    prefix: str = ""
    # Whether reasoning is a part of the text.
    joins_reasoning: bool = False
    # Maximum number of tokens of reasoning.
    budget: int | None = None

    @property
    def has_reasoning(self) -> bool:
        """Whether the model marks reasoning."""
        return self.reasoning_style is not None

    @property
    def is_plain(self) -> bool:
        """Whether outputs consist of text only."""
        return self.tool_style is None and (
            self.reasoning_style is None or (self.joins_reasoning and not self.is_in_messages)
        )

    @property
    def is_in_messages(self) -> bool:
        """Whether outputs consist of harmony's messages."""
        return self.tool_style is ToolStyle.HARMONY or self.reasoning_style is ReasoningStyle.HARMONY

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the marks are special tokens, which are otherwise left out of the text."""
        return (self.tool_style is not None and NOTATIONS[self.tool_style].has_special_marks) or (
            self.reasoning_style is not None and MARKS[self.reasoning_style].are_special
        )

    def parser(self) -> AnswerParser:
        return AnswerParser(self)


class AnswerParser:
    """Implements `common.notations.pieces.Parser`: reasoning first, then text and calls."""

    def __init__(self, reading: ParsingRules) -> None:
        self.has_calls = False
        self._messages = HarmonyParser(reading.tools) if reading.is_in_messages else None
        self._reasoning = _reasoning_parser(reading)
        self._calls: Parser | None = self._messages
        if reading.tool_style is not None and self._messages is None:
            self._calls = NOTATIONS[reading.tool_style].parser(reading.tools)
        self._may_call_in_parallel = reading.may_call_in_parallel
        self._joins_reasoning = reading.joins_reasoning
        self._from_prefix = self._read(reading.prefix) if reading.prefix else []

    @property
    def is_thinking(self) -> bool:
        """Whether the parser is inside a reasoning block."""
        parser = self._messages or self._reasoning
        return parser is not None and parser.is_thinking

    def feed(self, text: str) -> Sequence[Piece]:
        """Return the pieces that are complete enough to be shown."""
        pieces, self._from_prefix = [*self._from_prefix, *self._read(text)], []
        return merged(pieces)

    def flush(self) -> Sequence[Piece]:
        pieces: list[Piece] = list(self._from_prefix)
        if self._reasoning is not None:
            pieces += self._read_calls(self._reasoning.flush())
        if self._calls is not None:
            pieces += self._allowed(self._calls.flush())
        return merged(pieces)

    def _read(self, text: str) -> list[Piece]:
        return self._read_calls(self._reasoning.feed(text) if self._reasoning is not None else [TextPiece(text)])

    def _read_calls(self, pieces: Sequence[Piece]) -> list[Piece]:
        if self._calls is None:
            return list(pieces)
        found: list[Piece] = []
        for piece in pieces:
            found += self._allowed(self._calls.feed(piece.text)) if isinstance(piece, TextPiece) else [piece]
        return found

    def _allowed(self, pieces: Sequence[Piece]) -> list[Piece]:
        self.has_calls = self.has_calls or any(isinstance(piece, CallStart) for piece in pieces)
        if self._joins_reasoning:
            pieces = [TextPiece(piece.text) if isinstance(piece, Reasoning) else piece for piece in pieces]
        if self._may_call_in_parallel:
            return list(pieces)
        return [piece for piece in pieces if not (isinstance(piece, CallStart | CallArguments) and piece.call)]


def _reasoning_parser(reading: ParsingRules) -> ReasoningParser | None:
    if reading.reasoning_style is None or reading.joins_reasoning or reading.is_in_messages:
        return None
    return ReasoningParser(MARKS[reading.reasoning_style], begins_inside=reading.begins_with_reasoning)


def call_prefix(reading: ParsingRules, style: ToolStyle, name: str | None) -> str:
    """Return the start of an output that calls `name` (None: any tool), after the end of an opened reasoning block."""
    before = ""
    if reading.begins_with_reasoning and reading.reasoning_style is not None and not reading.is_in_messages:
        before = f"{MARKS[reading.reasoning_style].closing}\n\n"
    return before + NOTATIONS[style].prefix(name)

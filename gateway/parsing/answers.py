"""Selects the parsers for a model's output, and the prefix that makes an output call a tool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from common.types import ToolStyle
from gateway.parsing.object_calls import HERMES, LLAMA3, MISTRAL, ObjectCallParser
from gateway.parsing.pieces import CallArguments, CallStart, Text, merged
from gateway.parsing.python_calls import PythonCallParser
from gateway.parsing.reasoning import CLOSING, ReasoningParser

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from gateway.parsing.pieces import Parser, Piece


@dataclass(frozen=True, slots=True)
class Reading:
    """The rules for parsing the outputs of one request."""

    tool_style: ToolStyle | None = None
    tools: AbstractSet[str] = frozenset()
    has_reasoning: bool = False
    begins_with_reasoning: bool = False
    may_call_in_parallel: bool = True
    # The beginning of the output, which the prompt already contains.
    prefix: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether outputs consist of text only."""
        return self.tool_style is None and not self.has_reasoning

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the marks of calls are special tokens, which are otherwise left out of the text."""
        return self.tool_style in (ToolStyle.MISTRAL, ToolStyle.LLAMA3, ToolStyle.PYTHONIC)

    def parser(self) -> AnswerParser:
        return AnswerParser(self)


class AnswerParser:
    """Implements `gateway.parsing.pieces.Parser`: reasoning first, then text and calls."""

    def __init__(self, reading: Reading) -> None:
        self.has_calls = False
        self._reasoning = (
            ReasoningParser(begins_inside=reading.begins_with_reasoning) if reading.has_reasoning else None
        )
        self._calls = tool_parser(reading.tool_style, reading.tools) if reading.tool_style is not None else None
        self._may_call_in_parallel = reading.may_call_in_parallel
        self._from_prefix = self._read(reading.prefix) if reading.prefix else []

    @property
    def is_thinking(self) -> bool:
        """Whether the parser is inside a reasoning block."""
        return self._reasoning is not None and self._reasoning.is_thinking

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
        return self._read_calls(self._reasoning.feed(text) if self._reasoning is not None else [Text(text)])

    def _read_calls(self, pieces: Sequence[Piece]) -> list[Piece]:
        if self._calls is None:
            return list(pieces)
        found: list[Piece] = []
        for piece in pieces:
            found += self._allowed(self._calls.feed(piece.text)) if isinstance(piece, Text) else [piece]
        return found

    def _allowed(self, pieces: Sequence[Piece]) -> list[Piece]:
        self.has_calls = self.has_calls or any(isinstance(piece, CallStart) for piece in pieces)
        if self._may_call_in_parallel:
            return list(pieces)
        return [piece for piece in pieces if not (isinstance(piece, CallStart | CallArguments) and piece.call)]


def tool_parser(style: ToolStyle, tools: AbstractSet[str]) -> Parser:
    """Return a parser for calls of `tools`, in the notation of `style`."""
    match style:
        case ToolStyle.HERMES:
            return ObjectCallParser(HERMES, tools)
        case ToolStyle.LLAMA3:
            return ObjectCallParser(LLAMA3, tools)
        case ToolStyle.MISTRAL:
            return ObjectCallParser(MISTRAL, tools)
        case ToolStyle.PYTHONIC:
            return PythonCallParser(tools)
        case _ as never:
            assert_never(never)


def call_prefix(style: ToolStyle, name: str | None, *, begins_with_reasoning: bool) -> str:
    """Return the start of an output that calls `name` (None: any tool), after the end of an opened reasoning block."""
    before = f"{CLOSING}\n\n" if begins_with_reasoning else ""
    match style:
        case ToolStyle.HERMES:
            call = '<tool_call>\n{"name": "' + (f'{name}", "arguments": ' if name else "")
        case ToolStyle.LLAMA3:
            call = '{"name": "' + (f'{name}", "parameters": ' if name else "")
        case ToolStyle.MISTRAL:
            call = '[TOOL_CALLS] [{"name": "' + (f'{name}", "arguments": ' if name else "")
        case ToolStyle.PYTHONIC:
            call = f"[{name}(" if name else "["
        case _ as never:
            assert_never(never)
    return before + call

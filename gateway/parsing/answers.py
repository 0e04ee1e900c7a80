"""Parses a model's output: reasoning, then text and tool calls; and the prefix that makes an output call a tool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from common.notations.object_calls import HERMES, LLAMA3, MISTRAL, ObjectCallParser
from common.notations.pieces import CallArguments, CallStart, Reasoning, Text, merged, overlap
from common.notations.python_calls import PythonCallParser
from common.types import ToolStyle

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from common.notations.pieces import Parser, Piece

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
    """Implements `common.notations.pieces.Parser`: reasoning first, then text and calls."""

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

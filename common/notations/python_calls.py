"""Tool calls as a list of Python calls: `[name(argument="value"), …]`, the notation of Llama 3.2 and 4."""

from __future__ import annotations

import ast
import json
from typing import TYPE_CHECKING

from common.notations.pieces import CallArguments, CallStart, TextPiece, merged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.notations.pieces import Piece
    from common.notations.schemas import Tools

# Longer than any sensible call; limits the input of Python's parser.
MAX_CALL_CHARACTERS = 64 * 1024
_OPENING, _CLOSING = "([{", ")]}"
_TAGS = ("<|python_start|>", "<|python_end|>")


class PythonCallParser:
    """Implements `common.notations.pieces.Parser`. An output that does not begin with a list is text."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._held = ""
        self._is_text = False
        self._is_list = False
        self._calls = 0
        self._position = 0
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def feed(self, text: str) -> Sequence[Piece]:
        """Return the pieces that are complete enough to be shown."""
        if self._has_given_up():
            return [TextPiece(text)]
        self._held += text
        if not self._is_list and not self._begin():
            return self._as_text() if self._has_given_up() else []
        pieces: list[Piece] = []
        while (end := self._end_of_call()) is not None:
            source, self._held, self._position = self._held[:end], self._held[end:], 0
            pieces += self._call(source)
            if self._has_given_up():
                break
        if self._has_given_up() or len(self._held) > MAX_CALL_CHARACTERS:
            self._is_text = True
            pieces += self._as_text()
        return merged(pieces)

    def flush(self) -> Sequence[Piece]:
        """Return the rest; after calls, the end of the list is dropped."""
        rest = self._held.strip()
        if self._calls and (not rest or rest[0] == "]"):
            self._held = rest[1:].lstrip().removeprefix(_TAGS[1]).lstrip()
        return self._as_text()

    def _has_given_up(self) -> bool:
        return self._is_text

    def _begin(self) -> bool:
        """Return whether the list has begun; set `_is_text` if it never will."""
        start = self._held.lstrip()
        tag = _TAGS[0]
        if start.startswith(tag):
            start = start.removeprefix(tag).lstrip()
        elif tag.startswith(start):
            return False
        if not start:
            return False
        self._is_list = start[0] == "["
        self._is_text = not self._is_list
        # `_held` keeps the bracket as long as it may have to be shown as text; `_call` strips it, since no call begins
        # with one.
        if self._is_list:
            self._held, self._position = start, 1
        return self._is_list

    def _end_of_call(self) -> int | None:
        """Return the end of the call at the beginning of `_held`, None if it is incomplete."""
        held = self._held
        while self._position < len(held):
            character = held[self._position]
            self._position += 1
            if self._quote:
                self._step_quoted(character)
            elif character in "'\"":
                self._quote = character
            elif character in _OPENING:
                self._depth += 1
            elif character in _CLOSING:
                self._depth -= 1
                if self._depth == 0:
                    return self._position
                if self._depth < 0:
                    self._depth = 0
                    self._is_text = not self._calls
        return None

    def _step_quoted(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == self._quote:
            self._quote = ""

    def _call(self, source: str) -> list[Piece]:
        found = parse_call(source.lstrip("[,] \t\r\n"), self._tools)
        if found is None:
            self._is_text = True
            return [TextPiece(source)]
        name, arguments = found
        pieces: list[Piece] = [CallStart(self._calls, name), CallArguments(self._calls, arguments)]
        self._calls += 1
        return pieces

    def _as_text(self) -> list[Piece]:
        held, self._held = self._held, ""
        return merged([TextPiece(held)])


def parse_call(source: str, tools: Tools) -> tuple[str, str] | None:
    """Return name and JSON arguments of a Python call; None unless it calls one of `tools` with literal values."""
    try:
        tree = _WithConstants().visit(ast.parse(source, mode="eval")).body
        if not isinstance(tree, ast.Call) or tree.args:
            return None
        name = ast.unparse(tree.func)
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in tree.keywords}
        if name not in tools or None in arguments:
            return None
        return name, json.dumps(arguments, ensure_ascii=False)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


class _WithConstants(ast.NodeTransformer):
    """Replaces JSON's constants by Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        constants = {"true": True, "false": False, "null": None}
        return ast.copy_location(ast.Constant(constants[node.id]), node) if node.id in constants else node

"""Tool calls of Gemma 4: `call:name{key:value}` between marks, with a mark on both sides of texts instead of quotes."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from common.notations.arguments import to_json
from common.notations.pieces import CallArguments, CallStart, TextPiece, merged, overlap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.notations.pieces import Piece
    from common.notations.schemas import Tools

# Longer than any sensible call.
MAX_CALL_CHARACTERS = 1024 * 1024
MAX_DEPTH = 64
_HEAD = re.compile(r"\s*call:\s*([^\s{]+)\s*(?=\{)")
_SCALAR = re.compile(r"[^,\]}]+")
_CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None, "none": None}


class GemmaCallParser:
    """Implements `common.notations.pieces.Parser`. A call is reported when it is complete."""

    def __init__(self, marks: tuple[str, str, str], tools: Tools) -> None:
        """`marks` are the beginning and the end of a call, and the mark around texts."""
        self._opening, self._closing, self._quote = marks
        self._tools = tools
        self._held = ""
        self._is_call = False
        self._is_gap = False
        # The position in a call from which to look for its end, and whether that is within a text.
        self._position = 0
        self._is_quoted = False
        self._space = ""
        self._calls = 0

    def feed(self, text: str) -> Sequence[Piece]:
        """Return the pieces that are complete enough to be shown."""
        self._held += text
        pieces: list[Piece] = []
        while self._held and (self._step_call(pieces) if self._is_call else self._step_text(pieces)):
            pass
        return merged(pieces)

    def flush(self) -> Sequence[Piece]:
        """Return the rest; a truncated call is text."""
        held, self._held = self._held, ""
        return merged([TextPiece(self._space + self._opening + held if self._is_call else held)])

    def _step_text(self, pieces: list[Piece]) -> bool:
        if self._is_gap:
            self._held = self._held.lstrip()
            self._is_gap = not self._held
        before, mark, rest = self._held.partition(self._opening)
        if mark:
            shown = before.rstrip()
            pieces.append(TextPiece(shown))
            self._space, self._held = before[len(shown) :], rest
            self._is_call, self._position, self._is_quoted = True, 0, False
            return True
        certain = self._held[: len(self._held) - overlap(self._held, self._opening)].rstrip()
        pieces.append(TextPiece(certain))
        self._held = self._held[len(certain) :]
        return False

    def _step_call(self, pieces: list[Piece]) -> bool:
        end = self._find_end()
        if end is None and len(self._held) <= MAX_CALL_CHARACTERS:
            return False
        source = self._held if end is None else self._held[:end]
        found = None if end is None else parse_call(source, self._quote, self._tools)
        self._is_call = False
        if found is None:
            whole = source + ("" if end is None else self._closing)
            pieces.append(TextPiece(self._space + self._opening + whole))
        else:
            name, arguments = found
            pieces += [CallStart(self._calls, name), CallArguments(self._calls, to_json(arguments))]
            self._calls += 1
            self._is_gap = True
        self._held = "" if end is None else self._held[end + len(self._closing) :]
        return True

    def _find_end(self) -> int | None:
        """Return the position of the first end mark outside of texts."""
        while True:
            quote = self._held.find(self._quote, self._position)
            end = -1 if self._is_quoted else self._held.find(self._closing, self._position)
            if end >= 0 and (quote < 0 or end < quote):
                return end
            if quote < 0:
                longest = max(len(self._quote), len(self._closing))
                self._position = max(self._position, len(self._held) - longest + 1)
                return None
            self._position = quote + len(self._quote)
            self._is_quoted = not self._is_quoted


def parse_call(source: str, quote: str, tools: Tools) -> tuple[str, dict[str, Any]] | None:  # Any: free JSON
    """Return name and arguments of a call; None unless it calls one of `tools` and is well-formed."""
    head = _HEAD.match(source)
    if head is None or head.group(1) not in tools:
        return None
    reader = _Reader(source, quote, head.end())
    try:
        value = reader.value(0)
    except ValueError:
        return None
    return (head.group(1), value) if isinstance(value, dict) and not reader.rest.strip() else None


class _Reader:
    """A recursive descent over one call's arguments; raises ValueError where they are malformed."""

    def __init__(self, source: str, quote: str, position: int) -> None:
        self._source = source
        self._quote = quote
        self._position = position

    @property
    def rest(self) -> str:
        return self._source[self._position :]

    def value(self, depth: int) -> Any:  # Any: free JSON
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        self._skip()
        if self._source.startswith(self._quote, self._position):
            return self._text()
        match self._source[self._position : self._position + 1]:
            case "{":
                return self._object(depth)
            case "[":
                return self._list(depth)
            case _:
                return self._scalar()

    def _object(self, depth: int) -> dict[str, Any]:  # Any: free JSON
        members: dict[str, Any] = {}
        self._position += 1
        while not self._ends("}", bool(members)):
            key = self._text() if self._source.startswith(self._quote, self._position) else self._until(":")
            self._expect(":")
            members[key] = self.value(depth + 1)
        return members

    def _list(self, depth: int) -> list[Any]:  # Any: free JSON
        items: list[Any] = []
        self._position += 1
        while not self._ends("]", bool(items)):
            items.append(self.value(depth + 1))
        return items

    def _ends(self, bracket: str, has_entries: bool) -> bool:
        """Whether the bracket follows; otherwise a comma is read, if there are entries already."""
        self._skip()
        if self._source.startswith(bracket, self._position):
            self._position += 1
            return True
        if has_entries:
            self._expect(",")
            self._skip()
        return False

    def _text(self) -> str:
        start = self._position + len(self._quote)
        end = self._source.find(self._quote, start)
        if end < 0:
            raise ValueError("a text has no end")
        self._position = end + len(self._quote)
        return self._source[start:end]

    def _until(self, character: str) -> str:
        end = self._source.find(character, self._position)
        if end < 0:
            raise ValueError(f"no {character}")
        start, self._position = self._position, end
        return self._source[start:end].strip()

    def _scalar(self) -> Any:  # Any: a JSON scalar
        found = _SCALAR.match(self._source, self._position)
        if found is None:
            raise ValueError("no value")
        self._position = found.end()
        word = found.group().strip()
        if word in _CONSTANTS:
            return _CONSTANTS[word]
        try:
            return json.loads(word)
        except ValueError:
            return word

    def _expect(self, character: str) -> None:
        self._skip()
        if not self._source.startswith(character, self._position):
            raise ValueError(f"no {character}")
        self._position += 1

    def _skip(self) -> None:
        while self._source[self._position : self._position + 1].isspace():
            self._position += 1

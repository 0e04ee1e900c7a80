"""Parses one tool call in the form of a JSON object."""

from __future__ import annotations

import json
from enum import Enum, auto
from typing import TYPE_CHECKING

from gateway.parsing.pieces import CallArguments, CallStart

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from gateway.parsing.pieces import Piece

NAME = "name"
ARGUMENTS = ("arguments", "parameters")


class Scan(Enum):
    """The role of a character in the object."""

    # Between members: braces, commas, colons, white space.
    BETWEEN = auto()
    KEY = auto()
    VALUE = auto()
    # The previous character ended the value; this one is like BETWEEN.
    VALUE_END = auto()
    OBJECT_END = auto()
    WRONG = auto()


class ObjectScanner:
    """Scans one object character by character, from its opening brace; keeps the current key and no values.

    Of JSON's grammar it checks only as much as it needs to find the ends of keys, values and the object.
    """

    def __init__(self) -> None:
        self.key = ""
        self._state = "start"
        self._depth = 0
        self._is_quoted = False
        self._is_escaped = False

    def step(self, character: str) -> Scan:
        """Process the next character and return its role."""
        match self._state:
            case "start":
                return self._expect(character, "{", "key or end")
            case "key or end" if character == "}":
                return Scan.OBJECT_END
            case "key or end" | "key start":
                self.key = ""
                return self._expect(character, '"', "key")
            case "key":
                return self._step_key(character)
            case "colon":
                return self._expect(character, ":", "value start")
            case "value start":
                if character.isspace():
                    return Scan.BETWEEN
                self._state = "value"
                return self._step_value(character, first=True)
            case "value":
                return self._step_value(character, first=False)
            case _:  # after a value
                return self._after_value(character)

    def _expect(self, character: str, wanted: str, then: str) -> Scan:
        if character == wanted:
            self._state = then
            return Scan.BETWEEN
        return Scan.BETWEEN if character.isspace() else Scan.WRONG

    def _step_key(self, character: str) -> Scan:
        if character == '"':
            self._state = "colon"
            return Scan.BETWEEN
        # The keys of interest have no escapes.
        self.key += character
        return Scan.KEY

    def _step_value(self, character: str, *, first: bool) -> Scan:
        if self._is_quoted:
            self._step_quoted(character)
            return Scan.VALUE
        if character == '"':
            if not first and not self._depth:
                return Scan.WRONG
            self._is_quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]" and self._depth:
            self._depth -= 1
            if not self._depth:
                self._state = "behind value"
        elif not self._depth and (character in ",}]" or character.isspace()):
            return Scan.WRONG if first or character == "]" else self._end_value(character)
        return Scan.VALUE

    def _step_quoted(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_quoted = False
            if not self._depth:
                self._state = "behind value"

    def _after_value(self, character: str) -> Scan:
        return Scan.WRONG if character not in ",}" and not character.isspace() else self._end_value(character)

    def _end_value(self, character: str) -> Scan:
        if character == "}":
            return Scan.OBJECT_END
        self._state = "key start" if character == "," else "behind value"
        return Scan.VALUE_END


class CallReader:
    """Parses `{"name": …, "arguments": …}`, or only the arguments if `name` is given.

    A call is reported as soon as its name is complete and belongs to a tool. Until then its text is kept in `raw`, so
    that it can be shown as text if it turns out not to be a call.
    """

    def __init__(self, index: int, tools: AbstractSet[str], name: str | None = None) -> None:
        """Start call number `index`, of one of `tools`."""
        self.raw = ""
        self.has_started = False
        self.is_over = False
        self.is_wrong = name is not None and name not in tools
        self.pieces: list[Piece] = []
        self._index = index
        self._tools = tools
        self._is_bare = name is not None
        self._scanner = ObjectScanner()
        self._value = ""
        self._arguments: str | None = None
        if name is not None and not self.is_wrong:
            self._start(name)

    def step(self, character: str) -> None:
        """Process the next character."""
        self.raw += character
        scan = self._scanner.step(character)
        if self._is_bare:
            self._step_bare(character, scan)
            return
        match scan:
            case Scan.VALUE:
                self._step_value(character)
            case Scan.VALUE_END:
                self._end_value()
            case Scan.OBJECT_END:
                self._end_value()
                self._end()
            case Scan.WRONG:
                self.is_wrong = True
            case _:
                pass

    def _step_bare(self, character: str, scan: Scan) -> None:
        self.is_wrong = scan is Scan.WRONG
        self.is_over = scan is Scan.OBJECT_END
        if not self.is_wrong:
            self.pieces.append(CallArguments(self._index, character))

    def _step_value(self, character: str) -> None:
        self._value += character
        # Arguments in a string can be decoded only when the string is complete.
        if self.has_started and self._scanner.key in ARGUMENTS and self._value[0] != '"':
            self.pieces.append(CallArguments(self._index, character))

    def _end_value(self) -> None:
        value, self._value = self._value, ""
        if not value:
            return
        if self._scanner.key == NAME and not self.has_started:
            self._end_name(value)
        elif self._scanner.key in ARGUMENTS and self._arguments is None:
            self._arguments = value
            if self.has_started and value[0] == '"':
                self.pieces.append(CallArguments(self._index, _unquoted(value)))

    def _end_name(self, value: str) -> None:
        try:
            name = json.loads(value)
        except ValueError:
            name = None
        if not isinstance(name, str) or name not in self._tools:
            self.is_wrong = True
            return
        self._start(name)
        if self._arguments is not None:
            self.pieces.append(CallArguments(self._index, _unquoted(self._arguments)))

    def _end(self) -> None:
        if self.is_wrong:
            return
        if not self.has_started:
            self.is_wrong = True
            return
        self.is_over = True
        if self._arguments is None:
            self.pieces.append(CallArguments(self._index, "{}"))

    def _start(self, name: str) -> None:
        self.has_started = True
        self.pieces.append(CallStart(self._index, name))


def _unquoted(value: str) -> str:
    """Decode arguments that a model has written as JSON inside a string."""
    if not value.startswith('"'):
        return value
    try:
        return str(json.loads(value))
    except ValueError:
        return value

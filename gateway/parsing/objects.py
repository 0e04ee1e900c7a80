"""Incremental scanner for a JSON object."""

from __future__ import annotations

from enum import Enum, auto


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

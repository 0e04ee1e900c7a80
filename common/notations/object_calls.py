"""Tool calls as JSON objects between marks: the notations of Hermes and Qwen, Llama 3, and Mistral."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from common.notations.pieces import CallArguments, CallStart, TextPiece, merged, overlap

if TYPE_CHECKING:
    import re
    from collections.abc import Sequence

    from common.notations.pieces import Piece
    from common.notations.schemas import Tools

NAME = "name"
ARGUMENTS = ("arguments", "parameters")
MAX_NAME_CHARACTERS = 256


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

    def __init__(self, index: int, tools: Tools, name: str | None = None, id_: str | None = None) -> None:
        """Start call number `index`, of one of `tools`."""
        self.raw = ""
        self.has_started = False
        self.is_over = False
        self.is_wrong = name is not None and name not in tools
        self.pieces: list[Piece] = []
        self._index = index
        self._id = id_
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
        self.pieces.append(CallStart(self._index, name, self._id))


def _unquoted(value: str) -> str:
    """Decode arguments that a model has written as JSON inside a string."""
    if not value.startswith('"'):
        return value
    try:
        return str(json.loads(value))
    except ValueError:
        return value


@dataclass(frozen=True, slots=True)
class ObjectMarks:
    """The marks of a notation: characters of `lead` may precede the first object, `separators` separate two."""

    # Any of these begins calls.
    openings: tuple[str, ...]
    closing: str = ""
    lead: str = ""
    separators: str = ""
    # An output that begins with an object is a call without a mark.
    may_be_bare: bool = False
    # The text between mark and object, which may name the tool: then the object has the arguments only.
    header: re.Pattern[str] | None = None
    # Ends a list of objects. Any other text after an object is shown.
    end: str = ""
    # Marks around several calls.
    section: tuple[str, ...] = ()


class _State(Enum):
    START = auto()
    TEXT = auto()
    LEAD = auto()
    NAME = auto()
    CALL = auto()
    AFTER = auto()
    # After a call's end mark; white space there is dropped.
    GAP = auto()


class ObjectCallParser:
    """Implements `common.notations.pieces.Parser` for one notation."""

    def __init__(self, marks: ObjectMarks, tools: Tools) -> None:
        """Parse calls of `tools`; objects that do not name a tool are text."""
        self._marks = marks
        self._tools = tools
        self._state = _State.START if marks.may_be_bare else _State.TEXT
        self._held = ""
        # Mark and lead of the current call, which are shown if it turns out not to be a call.
        self._prefix = ""
        self._calls = 0
        self._reader = CallReader(0, tools)
        self._pieces: list[Piece] = []
        self._steps = {
            _State.START: self._step_start,
            _State.TEXT: self._step_text,
            _State.LEAD: self._step_lead,
            _State.NAME: self._step_name,
            _State.CALL: self._step_call,
            _State.AFTER: self._step_after,
            _State.GAP: self._step_gap,
        }

    def feed(self, text: str) -> Sequence[Piece]:
        """Return the pieces that are complete enough to be shown."""
        if self._is_plainly_text(text):
            return [TextPiece(text)]
        self._held += text
        while self._held and self._steps[self._state]():
            pass
        return self._take()

    def flush(self) -> Sequence[Piece]:
        """Return the rest; a truncated call keeps the arguments received so far."""
        if self._state in (_State.LEAD, _State.NAME) or (self._state is _State.CALL and not self._reader.has_started):
            raw = self._reader.raw if self._state is _State.CALL else ""
            self._pieces.append(TextPiece(self._prefix + raw))
        if self._state in (_State.START, _State.TEXT, _State.NAME):
            self._pieces.append(TextPiece(self._held))
        self._held = ""
        return self._take()

    def _is_plainly_text(self, text: str) -> bool:
        """Whether `text` can be passed on unchanged, a fast path for most tokens."""
        return (
            self._state is _State.TEXT
            and not self._held
            and bool(text)
            and self._marks.openings[0][0] not in text
            and not text[-1].isspace()
        )

    def _take(self) -> list[Piece]:
        pieces, self._pieces = merged(self._pieces), []
        return pieces

    # --- each step returns whether to continue with the held text -----------------------------------------------------

    def _step_start(self) -> bool:
        start = self._held.lstrip()
        if not start or any(len(start) < len(mark) and mark.startswith(start) for mark in self._marks.openings):
            return False
        if start[0] == "{":
            self._prefix = self._held[: len(self._held) - len(start)]
            self._held = start
            self._begin_call()
        else:
            self._state = _State.TEXT
        return True

    def _step_text(self) -> bool:
        marks = (*self._marks.openings, *self._marks.section)
        found = min(((at, mark) for mark in marks if (at := self._held.find(mark)) >= 0), default=None)
        if found is None:
            certain = self._held[: len(self._held) - max(overlap(self._held, mark) for mark in marks)].rstrip()
            self._pieces.append(TextPiece(certain))
            self._held = self._held[len(certain) :]
            return False
        at, mark = found
        shown = self._held[:at].rstrip()
        self._pieces.append(TextPiece(shown))
        space, self._held = self._held[len(shown) : at], self._held[at + len(mark) :]
        if mark in self._marks.section:
            self._state = _State.GAP
        else:
            self._prefix = space + mark
            self._state = _State.LEAD
        return True

    def _step_lead(self) -> bool:
        character, header = self._held[0], self._marks.header
        if character == "{" and (header is None or self._marks.lead):
            self._begin_call()
        elif not self._prefix and (character.isspace() or character in self._marks.separators):
            # Between two objects.
            self._held = self._held[1:]
        elif character.isspace() or character in self._marks.lead:
            self._prefix += character
            self._held = self._held[1:]
        elif header is not None:
            self._state = _State.NAME
        else:
            self._give_up(self._prefix)
        return True

    def _step_name(self) -> bool:
        text, brace, _ = self._held.partition("{")
        if not brace and len(text) <= MAX_NAME_CHARACTERS:
            return False
        header = self._marks.header.fullmatch(text) if self._marks.header is not None and brace else None
        self._prefix += text
        self._held = self._held[len(text) :]
        if header is None:
            self._give_up(self._prefix)
            return True
        self._begin_call(header["name"].strip(), header.groupdict().get("id"))
        return True

    def _begin_call(self, name: str | None = None, id_: str | None = None) -> None:
        self._reader = CallReader(self._calls, self._tools, name, id_)
        self._state = _State.CALL
        if self._reader.is_wrong:
            self._give_up(self._prefix)

    def _step_call(self) -> bool:
        reader = self._reader
        for position, character in enumerate(self._held):
            reader.step(character)
            if reader.is_over or reader.is_wrong:
                self._held = self._held[position + 1 :]
                self._end_call()
                return True
        self._pieces += reader.pieces
        reader.pieces = []
        self._held = ""
        return False

    def _end_call(self) -> None:
        reader = self._reader
        self._pieces += reader.pieces
        self._calls += reader.has_started
        if reader.is_over:
            self._prefix = ""
            self._state = _State.AFTER
        else:
            self._give_up("" if reader.has_started else self._prefix + reader.raw)

    def _step_after(self) -> bool:
        marks, rest = self._marks, self._held.lstrip()
        if not rest:
            self._held = ""
            return False
        if marks.closing and rest.startswith(marks.closing):
            self._held, self._state = rest.removeprefix(marks.closing), _State.GAP
        elif marks.closing and marks.closing.startswith(rest):
            return False
        elif rest[0] in marks.separators or (rest[0] == "{" and marks.separators):
            self._prefix = ""
            self._held = rest
            self._state = _State.LEAD
        elif marks.end and rest[0] in marks.end:
            self._held, self._state = rest[1:], _State.GAP
        else:
            self._held, self._state = rest, _State.TEXT
        return True

    def _step_gap(self) -> bool:
        self._held = self._held.lstrip()
        if self._held:
            self._state = _State.TEXT
        return bool(self._held)

    def _give_up(self, text: str) -> None:
        """Show the presumed call as text; the following text is not a call either, until the next mark."""
        self._pieces.append(TextPiece(text))
        self._prefix = ""
        self._state = _State.TEXT

"""Tool calls with an element per argument, like XML without escapes: Qwen3-Coder, GLM, MiniMax M2, DeepSeek V3.2.

Texts are not quoted: the tool's schema says which values are texts, or an attribute of the element. A value ends at its
end mark only if more of the call follows; a text may contain the mark otherwise.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from common.notations.arguments import to_json
from common.notations.pieces import CallArguments, CallStart, TextPiece, merged, overlap
from common.notations.schemas import ALL_TYPES, property_of, typed, types_of

if TYPE_CHECKING:
    import re
    from collections.abc import Iterable, Sequence

    from common.notations.pieces import Piece
    from common.notations.schemas import Tools

# Longer names and keys are not calls.
MAX_NAME_CHARACTERS = 256
_TEXTS = frozenset({"string"})


@dataclass(frozen=True, slots=True)
class KeyedMarks:
    """The marks of a notation."""

    # Marks around calls, which models may leave out.
    section: tuple[str, str]
    opening: str
    after_name: re.Pattern[str]
    before_key: str
    # A group `is_text` says "true" of texts and "false" of JSON; without one, the schema decides.
    after_key: re.Pattern[str]
    after_value: str
    closing: str
    # Values stand on lines of their own.
    has_lines: bool = False


class _State(Enum):
    TEXT = auto()
    # After the mark of a section.
    SECTION = auto()
    NAME = auto()
    # Between arguments.
    ARGUMENTS = auto()
    KEY = auto()
    VALUE = auto()
    # After a call; white space there is dropped.
    GAP = auto()


class KeyedCallParser:
    """Implements `common.notations.pieces.Parser` for one notation."""

    def __init__(self, marks: KeyedMarks, tools: Tools) -> None:
        """Parse calls of `tools`; calls of others are text."""
        self._marks = marks
        self._tools = tools
        self._state = _State.TEXT
        self._held = ""
        # The marks before the current name, which are shown if it is not a tool's.
        self._prefix = ""
        self._calls = 0
        self._name = ""
        self._has_arguments = False
        self._types: frozenset[str] = frozenset()
        self._is_at_value_start = False
        # The part of the held value that is known to belong to it, after a mark that turned out not to be its end.
        self._certain = 0
        self._pieces: list[Piece] = []
        self._steps = {
            _State.TEXT: self._step_text,
            _State.SECTION: self._step_section,
            _State.NAME: self._step_name,
            _State.ARGUMENTS: self._step_arguments,
            _State.KEY: self._step_key,
            _State.VALUE: self._step_value,
            _State.GAP: self._step_gap,
        }

    def feed(self, text: str) -> Sequence[Piece]:
        """Return the pieces that are complete enough to be shown."""
        if self._state is _State.TEXT and not self._held and "<" not in text and text and not text[-1].isspace():
            return [TextPiece(text)]
        self._held += text
        while self._held and self._steps[self._state]():
            pass
        return self._take()

    def flush(self) -> Sequence[Piece]:
        """Return the rest; a truncated call keeps the arguments received so far."""
        if self._state is _State.VALUE:
            self._end_truncated_value()
        elif self._state in (_State.TEXT, _State.SECTION, _State.NAME):
            self._pieces.append(TextPiece(self._prefix + self._held))
        self._held = ""
        return self._take()

    def _take(self) -> list[Piece]:
        pieces, self._pieces = merged(self._pieces), []
        return pieces

    # --- each step returns whether to continue with the held text -----------------------------------------------------

    def _step_text(self) -> bool:
        marks = [mark for mark in (*self._marks.section, self._marks.opening) if mark]
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
        if mark == self._marks.section[1]:
            self._end_section(space + mark)
        else:
            self._prefix = space + mark
            self._state = _State.SECTION if mark == self._marks.section[0] else _State.NAME
        return True

    def _end_section(self, text: str) -> None:
        if self._calls:
            self._state = _State.GAP
        else:
            self._pieces.append(TextPiece(text))

    def _step_section(self) -> bool:
        rest, opening = self._held.lstrip(), self._marks.opening
        if rest.startswith(opening):
            self._prefix += self._held[: len(self._held) - len(rest)] + opening
            self._held, self._state = rest.removeprefix(opening), _State.NAME
        elif opening.startswith(rest):
            return False
        else:
            self._give_up()
        return True

    def _step_name(self) -> bool:
        end = self._marks.after_name.search(self._held)
        if end is None and len(self._held) <= MAX_NAME_CHARACTERS:
            return False
        if end is None:
            self._give_up()
            return True
        name = self._held[: end.start()].strip()
        if name not in self._tools:
            self._give_up()
            return True
        self._pieces.append(CallStart(self._calls, name))
        self._name, self._has_arguments, self._prefix = name, False, ""
        self._held, self._state = self._held[end.end() :], _State.ARGUMENTS
        return True

    def _step_arguments(self) -> bool:
        rest, marks = self._held.lstrip(), self._marks
        if rest.startswith(marks.before_key):
            self._held, self._state = rest.removeprefix(marks.before_key), _State.KEY
        elif rest.startswith(marks.closing):
            self._held = rest.removeprefix(marks.closing)
            self._end_call()
        elif _may_begin(rest, (marks.before_key, marks.closing)):
            self._held = rest
            return False
        else:
            # The call is not closed.
            self._end_call()
        return True

    def _step_key(self) -> bool:
        end = self._marks.after_key.search(self._held)
        if end is None:
            return False
        key = self._held[: end.start()].strip()
        self._pieces.append(CallArguments(self._calls, (", " if self._has_arguments else "{") + to_json(key) + ": "))
        self._has_arguments = True
        self._types = types_of(property_of(self._tools[self._name], key))
        stated = end.groupdict().get("is_text")
        if stated is not None:
            self._types = _TEXTS if stated == "true" else self._types - _TEXTS or ALL_TYPES - _TEXTS
        self._held, self._state = self._held[end.end() :], _State.VALUE
        self._is_at_value_start, self._certain = True, 0
        if self._types == _TEXTS:
            self._pieces.append(CallArguments(self._calls, '"'))
        return bool(self._held)

    def _step_value(self) -> bool:
        if self._is_at_value_start and self._marks.has_lines:
            self._held = self._held.removeprefix("\n")
        self._is_at_value_start = False
        mark, closers = self._marks.after_value, self._followers()
        while (at := self._held.find(mark, self._certain)) >= 0:
            rest = self._held[at + len(mark) :].lstrip()
            if rest.startswith(closers):
                self._end_value(self._held[:at])
                self._held, self._state = rest, _State.ARGUMENTS
                return True
            if _may_begin(rest, closers):
                self._show_text(at)
                return False
            self._certain = at + len(mark)
        self._show_text(len(self._held) - overlap(self._held, mark))
        return False

    def _followers(self) -> tuple[str, ...]:
        marks = self._marks
        return tuple(mark for mark in (marks.before_key, marks.closing, marks.section[1]) if mark)

    def _show_text(self, end: int) -> None:
        """Show the held part of a text up to `end`, except for what may be the line break before its end mark."""
        if self._types != _TEXTS:
            return
        if self._marks.has_lines and end and self._held[end - 1] == "\n":
            end -= 1
        self._pieces.append(CallArguments(self._calls, json.dumps(self._held[:end], ensure_ascii=False)[1:-1]))
        self._held = self._held[end:]
        self._certain = max(self._certain - end, 0)

    def _end_value(self, text: str) -> None:
        if self._marks.has_lines:
            text = text.removesuffix("\n")
        is_text = self._types == _TEXTS
        value = json.dumps(text, ensure_ascii=False)[1:] if is_text else to_json(typed(text, self._types))
        self._pieces.append(CallArguments(self._calls, value))

    def _end_truncated_value(self) -> None:
        text, mark, _ = self._held.rpartition(self._marks.after_value)
        if mark:
            self._end_value(text)
        else:
            self._show_text(len(self._held))

    def _end_call(self) -> None:
        self._pieces.append(CallArguments(self._calls, "}" if self._has_arguments else "{}"))
        self._calls += 1
        self._state = _State.GAP

    def _step_gap(self) -> bool:
        self._held = self._held.lstrip()
        if self._held:
            self._state = _State.TEXT
        return bool(self._held)

    def _give_up(self) -> None:
        """Show the presumed call as text, up to the next mark."""
        self._pieces.append(TextPiece(self._prefix))
        self._prefix = ""
        self._state = _State.TEXT


def _may_begin(text: str, marks: Iterable[str]) -> bool:
    return any(mark.startswith(text) for mark in marks)

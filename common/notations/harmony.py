"""OpenAI's harmony format: an output is a series of messages, each with a channel.

`analysis` is reasoning, `commentary` to a function is a call, all else is text. Recipients stand before or after the
channel.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from common.notations.arguments import to_json
from common.notations.formats import ANY_TEXT, either, json_value, marked, optional, sequence, star
from common.notations.pieces import CallArguments, CallStart, Reasoning, TextPiece, merged, overlap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.notations.formats import Format, Schema
    from common.notations.notation import BoundTool, Call
    from common.notations.pieces import Piece
    from common.notations.schemas import Tools

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
NEXT = f"{START}assistant"
# Longer headers are text.
MAX_HEADER_CHARACTERS = 1024
_ENDS = (END, CALL, RETURN, START, CHANNEL)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
# The beginnings of a header, where the prompt may have begun the message.
_HEADERS = (START, CHANNEL, " to=", "to=")


class HarmonyParser:
    """Implements `common.notations.pieces.Parser`: reasoning, text and calls of one output."""

    def __init__(self, tools: Tools) -> None:
        """Parse calls of `tools`; calls of others are text."""
        self._tools = tools
        self._held = ""
        self._is_header = True
        self._is_reasoning = False
        self._is_call = False
        self._calls = 0

    @property
    def is_thinking(self) -> bool:
        """Whether the current message is reasoning."""
        return not self._is_header and self._is_reasoning

    def feed(self, text: str) -> Sequence[Piece]:
        """Return the pieces that are complete enough to be shown."""
        self._held += text
        pieces: list[Piece] = []
        while self._held and (self._step_header(pieces) if self._is_header else self._step_body(pieces)):
            pass
        return merged(pieces)

    def flush(self) -> Sequence[Piece]:
        """Return the rest; a truncated call keeps the arguments received so far, a truncated header is dropped."""
        held, self._held = self._held, ""
        if not self._is_header:
            return merged([self._piece(held)])
        return [] if held.lstrip().startswith(("<|", "to=")) else merged([TextPiece(held)])

    def _step_header(self, pieces: list[Piece]) -> bool:
        held = self._held
        if held.startswith(_HEADERS):
            header, mark, rest = held.partition(MESSAGE)
            if mark and len(header) <= MAX_HEADER_CHARACTERS:
                self._begin(header, pieces)
                self._held = rest
                return True
            if len(header) <= MAX_HEADER_CHARACTERS:
                return False
            pieces.append(TextPiece(held[0]))
            self._held = held[1:]
        elif any(beginning.startswith(held) for beginning in (*_HEADERS, MESSAGE, *_ENDS)):
            return False
        else:
            self._held = held.removeprefix(MESSAGE)
        # Text in no message.
        self._is_header = self._is_reasoning = self._is_call = False
        return True

    def _begin(self, header: str, pieces: list[Piece]) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._is_header = False
        self._is_call = recipient is not None and recipient.group(1) in self._tools
        self._is_reasoning = not recipient and channel is not None and channel.group(1) == "analysis"
        if self._is_call and recipient is not None:
            pieces.append(CallStart(self._calls, recipient.group(1)))

    def _step_body(self, pieces: list[Piece]) -> bool:
        found = min(((at, mark) for mark in _ENDS if (at := self._held.find(mark)) >= 0), default=None)
        if found is None:
            size = len(self._held) - max(overlap(self._held, mark) for mark in _ENDS)
            pieces.append(self._piece(self._held[:size]))
            self._held = self._held[size:]
            return False
        at, mark = found
        pieces.append(self._piece(self._held[:at]))
        # The next header begins with the mark, unless the mark only ends this message.
        self._held = self._held[at if mark in (START, CHANNEL) else at + len(mark) :]
        self._calls += self._is_call
        self._is_header, self._is_reasoning, self._is_call = True, False, False
        return True

    def _piece(self, text: str) -> Piece:
        if self._is_call:
            return CallArguments(self._calls, text)
        return Reasoning(text) if self._is_reasoning else TextPiece(text)


class HarmonyNotation:
    """Implements `common.notations.notation.Notation`."""

    has_special_marks = True
    ids_name_calls = False

    def parser(self, tools: Tools) -> HarmonyParser:
        return HarmonyParser(tools)

    def render(self, calls: Sequence[Call]) -> str:
        return NEXT.join(f"{_call_to(call.name)}{to_json(call.arguments)}{CALL}" for call in calls)

    def prefix(self, name: str | None) -> str:
        return _call_to(name) if name else _call_to("")[: -len(_AFTER_NAME)]

    def forced(self, tools: Sequence[BoundTool], *, named: bool, in_parallel: bool) -> Format:
        if named:
            return _arguments(tools[0])
        first = either([sequence(*marked(tool.name + _AFTER_NAME), _arguments(tool)) for tool in tools])
        if not in_parallel:
            return first
        return sequence(first, star(sequence(*marked(CALL + NEXT), _any_call(tools))))

    def free(self, tools: Sequence[BoundTool], *, in_parallel: bool, content: Format | None) -> Format:
        """Return the format of messages: a preamble, unless there is `content`, then calls or the final message."""
        final = sequence(*marked(f"{CHANNEL}final{MESSAGE}"), content or ANY_TEXT)
        call = _any_call(tools)
        calls = sequence(call, star(sequence(*marked(CALL + NEXT), call))) if in_parallel else call
        if content is not None:
            return either([calls, final])
        preamble = sequence(*marked(f"{CHANNEL}commentary{MESSAGE}"), ANY_TEXT, *marked(END + NEXT))
        return sequence(optional(preamble), either([calls, final]))

    def can_bind(self, _schema: Schema) -> bool:
        return True


_AFTER_NAME = f" <|constrain|>json{MESSAGE}"


def _call_to(name: str) -> str:
    return f"{CHANNEL}commentary to=functions.{name}{_AFTER_NAME}"


def _arguments(tool: BoundTool) -> Format:
    # The mark of the end is an end of the sequence, which grammars admit by themselves.
    return json_value(tool.schema)


def _any_call(tools: Sequence[BoundTool]) -> Format:
    return either([sequence(*marked(_call_to(tool.name)), _arguments(tool)) for tool in tools])

"""Chat completions with tool calls and reasoning, streamed and whole."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

import orjson

from common.types import FinishReason, ToolStyle
from gateway.endpoints.chat.render import ChatChunks, logprobs_object, prompt_logprobs_field
from gateway.endpoints.shapes import FINISH_REASONS, failed_stream, matched_stop, usage_object
from gateway.parsing.pieces import CallArguments, CallStart, Reasoning, Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from common.errors import PandoError
    from gateway.endpoints.shapes import ResponseHead, WholeChoice
    from gateway.generation.generation import Usage
    from gateway.generation.journal import ChoiceUpdate
    from gateway.parsing.answers import AnswerParser, Reading
    from gateway.parsing.pieces import Piece

TOOL_CALLS = "tool_calls"
# Mistral's templates accept only ids of this form.
MISTRAL_ID_CHARACTERS = 9


@dataclass(slots=True)
class Message:
    """The sum of an output's pieces."""

    text: str = ""
    reasoning: str = ""
    # Pairs of name and arguments.
    calls: list[list[str]] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Text(text):
                    self.text += text
                case Reasoning(text):
                    self.reasoning += text
                case CallStart(_, name):
                    self.calls.append([name, ""])
                case CallArguments(index, text):
                    self.calls[index][1] += text
                case _ as never:
                    assert_never(never)


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """A complete output, and the number of its tokens that are reasoning."""

    message: Message
    reasoning_tokens: int

    @classmethod
    def of(cls, reading: Reading, choice: WholeChoice) -> ReadAnswer:
        """Parse the output of `choice`."""
        parser, message, reasoning_tokens = reading.parser(), Message(), 0
        for text, tokens in zip(choice.text, choice.tokens, strict=True):
            reasoning_tokens += tokens * parser.is_thinking
            message.add(parser.feed(text))
        message.add(parser.flush())
        return cls(message, reasoning_tokens)


def new_call_id(style: ToolStyle | None) -> str:
    """Return a random id for a tool call."""
    if style is ToolStyle.MISTRAL:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(MISTRAL_ID_CHARACTERS))
    return f"call_{secrets.token_hex(12)}"


class ParsedChatStream:
    """Renders chat chunks whose deltas are text, reasoning or parts of calls."""

    def __init__(self, head: ResponseHead, reading: Reading, *, logprobs: bool, include_usage: bool) -> None:
        """`reading` has the rules for parsing the outputs."""
        self._reading = reading
        self._logprobs = logprobs
        self._chunks = ChatChunks(head, include_usage=include_usage)
        self._parsers: dict[int, AnswerParser] = {}
        self._reasoning_tokens = 0

    def events(self, update: ChoiceUpdate) -> bytes:
        parser = self._parsers.get(update.index)
        if parser is None:
            parser = self._parsers[update.index] = self._reading.parser()
        self._reasoning_tokens += update.tokens * parser.is_thinking
        pieces = [*parser.feed(update.text), *(parser.flush() if update.finish is not None else ())]
        deltas = [_delta(piece, self._reading.tool_style) for piece in pieces]
        events = self._begin(update.index, pieces) if pieces or update.finish is not None or update.logprobs else b""
        logprobs = b"null"
        if self._logprobs and update.logprobs:
            logprobs = orjson.dumps(logprobs_object(update.logprobs))
            deltas = deltas or [b"{}"]
        for delta in deltas:
            events += self._chunks.delta(update.index, delta, logprobs)
            logprobs = b"null"
        if update.finish is not None:
            is_call = parser.has_calls and update.finish.reason is FinishReason.STOP
            reason = TOOL_CALLS if is_call else FINISH_REASONS[update.finish.reason]
            events += self._chunks.finish(update.index, reason, matched_stop(update.finish))
        return events

    def ending(self, usage: Usage) -> bytes:
        """Return the chunks after the last update."""
        return self._chunks.ending(usage, self._reasoning_tokens)

    def failure(self, error: PandoError) -> bytes:
        """Return the event for a failure during the stream, and the end mark."""
        return failed_stream(error)

    def _begin(self, index: int, pieces: Sequence[Piece]) -> bytes:
        if self._chunks.has_begun(index):
            return b""
        is_call = bool(pieces) and isinstance(pieces[0], CallStart)
        return self._chunks.role(index, b"null" if is_call else b'""')


class WholeParsedChat:
    """Renders a chat completion with tool calls and reasoning as one body."""

    def __init__(self, head: ResponseHead, reading: Reading, *, logprobs: bool, prompt_top: int | None = None) -> None:
        """`reading` has the rules for parsing the outputs; see `WholeChat` for the rest."""
        self._head = head
        self._reading = reading
        self._logprobs = logprobs
        self._prompt_top = prompt_top

    def body(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        answers = [ReadAnswer.of(self._reading, choice) for choice in choices]
        pairs = enumerate(zip(choices, answers, strict=True))
        body = {
            "id": self._head.id,
            "object": "chat.completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": [self._choice(index, choice, answer.message) for index, (choice, answer) in pairs],
            "usage": usage_object(usage, sum(answer.reasoning_tokens for answer in answers)),
            "system_fingerprint": self._head.fingerprint,
        }
        return orjson.dumps(body | prompt_logprobs_field(choices, self._prompt_top))

    def _choice(self, index: int, choice: WholeChoice, message: Message) -> dict[str, object]:
        is_call = bool(message.calls) and choice.finish_reason == FINISH_REASONS[FinishReason.STOP]
        return {
            "index": index,
            "message": message_object(message, self._reading),
            "logprobs": logprobs_object(choice.logprobs) if self._logprobs else None,
            "finish_reason": TOOL_CALLS if is_call else choice.finish_reason,
            "matched_stop": choice.matched_stop,
        }


def message_object(message: Message, reading: Reading) -> dict[str, object]:
    """Return a message in OpenAI's shape."""
    shape: dict[str, object] = {"role": "assistant", "content": message.text, "refusal": None}
    if reading.has_reasoning:
        shape["reasoning_content"] = message.reasoning or None
    if message.calls:
        shape["content"] = message.text or None
        shape["tool_calls"] = [
            {
                "id": new_call_id(reading.tool_style),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for name, arguments in message.calls
        ]
    return shape


def _delta(piece: Piece, style: ToolStyle | None) -> bytes:
    match piece:
        case Text(text):
            delta: dict[str, object] = {"content": text}
        case Reasoning(text):
            delta = {"reasoning_content": text}
        case CallStart(index, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": new_call_id(style), "type": "function", "function": function}
            delta = {"tool_calls": [call]}
        case CallArguments(index, text):
            delta = {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case _ as never:
            assert_never(never)
    return orjson.dumps(delta)

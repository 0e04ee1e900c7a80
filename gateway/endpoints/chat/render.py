"""Chat completions, streamed and whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

import orjson

from common.notations.pieces import CallArguments, CallStart, Reasoning, TextPiece
from common.notations.registry import NOTATIONS
from common.types import FinishReason, ToolStyle
from gateway.delivery.collecting import FINISH_REASONS, matched_stop
from gateway.endpoints.blocks import derived_hex
from gateway.endpoints.shapes import DONE, by_id, failed_stream, finite_logprob, usage_object, version_field

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from common.deltas import LogprobText, TokenText
    from common.errors import PandoError
    from common.notations.pieces import Piece
    from gateway.delivery.collecting import WholeChoice
    from gateway.endpoints.shapes import ResponseHead
    from gateway.generation.journal import ChoiceUpdate
    from gateway.generation.usage import Usage
    from gateway.parsing import AnswerParser, ParsingRules

TOOL_CALLS = "tool_calls"
# Mistral's templates accept only ids of this form.
MISTRAL_ID_CHARACTERS = 9


class ChatChunks:
    """Frames chat chunks. Repeated parts are serialised once, because this runs for every token."""

    def __init__(self, head: ResponseHead, *, include_usage: bool, token_ids: bool) -> None:
        """`include_usage` adds a last chunk with token counts, and null counts to the others.

        `token_ids` adds the ids of the prompt to the first chunk, and those of the output to each choice.
        """
        self._include_usage = include_usage
        self._has_ids = token_ids
        # Ids that no chunk has had yet, by choice index.
        self._ids: dict[int, list[int]] = {}
        self._prompt_ids: Sequence[int] | None = None
        common = {
            "id": head.id,
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }
        self._head = b"data: " + orjson.dumps(common)[:-1] + b',"choices":['
        self._tail = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        # The start of a chunk up to the delta, by choice index.
        self._prefixes: dict[int, bytes] = {}

    def note(self, update: ChoiceUpdate) -> None:
        """Keep the ids of an update for the next chunk of its choice."""
        if self._has_ids:
            self._ids.setdefault(update.index, []).extend(update.token_ids)
            if update.prompt_ids and self._prompt_ids is None:
                self._prompt_ids = update.prompt_ids

    def has_begun(self, index: int) -> bool:
        """Whether the role of choice `index` has been sent."""
        return index in self._prefixes

    def role(self, index: int, content: bytes = b'""') -> bytes:
        """Return the first chunk of a choice; `content` is JSON."""
        self._prefixes[index] = self._head + b'{"index":%d,"delta":' % index
        return self.delta(index, b'{"role":"assistant","content":' + content + b',"refusal":null}')

    def delta(self, index: int, delta: bytes, logprobs: bytes = b"null") -> bytes:
        """Return a chunk of a choice whose role has been sent; `delta` and `logprobs` are JSON."""
        end = b',"logprobs":' + logprobs + b',"finish_reason":null'
        return self._prefixes[index] + delta + end + (self._tail_with_ids(index) if self._has_ids else self._tail)

    def finish(self, index: int, reason: str, stop: int | str | None) -> bytes:
        end = b'{},"logprobs":null,"finish_reason":' + orjson.dumps(reason) + b',"matched_stop":' + orjson.dumps(stop)
        return self._prefixes[index] + end + (self._tail_with_ids(index) if self._has_ids else self._tail)

    def _tail_with_ids(self, index: int) -> bytes:
        """Return the end of a chunk with the ids that no chunk has had yet."""
        tail = self._tail
        if ids := self._ids.pop(index, None):
            tail = b',"token_ids":' + orjson.dumps(ids) + tail
        if self._prompt_ids:
            # The end of the choices, then fields of the chunk.
            choices, _, rest = tail.partition(b"}]")
            tail = choices + b'}],"prompt_token_ids":' + orjson.dumps(list(self._prompt_ids)) + rest
            self._prompt_ids = ()
        return tail

    def ending(self, usage: Usage, reasoning_tokens: int = 0) -> bytes:
        """Return the usage chunk, if requested, and the end mark."""
        if not self._include_usage:
            return DONE
        rest = {"usage": usage_object(usage, reasoning_tokens), **version_field(usage)}
        return self._head + b"]," + orjson.dumps(rest).removeprefix(b"{") + b"\n\n" + DONE


class ChatStream:
    """Renders chat chunks of outputs that consist of text only."""

    def __init__(self, head: ResponseHead, *, logprobs: bool, include_usage: bool, token_ids: bool = False) -> None:
        """`token_ids` adds the ids of prompt and output."""
        self._logprobs = logprobs
        self._has_ids = token_ids
        self._chunks = ChatChunks(head, include_usage=include_usage, token_ids=token_ids)

    def events(self, update: ChoiceUpdate) -> bytes:
        """Return the chunks for one update: the role once, then text, then the finish on its own."""
        chunks, index = self._chunks, update.index
        chunks.note(update)
        events = b"" if chunks.has_begun(index) else chunks.role(index)
        if update.text or (self._logprobs and update.logprobs) or (self._has_ids and update.token_ids):
            logprobs = orjson.dumps(logprobs_object(update.logprobs)) if self._logprobs else b"null"
            events += chunks.delta(index, b'{"content":' + orjson.dumps(update.text) + b"}", logprobs)
        if update.finish is not None:
            events += chunks.finish(index, FINISH_REASONS[update.finish.reason], matched_stop(update.finish))
        return events

    def ending(self, usage: Usage) -> bytes:
        """Return the chunks after the last update."""
        return self._chunks.ending(usage)

    def failure(self, error: PandoError) -> bytes:
        """Return the event for a failure during the stream, and the end mark."""
        return failed_stream(error)


class WholeChat:
    """Renders a chat completion as one body."""

    def __init__(
        self, head: ResponseHead, *, logprobs: bool, prompt_top: int | None = None, token_ids: bool = False
    ) -> None:
        """`prompt_top` adds the prompt's log probabilities, with `prompt_top` alternatives at each position.

        `token_ids` adds the ids of prompt and output.
        """
        self._head = head
        self._logprobs = logprobs
        self._has_ids = token_ids
        self._prompt_top = prompt_top

    def body(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        answer = {
            "id": self._head.id,
            "object": "chat.completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage_object(usage),
            "system_fingerprint": self._head.fingerprint,
        }
        ids = prompt_ids_field(choices) if self._has_ids else {}
        return orjson.dumps(answer | version_field(usage) | prompt_logprobs_field(choices, self._prompt_top) | ids)

    def _choice(self, index: int, choice: WholeChoice) -> dict[str, object]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": logprobs_object(choice.logprobs) if self._logprobs else None,
            "finish_reason": choice.finish_reason,
            "matched_stop": choice.matched_stop,
        } | ({"token_ids": choice.token_ids} if self._has_ids else {})


def prompt_ids_field(choices: Sequence[WholeChoice]) -> dict[str, object]:
    """Return the field `prompt_token_ids`."""
    return {"prompt_token_ids": list(choices[0].prompt_ids) or None}


def prompt_logprobs_field(choices: Sequence[WholeChoice], top: int | None) -> dict[str, object]:
    """Return the field `prompt_logprobs`, or no field if `top` is None."""
    prompt = choices[0].prompt
    return {} if top is None or prompt is None else {"prompt_logprobs": by_id(prompt, top)}


def logprobs_object(logprobs: Sequence[LogprobText]) -> dict[str, object]:
    """Return log probabilities in the shape of chat completions."""
    content = [{**_token(entry.token), "top_logprobs": [_token(token) for token in entry.top]} for entry in logprobs]
    return {"content": content, "refusal": None}


def _token(token: TokenText) -> dict[str, object]:
    return {
        "token": token.text.decode("utf-8", "replace"),
        "logprob": finite_logprob(token),
        "bytes": list(token.text),
    }


@dataclass(slots=True)
class MessageCall:
    """A call of a message; `id` is the one that the model wrote."""

    name: str
    id: str | None
    arguments: str = ""


@dataclass(slots=True)
class AssistantMessage:
    """The sum of an output's pieces."""

    text: str = ""
    reasoning: str = ""
    calls: list[MessageCall] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            match piece:
                case TextPiece(text):
                    self.text += text
                case Reasoning(text):
                    self.reasoning += text
                case CallStart(_, name, id_):
                    self.calls.append(MessageCall(name, id_))
                case CallArguments(index, text):
                    self.calls[index].arguments += text
                case _ as never:
                    assert_never(never)


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """A complete output, and the number of its tokens that are reasoning."""

    message: AssistantMessage
    reasoning_tokens: int

    @classmethod
    def of(cls, reading: ParsingRules, choice: WholeChoice) -> ReadAnswer:
        """Parse the output of `choice`."""
        parser, message, reasoning_tokens = reading.parser(), AssistantMessage(), 0
        for text, tokens in zip(choice.text, choice.tokens, strict=True):
            reasoning_tokens += tokens * parser.is_thinking
            message.add(parser.feed(text))
        message.add(parser.flush())
        return cls(message, reasoning_tokens)


def call_id(style: ToolStyle | None, piece: MessageCall | CallStart, answer_id: str, choice: int, index: int) -> str:
    """Return the id of a tool call: the one that the model has written, or one that its chat template accepts.

    It is derived from the call's place, so that an answer that is rendered again has the same ids.
    """
    if piece.id is not None:
        return piece.id
    if style is not None and NOTATIONS[style].ids_name_calls:
        return f"functions.{piece.name}:{index}"
    key = derived_hex(answer_id, choice, index)
    return key[:MISTRAL_ID_CHARACTERS] if style in (ToolStyle.MISTRAL, ToolStyle.MISTRAL_ARGS) else f"call_{key}"


class ParsedChatStream:
    """Renders chat chunks whose deltas are text, reasoning or parts of calls."""

    def __init__(
        self, head: ResponseHead, reading: ParsingRules, *, logprobs: bool, include_usage: bool, token_ids: bool = False
    ) -> None:
        """`reading` has the rules for parsing the outputs; see `ChatStream` for the rest."""
        self._id = head.id
        self._reading = reading
        self._logprobs = logprobs
        self._chunks = ChatChunks(head, include_usage=include_usage, token_ids=token_ids)
        self._parsers: dict[int, AnswerParser] = {}
        self._reasoning_tokens = 0

    def events(self, update: ChoiceUpdate) -> bytes:
        parser = self._parsers.get(update.index)
        if parser is None:
            parser = self._parsers[update.index] = self._reading.parser()
        self._chunks.note(update)
        self._reasoning_tokens += update.tokens * parser.is_thinking
        pieces = [*parser.feed(update.text), *(parser.flush() if update.finish is not None else ())]
        deltas = [self._delta(update.index, piece) for piece in pieces]
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

    def _delta(self, choice: int, piece: Piece) -> bytes:
        match piece:
            case TextPiece(text):
                delta: dict[str, object] = {"content": text}
            case Reasoning(text):
                delta = {"reasoning_content": text}
            case CallStart(index, name):
                function = {"name": name, "arguments": ""}
                key = call_id(self._reading.tool_style, piece, self._id, choice, index)
                call = {"index": index, "id": key, "type": "function", "function": function}
                delta = {"tool_calls": [call]}
            case CallArguments(index, text):
                delta = {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case _ as never:
                assert_never(never)
        return orjson.dumps(delta)


class WholeParsedChat:
    """Renders a chat completion with tool calls and reasoning as one body."""

    def __init__(
        self,
        head: ResponseHead,
        reading: ParsingRules,
        *,
        logprobs: bool,
        prompt_top: int | None = None,
        token_ids: bool = False,
    ) -> None:
        """`reading` has the rules for parsing the outputs; see `WholeChat` for the rest."""
        self._head = head
        self._has_ids = token_ids
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
        ids = prompt_ids_field(choices) if self._has_ids else {}
        return orjson.dumps(body | version_field(usage) | prompt_logprobs_field(choices, self._prompt_top) | ids)

    def _choice(self, index: int, choice: WholeChoice, message: AssistantMessage) -> dict[str, object]:
        is_call = bool(message.calls) and choice.finish_reason == FINISH_REASONS[FinishReason.STOP]
        return {
            "index": index,
            "message": message_object(message, self._reading, self._head.id, index),
            "logprobs": logprobs_object(choice.logprobs) if self._logprobs else None,
            "finish_reason": TOOL_CALLS if is_call else choice.finish_reason,
            "matched_stop": choice.matched_stop,
        } | ({"token_ids": choice.token_ids} if self._has_ids else {})


def message_object(message: AssistantMessage, reading: ParsingRules, answer_id: str, choice: int) -> dict[str, object]:
    """Return the message of a choice in OpenAI's shape."""
    shape: dict[str, object] = {"role": "assistant", "content": message.text, "refusal": None}
    if reading.has_reasoning:
        shape["reasoning_content"] = message.reasoning or None
    if message.calls:
        shape["content"] = message.text or None
        shape["tool_calls"] = [
            {
                "id": call_id(reading.tool_style, call, answer_id, choice, index),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(message.calls)
        ]
    return shape

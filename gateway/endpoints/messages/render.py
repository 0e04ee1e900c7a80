"""Messages in Anthropic's shape, streamed and whole."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from gateway.delivery.collecting import FINISH_REASONS, matched_stop
from gateway.endpoints.blocks import Block, BlockKind, BlockWriter, Closed, Grown, Opened
from gateway.endpoints.shapes import version_field
from gateway.server.errors import SHAPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.errors import PandoError
    from gateway.delivery.collecting import WholeChoice
    from gateway.endpoints.blocks import BlockEvent
    from gateway.endpoints.shapes import ResponseHead
    from gateway.generation.journal import ChoiceUpdate
    from gateway.generation.usage import Usage
    from gateway.parsing import ParsingRules

Json: TypeAlias = dict[str, Any]  # Any: free JSON


class WholeMessage:
    """Renders a message as one body."""

    def __init__(self, head: ResponseHead, reading: ParsingRules) -> None:
        """`reading` has the rules for parsing the output."""
        self._head = head
        self._reading = reading

    def body(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        [choice] = choices
        parser, writer = self._reading.parser(), BlockWriter(self._head.id)
        writer.write([*parser.feed("".join(choice.text)), *parser.flush()])
        end = _end(choice.finish_reason, choice.matched_stop, writer.blocks)
        content = [_block_object(block) for block in writer.blocks]
        ends = {**end, "usage": _counts(usage), **version_field(usage)}
        return orjson.dumps({**_frame(self._head), "content": content, **ends})


class MessageStream:
    """Renders the events of a message."""

    def __init__(self, head: ResponseHead, reading: ParsingRules) -> None:
        """`reading` has the rules for parsing the output."""
        self._head = head
        self._parser = reading.parser()
        self._writer = BlockWriter(head.id)
        self._has_begun = False
        self._end: Json = {}

    def events(self, update: ChoiceUpdate) -> bytes:
        events = self._begin(update)
        pieces = [*self._parser.feed(update.text), *(self._parser.flush() if update.finish is not None else ())]
        changes = self._writer.write(pieces)
        if update.finish is not None:
            changes += self._writer.close()
            reason, stop = FINISH_REASONS[update.finish.reason], matched_stop(update.finish)
            self._end = _end(reason, stop, self._writer.blocks)
        return events + b"".join(map(_change, changes))

    def ending(self, usage: Usage) -> bytes:
        """Return the events after the last update."""
        delta = {"delta": self._end, "usage": _counts(usage), **version_field(usage)}
        return _event("message_delta", delta) + _event("message_stop", {})

    def failure(self, error: PandoError) -> bytes:
        """Return the event for a failure during the stream."""
        return _event("error", {"error": {"type": SHAPES[error.code].type, "message": error.message}})

    def _begin(self, update: ChoiceUpdate) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        usage = update.prompt_usage
        prompt, cached = (usage.prompt_tokens, usage.cached_tokens) if usage else (0, 0)
        counts = {"input_tokens": prompt - cached, "cache_read_input_tokens": cached, "output_tokens": 0}
        message = {**_frame(self._head), "content": [], "stop_reason": None, "stop_sequence": None, "usage": counts}
        return _event("message_start", {"message": message})


def _change(change: BlockEvent) -> bytes:
    place = {"index": change.number}
    match change:
        case Opened(_, block):
            return _event(
                "content_block_start",
                {**place, "content_block": _block_object(Block(block.kind, block.key, "", block.name))},
            )
        case Grown(_, block, text):
            return _event("content_block_delta", {**place, "delta": _delta(block.kind, text)})
        case Closed():
            return _event("content_block_stop", place)


def _delta(kind: BlockKind, text: str) -> Json:
    match kind:
        case BlockKind.TEXT:
            return {"type": "text_delta", "text": text}
        case BlockKind.REASONING:
            return {"type": "thinking_delta", "thinking": text}
        case BlockKind.CALL:
            return {"type": "input_json_delta", "partial_json": text}


def _block_object(block: Block) -> Json:
    match block.kind:
        case BlockKind.TEXT:
            return {"type": "text", "text": block.text, "citations": None}
        case BlockKind.REASONING:
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case BlockKind.CALL:
            return {"type": "tool_use", "id": f"toolu_{block.key}", "name": block.name, "input": _arguments(block.text)}


def _arguments(text: str) -> object:
    try:
        return json.loads(text) if text else {}
    except ValueError:  # truncated, or not JSON: a mistake of the model
        return {}


def _end(reason: str, stop: int | str | None, blocks: Sequence[Block]) -> Json:
    if reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    is_call = any(block.kind is BlockKind.CALL for block in blocks)
    return {"stop_reason": "tool_use" if is_call else "end_turn", "stop_sequence": None}


def _counts(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _frame(head: ResponseHead) -> Json:
    return {"id": head.id, "type": "message", "role": "assistant", "model": head.model}


def _event(kind: str, content: Json) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **content}) + b"\n\n"

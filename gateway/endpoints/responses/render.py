"""Responses of /v1/responses, streamed as typed events and whole."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from common.errors import RequestFailedError
from gateway.delivery.collecting import FINISH_REASONS
from gateway.delivery.recorded_answer import CANCELLED
from gateway.endpoints.blocks import Block, BlockKind, BlockWriter, Closed, Grown, Opened
from gateway.endpoints.chat.render import logprobs_object
from gateway.endpoints.shapes import version_field

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.deltas import LogprobText
    from common.errors import PandoError
    from gateway.delivery.collecting import WholeChoice
    from gateway.endpoints.blocks import BlockEvent
    from gateway.generation.journal import ChoiceUpdate
    from gateway.generation.usage import Usage
    from gateway.parsing import ParsingRules

Json: TypeAlias = dict[str, Any]  # Any: free JSON


@dataclass(slots=True)
class ResponseDraft:
    """A response before its output is known: its id and the fields copied from its request."""

    id: str
    fields: Json
    with_logprobs: bool
    # Called with the finished response.
    keep: Callable[[Json], None]
    # Whether a response that has failed is finished, too.
    keeps_failures: bool = False

    def shape(self, status: str, output: list[Json], **more: object) -> Json:
        """Return the response as a JSON object."""
        return {
            "id": self.id,
            "object": "response",
            "status": status,
            "error": None,
            "incomplete_details": None,
            "completed_at": None,
            "output": output,
            "usage": None,
            **self.fields,
            **more,
        }

    def finished(self, reason: str, blocks: Sequence[Block], logprobs: list[LogprobText], ends: Json) -> Json:
        """Return the response with its output and the fields in `ends`, and pass it to `keep`."""
        is_cut = reason == "length"
        status = "incomplete" if is_cut else "completed"
        details = {"reason": "max_output_tokens"} if is_cut else None
        output = [item_object(block, "completed", self._of(block, logprobs)) for block in blocks]
        if is_cut and output:
            output[-1]["status"] = "incomplete"
        more = {**ends, "incomplete_details": details, "completed_at": int(time.time())}
        response = self.shape(status, output, **more)
        self.keep(response)
        return response

    def _of(self, block: Block, logprobs: list[LogprobText]) -> list[Json]:
        if not self.with_logprobs or block.kind is not BlockKind.TEXT:
            return []
        shape: Json = logprobs_object(logprobs)
        return list(shape["content"])


class WholeResponse:
    """Renders a response as one body."""

    def __init__(self, draft: ResponseDraft, reading: ParsingRules) -> None:
        """`reading` has the rules for parsing the output."""
        self._draft = draft
        self._reading = reading

    def body(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        [choice] = choices
        parser, writer, reasoning_tokens = self._reading.parser(), BlockWriter(self._draft.id), 0
        for text, tokens in zip(choice.text, choice.tokens, strict=True):
            reasoning_tokens += tokens * parser.is_thinking
            writer.write(parser.feed(text))
        writer.write(parser.flush())
        ends = {"usage": usage_counts(usage, reasoning_tokens), **version_field(usage)}
        return orjson.dumps(self._draft.finished(choice.finish_reason, writer.blocks, choice.logprobs, ends))


class ResponseStream:
    """Renders the numbered events of a response."""

    def __init__(self, draft: ResponseDraft, reading: ParsingRules) -> None:
        """`reading` has the rules for parsing the output."""
        self._draft = draft
        self._parser = reading.parser()
        self._writer = BlockWriter(draft.id)
        self._sequence = 0
        self._reasoning_tokens = 0
        self._logprobs: list[LogprobText] = []
        self._reason = "stop"

    def events(self, update: ChoiceUpdate) -> bytes:
        events = self._begin()
        self._reasoning_tokens += update.tokens * self._parser.is_thinking
        self._logprobs += update.logprobs
        pieces = [*self._parser.feed(update.text), *(self._parser.flush() if update.finish is not None else ())]
        changes = self._writer.write(pieces)
        if update.finish is not None:
            self._reason = FINISH_REASONS[update.finish.reason]
            changes += self._writer.close()
        return events + b"".join(map(self._change, changes))

    def ending(self, usage: Usage) -> bytes:
        """Return the last event, which contains the whole response."""
        ends = {"usage": usage_counts(usage, self._reasoning_tokens), **version_field(usage)}
        response = self._draft.finished(self._reason, self._writer.blocks, self._logprobs, ends)
        return self._begin() + self._event(f"response.{response['status']}", {"response": response})

    def failure(self, error: PandoError) -> bytes:
        """Return the event for a failure during the stream."""
        output = [item_object(block, "incomplete") for block in self._writer.blocks]
        if isinstance(error, RequestFailedError) and error.failure == CANCELLED:
            # OpenAI's API has no event of its own for this.
            response = self._draft.shape("cancelled", output)
            return self._begin() + self._event("response.incomplete", {"response": response})
        described = {"code": "server_error", "message": error.message}
        response = self._draft.shape("failed", output, error=described)
        if self._draft.keeps_failures:
            self._draft.keep(response)
        return self._begin() + self._event("response.failed", {"response": response})

    def _begin(self) -> bytes:
        if self._sequence:
            return b""
        response = {"response": self._draft.shape("in_progress", [])}
        return self._event("response.created", response) + self._event("response.in_progress", response)

    def _event(self, kind: str, content: Json) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence, **content}
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"

    def _change(self, change: BlockEvent) -> bytes:
        block = change.block
        name, place = _PARTS[block.kind], {"item_id": item_id(block), "output_index": change.number}
        if block.kind is not BlockKind.CALL:
            place["content_index"] = 0
        extra: Json = {"logprobs": []} if block.kind is BlockKind.TEXT else {}
        match change:
            case Opened():
                item = {"output_index": change.number, "item": item_object(block, "in_progress")}
                return self._event("response.output_item.added", item) + self._part("added", block, place)
            case Grown(_, _, text):
                return self._event(f"response.{name}.delta", {**place, "delta": text, **extra})
            case Closed():
                text_key = (
                    {"name": block.name, "arguments": block.text}
                    if block.kind is BlockKind.CALL
                    else {"text": block.text}
                )
                done = self._event(f"response.{name}.done", {**place, **text_key, **extra})
                item = {"output_index": change.number, "item": item_object(block, "completed")}
                return done + self._part("done", block, place) + self._event("response.output_item.done", item)

    def _part(self, state: str, block: Block, place: Json) -> bytes:
        if block.kind is BlockKind.CALL:
            return b""
        return self._event(f"response.content_part.{state}", {**place, "part": _part_object(block)})


_PARTS = {
    BlockKind.REASONING: "reasoning_text",
    BlockKind.TEXT: "output_text",
    BlockKind.CALL: "function_call_arguments",
}
_ID_PREFIXES = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}


def item_id(block: Block) -> str:
    """Return the item id of a block."""
    return f"{_ID_PREFIXES[block.kind]}_{block.key}"


def item_object(block: Block, status: str, logprobs: Sequence[Json] = ()) -> Json:
    """Return a block as an item of a response's output."""
    match block.kind:
        case BlockKind.REASONING:
            content = [_part_object(block)] if block.text else []
            return {"id": item_id(block), "type": "reasoning", "summary": [], "content": content, "status": status}
        case BlockKind.TEXT:
            parts = [{**_part_object(block), "logprobs": list(logprobs)}] if status != "in_progress" else []
            return {"id": item_id(block), "type": "message", "status": status, "role": "assistant", "content": parts}
        case BlockKind.CALL:
            return {
                "id": item_id(block),
                "type": "function_call",
                "status": status,
                "call_id": f"call_{block.key}",
                "name": block.name,
                "arguments": block.text,
            }


def usage_counts(usage: Usage, reasoning_tokens: int) -> Json:
    """Return token counts in the shape of this API."""
    return {
        "input_tokens": usage.prompt_tokens,
        # Cache writes are not billed.
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _part_object(block: Block) -> Json:
    if block.kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}

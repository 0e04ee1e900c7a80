"""Chat completions, streamed and whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from gateway.endpoints.prompt_logprobs import by_id
from gateway.endpoints.shapes import DONE, FINISH_REASONS, failed_stream, finite_logprob, matched_stop, usage_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.deltas import LogprobText, TokenText
    from common.errors import PandoError
    from gateway.endpoints.shapes import ResponseHead, WholeChoice
    from gateway.generation.generation import Usage
    from gateway.generation.journal import ChoiceUpdate


class ChatChunks:
    """Frames chat chunks. Repeated parts are serialised once, because this runs for every token."""

    def __init__(self, head: ResponseHead, *, include_usage: bool) -> None:
        """`include_usage` adds a last chunk with token counts, and null counts to the others."""
        self._include_usage = include_usage
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

    def has_begun(self, index: int) -> bool:
        """Whether the role of choice `index` has been sent."""
        return index in self._prefixes

    def role(self, index: int, content: bytes = b'""') -> bytes:
        """Return the first chunk of a choice; `content` is JSON."""
        self._prefixes[index] = self._head + b'{"index":%d,"delta":' % index
        return self.delta(index, b'{"role":"assistant","content":' + content + b',"refusal":null}')

    def delta(self, index: int, delta: bytes, logprobs: bytes = b"null") -> bytes:
        """Return a chunk of a choice whose role has been sent; `delta` and `logprobs` are JSON."""
        return self._prefixes[index] + delta + b',"logprobs":' + logprobs + b',"finish_reason":null' + self._tail

    def finish(self, index: int, reason: str, stop: int | str | None) -> bytes:
        end = b'{},"logprobs":null,"finish_reason":' + orjson.dumps(reason) + b',"matched_stop":' + orjson.dumps(stop)
        return self._prefixes[index] + end + self._tail

    def ending(self, usage: Usage, reasoning_tokens: int = 0) -> bytes:
        """Return the usage chunk, if requested, and the end mark."""
        if not self._include_usage:
            return DONE
        counts = orjson.dumps(usage_object(usage, reasoning_tokens))
        return self._head + b'],"usage":' + counts + b"}\n\n" + DONE


class ChatStream:
    """Renders chat chunks of outputs that consist of text only."""

    def __init__(self, head: ResponseHead, *, logprobs: bool, include_usage: bool) -> None:
        self._logprobs = logprobs
        self._chunks = ChatChunks(head, include_usage=include_usage)

    def events(self, update: ChoiceUpdate) -> bytes:
        """Return the chunks for one update: the role once, then text, then the finish on its own."""
        chunks, index = self._chunks, update.index
        events = b"" if chunks.has_begun(index) else chunks.role(index)
        if update.text or (self._logprobs and update.logprobs):
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

    def __init__(self, head: ResponseHead, *, logprobs: bool, prompt_top: int | None = None) -> None:
        """`prompt_top` adds the prompt's log probabilities, with `prompt_top` alternatives at each position."""
        self._head = head
        self._logprobs = logprobs
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
        return orjson.dumps(answer | prompt_logprobs_field(choices, self._prompt_top))

    def _choice(self, index: int, choice: WholeChoice) -> dict[str, object]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": logprobs_object(choice.logprobs) if self._logprobs else None,
            "finish_reason": choice.finish_reason,
            "matched_stop": choice.matched_stop,
        }


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

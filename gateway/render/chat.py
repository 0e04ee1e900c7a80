"""Chat completions, streamed and whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from gateway.render.shapes import DONE, FINISH_REASONS, finite_logprob, usage_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.deltas import LogprobText, TokenText
    from gateway.generation import Usage
    from gateway.journal import ChoiceUpdate
    from gateway.render.shapes import ResponseHead, WholeChoice


class ChatStream:
    """Writes chat chunks. Everything that repeats is serialised once, because this runs for every token."""

    def __init__(self, head: ResponseHead, *, logprobs: bool, include_usage: bool) -> None:
        """Prepare the stream; `include_usage` adds a last chunk with token counts, and null counts to the others."""
        self._logprobs = logprobs
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
        # By choice index: the start of a chunk up to the delta.
        self._prefixes: dict[int, bytes] = {}

    def events(self, update: ChoiceUpdate) -> bytes:
        """Return the chunks for one update: the role once, then text, then the finish on its own."""
        prefix = self._prefixes.get(update.index)
        events = b""
        if prefix is None:
            prefix = self._prefixes[update.index] = self._head + b'{"index":%d,"delta":' % update.index
            role = b'{"role":"assistant","content":"","refusal":null}'
            events = prefix + role + b',"logprobs":null,"finish_reason":null' + self._tail
        if update.text or (self._logprobs and update.logprobs):
            logprobs = orjson.dumps(logprobs_object(update.logprobs)) if self._logprobs else b"null"
            delta = b'{"content":' + orjson.dumps(update.text) + b'},"logprobs":' + logprobs
            events += prefix + delta + b',"finish_reason":null' + self._tail
        if update.finish is not None:
            reason = orjson.dumps(FINISH_REASONS[update.finish.reason])
            events += prefix + b'{},"logprobs":null,"finish_reason":' + reason + self._tail
        return events

    def ending(self, usage: Usage) -> bytes:
        """Return the usage chunk, if it was asked for, and the end mark."""
        if not self._include_usage:
            return DONE
        return self._head + b'],"usage":' + orjson.dumps(usage_object(usage)) + b"}\n\n" + DONE


class WholeChat:
    """Writes a chat completion in one piece."""

    def __init__(self, head: ResponseHead, *, logprobs: bool) -> None:
        """Prepare the body."""
        self._head = head
        self._logprobs = logprobs

    def body(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """Return the JSON body."""
        answer = {
            "id": self._head.id,
            "object": "chat.completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage_object(usage),
            "system_fingerprint": self._head.fingerprint,
        }
        return orjson.dumps(answer)

    def _choice(self, index: int, choice: WholeChoice) -> dict[str, object]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": logprobs_object(choice.logprobs) if self._logprobs else None,
            "finish_reason": choice.finish_reason,
        }


def logprobs_object(logprobs: Sequence[LogprobText]) -> dict[str, object]:
    """Return log probabilities in the chat endpoint's shape."""
    content = [{**_token(entry.token), "top_logprobs": [_token(token) for token in entry.top]} for entry in logprobs]
    return {"content": content, "refusal": None}


def _token(token: TokenText) -> dict[str, object]:
    return {
        "token": token.text.decode("utf-8", "replace"),
        "logprob": finite_logprob(token),
        "bytes": list(token.text),
    }

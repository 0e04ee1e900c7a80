"""Text completions, streamed and whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import orjson

from gateway.render.shapes import (
    DONE,
    FINISH_REASONS,
    failed_stream,
    finite_logprob,
    matched_stop,
    token_string,
    usage_object,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.deltas import LogprobText
    from common.errors import PandoError
    from gateway.generation import Usage
    from gateway.journal import ChoiceUpdate
    from gateway.render.shapes import ResponseHead, WholeChoice, WholeRenderer


@dataclass(slots=True)
class _StreamedChoice:
    """What one choice's chunks repeat, its echoed prompt until that is sent, and the characters of its tokens."""

    prefix: bytes
    echo: str
    offset: int = field(default=0)


class CompletionStream:
    """Writes completion chunks: one per update, the finish in the last one, because benchmarks count chunks."""

    def __init__(
        self, head: ResponseHead, *, logprobs: bool, include_usage: bool, echoes: Sequence[str] | None = None
    ) -> None:
        """Prepare the stream; `echoes` are texts to send before each choice's own, by choice index."""
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._echoes = echoes
        self._head = b"data: " + orjson.dumps(_common(head))[:-1] + b',"choices":['
        self._tail = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._choices: dict[int, _StreamedChoice] = {}

    def events(self, update: ChoiceUpdate) -> bytes:
        """Return the chunk for one update; nothing if it has neither text nor logprobs nor the end."""
        choice = self._choices.get(update.index)
        if choice is None:
            prefix = self._head + b'{"index":%d,"text":' % update.index
            echo = self._echoes[update.index] if self._echoes else ""
            choice = self._choices[update.index] = _StreamedChoice(prefix, echo)
        text, choice.echo = choice.echo + update.text, ""
        with_logprobs = self._logprobs and bool(update.logprobs)
        if not text and not with_logprobs and update.finish is None:
            return b""
        logprobs = b"null"
        if with_logprobs:
            shape, choice.offset = logprobs_object(update.logprobs, choice.offset)
            logprobs = orjson.dumps(shape)
        reason = b"null" if update.finish is None else orjson.dumps(FINISH_REASONS[update.finish.reason])
        delta = orjson.dumps(text) + b',"logprobs":' + logprobs + b',"finish_reason":' + reason
        if update.finish is not None:
            delta += b',"matched_stop":' + orjson.dumps(matched_stop(update.finish))
        return choice.prefix + delta + self._tail

    def ending(self, usage: Usage) -> bytes:
        """Return the usage chunk, if it was asked for, and the end mark."""
        if not self._include_usage:
            return DONE
        return self._head + b'],"usage":' + orjson.dumps(usage_object(usage)) + b"}\n\n" + DONE

    def failure(self, error: PandoError) -> bytes:
        """Return what tells of a failure in the middle."""
        return failed_stream(error)


class WholeCompletion:
    """Writes a completion in one piece."""

    def __init__(self, head: ResponseHead, *, logprobs: bool, echoes: Sequence[str] | None = None) -> None:
        """Prepare the body; `echoes` are texts to put before each choice's own, by choice index."""
        self._head = head
        self._logprobs = logprobs
        self._echoes = echoes

    def body(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """Return the JSON body."""
        rendered = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return orjson.dumps({**_common(self._head), "choices": rendered, "usage": usage_object(usage)})

    def _choice(self, index: int, choice: WholeChoice) -> dict[str, object]:
        echo = self._echoes[index] if self._echoes else ""
        return {
            "index": index,
            "text": echo + "".join(choice.text),
            "logprobs": logprobs_object(choice.logprobs, 0)[0] if self._logprobs else None,
            "finish_reason": choice.finish_reason,
            "matched_stop": choice.matched_stop,
        }


class BestOf:
    """Keeps of every prompt's choices those with the highest log probability per token, best first."""

    def __init__(self, renderer: WholeRenderer, generated: int, returned: int) -> None:
        """Hand `returned` of each `generated` choices to `renderer`."""
        self._renderer = renderer
        self._generated = generated
        self._returned = returned

    def body(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """Return the JSON body; its token counts are those of all choices."""
        kept: list[WholeChoice] = []
        for first in range(0, len(choices), self._generated):
            ranked = sorted(choices[first : first + self._generated], key=_mean_logprob, reverse=True)
            kept += ranked[: self._returned]
        return self._renderer.body(kept, usage)


def _mean_logprob(choice: WholeChoice) -> float:
    values = [finite_logprob(entry.token) for entry in choice.logprobs]
    return sum(values) / len(values) if values else float("-inf")


def logprobs_object(logprobs: Sequence[LogprobText], offset: int) -> tuple[dict[str, object], int]:
    """Return log probabilities in the legacy shape, and the text offset behind them; `offset` is that before them."""
    tokens, offsets = [], []
    for entry in logprobs:
        tokens.append(token_string(entry.token))
        offsets.append(offset)
        offset += len(entry.token.text.decode("utf-8", "replace"))
    shape: dict[str, object] = {
        "tokens": tokens,
        "token_logprobs": [finite_logprob(entry.token) for entry in logprobs],
        "top_logprobs": [_top(entry) for entry in logprobs],
        "text_offset": offsets,
    }
    return shape, offset


def _top(entry: LogprobText) -> dict[str, float]:
    """Return the most likely tokens, and the sampled one even where it is not among them."""
    return {token_string(token): finite_logprob(token) for token in (entry.token, *entry.top)}


def _common(head: ResponseHead) -> dict[str, object]:
    return {
        "id": head.id,
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
    }

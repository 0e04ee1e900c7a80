"""Text completions, streamed and whole."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import orjson

from gateway.delivery.collecting import FINISH_REASONS, PromptScores, matched_stop
from gateway.endpoints.shapes import (
    DONE,
    by_id,
    failed_stream,
    finite_logprob,
    token_string,
    usage_object,
    version_field,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.deltas import LogprobText
    from common.errors import PandoError
    from gateway.delivery.collecting import WholeChoice
    from gateway.delivery.deliveries import WholeRenderer
    from gateway.endpoints.shapes import ResponseHead
    from gateway.generation.journal import ChoiceUpdate
    from gateway.generation.usage import Usage


@dataclass(slots=True)
class _StreamedChoice:
    """The repeated prefix of one choice's chunks, its echoed prompt until that is sent, and the characters so far."""

    prefix: bytes
    echo: str
    offset: int = field(default=0)


@dataclass(frozen=True, slots=True)
class Echo:
    """The echoed prompts: the text for each choice, and the number of alternatives per token, if requested."""

    texts: Sequence[str]
    top: int | None = None


class PromptsFirst:
    """Holds back updates of choices until the log probabilities of their prompts are complete."""

    def __init__(self, choices: int, choices_per_prompt: int) -> None:
        self._choices_per_prompt = choices_per_prompt
        self._scores = [PromptScores() for _ in range(choices // choices_per_prompt)]
        self._held: dict[int, list[ChoiceUpdate]] = {}

    def of(self, index: int) -> PromptScores:
        """Return the log probabilities received for the prompt of choice `index`."""
        return self._scores[index // self._choices_per_prompt]

    def pass_through(self, update: ChoiceUpdate) -> Sequence[ChoiceUpdate]:
        """Process an update; return the updates that may be sent now."""
        prompt, scores = update.index // self._choices_per_prompt, self.of(update.index)
        held = self._held.setdefault(prompt, [])
        if update.prompt_logprobs is not None:
            scores.add(update.prompt_logprobs)
        if update.prompt_logprobs is None or update.tokens or update.finish is not None:
            held.append(update)
        if not scores.is_complete:
            return ()
        return self._held.pop(prompt)


class CompletionStream:
    """Renders completion chunks: one per update, the finish in the last one, because benchmarks count chunks."""

    def __init__(
        self,
        head: ResponseHead,
        *,
        logprobs: bool,
        include_usage: bool,
        echo: Echo | None = None,
        choices_per_prompt: int = 1,
        token_ids: bool = False,
    ) -> None:
        """With `echo`, each choice begins with its prompt; `token_ids` adds the ids of prompt and output."""
        self._logprobs = logprobs
        self._has_ids = token_ids
        self._include_usage = include_usage
        self._echo = echo
        is_scored = echo is not None and echo.top is not None
        self._prompts = PromptsFirst(len(echo.texts), choices_per_prompt) if echo and is_scored else None
        self._head = b"data: " + orjson.dumps(_common(head))[:-1] + b',"choices":['
        self._tail = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._choices: dict[int, _StreamedChoice] = {}

    def events(self, update: ChoiceUpdate) -> bytes:
        """Return the chunk for one update; empty without text, log probabilities and finish."""
        if self._prompts is None:
            return self._chunk(update, self._choices.get(update.index) or self._begin(update.index))
        chunks = b""
        for shown in self._prompts.pass_through(update):
            choice = self._choices.get(shown.index)
            chunks += self._scored_echo(shown.index) if choice is None else b""
            chunks += self._chunk(shown, self._choices[shown.index])
        return chunks

    def _begin(self, index: int) -> _StreamedChoice:
        prefix = self._head + b'{"index":%d,"text":' % index
        choice = self._choices[index] = _StreamedChoice(prefix, self._echo.texts[index] if self._echo else "")
        return choice

    def _scored_echo(self, index: int) -> bytes:
        """Return the chunk with a choice's prompt and its log probabilities."""
        assert self._prompts is not None
        assert self._echo is not None
        choice, scores = self._begin(index), self._prompts.of(index)
        shape, choice.offset = legacy_object(scores, self._echo.top or 0, choice.echo)
        text, choice.echo = choice.echo, ""
        delta = orjson.dumps(text) + b',"logprobs":' + orjson.dumps(shape) + b',"finish_reason":null'
        return choice.prefix + delta + self._tail

    def _chunk(self, update: ChoiceUpdate, choice: _StreamedChoice) -> bytes:
        text, choice.echo = choice.echo + update.text, ""
        with_logprobs = self._logprobs and bool(update.logprobs)
        ids = _ids_of(update) if self._has_ids else b""
        if not text and not with_logprobs and update.finish is None and not ids:
            return b""
        logprobs = b"null"
        if with_logprobs:
            shape, choice.offset = logprobs_object(update.logprobs, choice.offset)
            logprobs = orjson.dumps(shape)
        reason = b"null" if update.finish is None else orjson.dumps(FINISH_REASONS[update.finish.reason])
        delta = orjson.dumps(text) + b',"logprobs":' + logprobs + b',"finish_reason":' + reason
        if update.finish is not None:
            delta += b',"matched_stop":' + orjson.dumps(matched_stop(update.finish))
        return choice.prefix + delta + ids + self._tail

    def ending(self, usage: Usage) -> bytes:
        """Return the usage chunk, if requested, and the end mark."""
        if not self._include_usage:
            return DONE
        rest = {"usage": usage_object(usage), **version_field(usage)}
        return self._head + b"]," + orjson.dumps(rest).removeprefix(b"{") + b"\n\n" + DONE

    def failure(self, error: PandoError) -> bytes:
        """Return the event for a failure during the stream, and the end mark."""
        return failed_stream(error)


def _ids_of(update: ChoiceUpdate) -> bytes:
    """Return the fields with the ids of an update, each with a comma before it."""
    prompt = b',"prompt_token_ids":' + orjson.dumps(list(update.prompt_ids)) if update.prompt_ids else b""
    return prompt + (b',"token_ids":' + orjson.dumps(list(update.token_ids)) if update.token_ids else b"")


class WholeCompletion:
    """Renders a completion as one body."""

    def __init__(
        self,
        head: ResponseHead,
        *,
        logprobs: bool,
        echo: Echo | None = None,
        prompt_top: int | None = None,
        token_ids: bool = False,
    ) -> None:
        """With `echo`, each choice begins with its prompt; `token_ids` adds the ids of prompt and output.

        With `prompt_top`, log probabilities of the prompt are included, with `prompt_top` alternatives at each
        position.
        """
        self._has_ids = token_ids
        self._head = head
        self._logprobs = logprobs
        self._echo = echo
        self._prompt_top = prompt_top

    def body(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        rendered = [self._choice(index, choice) for index, choice in enumerate(choices)]
        rest = {"choices": rendered, "usage": usage_object(usage), **version_field(usage)}
        return orjson.dumps({**_common(self._head), **rest})

    def _choice(self, index: int, choice: WholeChoice) -> dict[str, object]:
        shape: dict[str, object] = {
            "index": index,
            "text": (self._echo.texts[index] if self._echo else "") + "".join(choice.text),
            "logprobs": self._logprobs_of(index, choice) if self._logprobs else None,
            "finish_reason": choice.finish_reason,
            "matched_stop": choice.matched_stop,
        }
        if self._prompt_top is not None and choice.prompt is not None:
            shape["prompt_logprobs"] = by_id(choice.prompt, self._prompt_top)
        if self._has_ids:
            shape |= {"token_ids": choice.token_ids, "prompt_token_ids": list(choice.prompt_ids) or None}
        return shape

    def _logprobs_of(self, index: int, choice: WholeChoice) -> dict[str, list[object]]:
        if self._echo is None or self._echo.top is None or choice.prompt is None:
            return logprobs_object(choice.logprobs, 0)[0]
        prompt, offset = legacy_object(choice.prompt, self._echo.top, self._echo.texts[index])
        generated, _ = logprobs_object(choice.logprobs, offset)
        return {name: prompt[name] + generated[name] for name in prompt}


class BestOf:
    """Keeps those choices of every prompt that have the highest mean log probability per token, best first."""

    def __init__(self, renderer: WholeRenderer, generated: int, returned: int) -> None:
        """Pass `returned` of each `generated` choices to `renderer`."""
        self._renderer = renderer
        self._generated = generated
        self._returned = returned

    def body(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """Return the JSON body; its token counts include all choices."""
        kept: list[WholeChoice] = []
        for first in range(0, len(choices), self._generated):
            ranked = sorted(choices[first : first + self._generated], key=_mean_logprob, reverse=True)
            kept += ranked[: self._returned]
        return self._renderer.body(kept, usage)


def _mean_logprob(choice: WholeChoice) -> float:
    values = [finite_logprob(entry.token) for entry in choice.logprobs]
    return sum(values) / len(values) if values else float("-inf")


def logprobs_object(logprobs: Sequence[LogprobText], offset: int) -> tuple[dict[str, list[object]], int]:
    """Return log probabilities in the legacy shape, and the text offset after them; the first has `offset`."""
    tokens: list[object] = []
    offsets: list[object] = []
    for entry in logprobs:
        tokens.append(token_string(entry.token))
        offsets.append(offset)
        offset += len(entry.token.text.decode("utf-8", "replace"))
    shape: dict[str, list[object]] = {
        "tokens": tokens,
        "token_logprobs": [finite_logprob(entry.token) for entry in logprobs],
        "top_logprobs": [legacy_top(entry, len(entry.top)) for entry in logprobs],
        "text_offset": offsets,
    }
    return shape, offset


def _common(head: ResponseHead) -> dict[str, object]:
    return {
        "id": head.id,
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
    }


def legacy_object(scores: PromptScores, top: int, echo: str) -> tuple[dict[str, list[object]], int]:
    """Return them in the shape of completions, for a prompt echoed as `echo`, and the text offset after it."""
    # A character that spans several tokens counts for its last token.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    lengths = [len(decoder.decode(token.text)) for token in scores.tokens]
    # Counted from the end, because the prompt's text may lack special tokens at its beginning.
    offsets, end = [], len(echo)
    for length in reversed(lengths):
        end = max(end - length, 0)
        offsets.append(end)
    nothing: list[object] = [None] if scores.lead else []
    shape: dict[str, list[object]] = {
        "tokens": [token_string(token) for token in scores.tokens],
        "token_logprobs": nothing + [finite_logprob(entry.token) for entry in scores.entries],
        "top_logprobs": nothing + [legacy_top(entry, top) for entry in scores.entries],
        "text_offset": list(reversed(offsets)),
    }
    return shape, len(echo)


def legacy_top(entry: LogprobText, top: int) -> dict[str, float]:
    """Return the most likely tokens, and the token itself even if it is not among them."""
    return {token_string(token): finite_logprob(token) for token in (entry.token, *entry.top[:top])}

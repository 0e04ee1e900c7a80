"""Responses of /generate, in SGLang's shape."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import orjson

from common.deltas import PromptUsage
from common.types import FinishReason
from gateway.delivery.collecting import PromptScores, WholeChoice, collect, matched_stop
from gateway.endpoints.shapes import DONE, LEAST_LOGPROB, failed_stream, finite_logprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.deltas import LogprobText
    from common.errors import PandoError
    from common.types import Finish
    from gateway.generation.journal import ChoiceUpdate
    from gateway.generation.usage import Usage


# What SGLang calls weights that have not been replaced.
DEFAULT_VERSION = "default"


@dataclass(slots=True)
class NativeShape:
    """The common parts of the answers to one request."""

    id: str
    choices_per_prompt: int
    logprobs: bool
    # The response to a batch is a list, even with a single prompt.
    is_batch: bool
    # Token ids whose log probabilities are requested.
    asked: tuple[int, ...] = ()
    started: float = field(default_factory=time.monotonic)

    def answer(
        self, index: int, choice: WholeChoice, finish: object, usage: PromptUsage, weight_version: str
    ) -> dict[str, object]:
        """Return the current state of one choice."""
        meta: dict[str, object] = {
            "id": self.id if not self.is_batch else f"{self.id}-{index}",
            "finish_reason": finish,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": len(choice.token_ids),
            "cached_tokens": usage.cached_tokens,
            "e2e_latency": time.monotonic() - self.started,
            "weight_version": weight_version or DEFAULT_VERSION,
        }
        if self.logprobs:
            meta["output_token_logprobs"] = [_triple(entry) for entry in choice.logprobs]
            meta["output_top_logprobs"] = [native_top(entry) for entry in choice.logprobs]
            # In a stream, only the last event contains the prompt's log probabilities.
            is_last = choice.prompt is not None and finish is not None
            scores = choice.prompt if choice.prompt is not None and is_last else PromptScores()
            meta["input_token_logprobs"] = native_triples(scores)
            meta["input_top_logprobs"] = native_tops(scores)
            if self.asked:
                meta["output_token_ids_logprobs"] = [asked_triples(entry, self.asked) for entry in choice.logprobs]
                meta["input_token_ids_logprobs"] = native_asked(scores, self.asked)
        return {"text": "".join(choice.text), "output_ids": choice.token_ids, "meta_info": meta}


class WholeNative:
    """Renders all answers as one body."""

    def __init__(self, shape: NativeShape) -> None:
        self._shape = shape

    def body(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """Return the JSON body: an object, or a list for a batch or several choices."""
        shape = self._shape
        answers = [
            shape.answer(
                index,
                choice,
                finish_object(choice),
                usage.prompts[index // shape.choices_per_prompt],
                usage.weight_version,
            )
            for index, choice in enumerate(choices)
        ]
        return orjson.dumps(answers if shape.is_batch or len(answers) > 1 else answers[0])


class NativeStream:
    """Renders events, each with the whole text so far."""

    def __init__(self, shape: NativeShape, prompts: int) -> None:
        """`prompts` is the number of prompts."""
        self._shape = shape
        scores = [PromptScores() for _ in range(prompts)]
        self._choices = [WholeChoice(prompt=prompt) for prompt in scores for _ in range(shape.choices_per_prompt)]
        self._usages = [PromptUsage(0, 0)] * len(self._choices)
        self._weight_version = ""

    def events(self, update: ChoiceUpdate) -> bytes:
        choice = self._choices[update.index]
        collect([update], self._choices)
        if update.prompt_logprobs is not None and not update.tokens and update.finish is None:
            self._note_usage(update)
            return b""
        self._note_usage(update)
        finish = None if update.finish is None else finish_of(update.finish, len(choice.token_ids))
        answer = self._shape.answer(update.index, choice, finish, self._usages[update.index], self._weight_version)
        if len(self._choices) > 1:
            answer["index"] = update.index
        return b"data: " + orjson.dumps(answer) + b"\n\n"

    def _note_usage(self, update: ChoiceUpdate) -> None:
        if update.prompt_usage is not None:
            self._usages[update.index] = update.prompt_usage
        self._weight_version = update.weight_version or self._weight_version

    def ending(self, usage: Usage) -> bytes:
        """Return the end mark."""
        return DONE

    def failure(self, error: PandoError) -> bytes:
        """Return the event for a failure during the stream, and the end mark."""
        return failed_stream(error)


def finish_object(choice: WholeChoice) -> dict[str, object]:
    """Return the finish reason of a whole choice."""
    if choice.finish_reason == "length":
        return {"type": "length", "length": len(choice.token_ids)}
    return {"type": "stop", "matched": choice.matched_stop}


def finish_of(finish: Finish, tokens: int) -> dict[str, object]:
    """Return the finish reason of a choice with `tokens` tokens."""
    if finish.reason is FinishReason.LENGTH:
        return {"type": "length", "length": tokens}
    return {"type": "stop", "matched": matched_stop(finish)}


def _triple(entry: LogprobText) -> list[object]:
    token = entry.token
    return [finite_logprob(token), token.token_id, token.text.decode("utf-8", "replace")]


def native_triples(scores: PromptScores) -> list[object]:
    """Return them in SGLang's shape: log probability, id, text."""
    tokens = [(None, scores.lead)] if scores.lead else []
    pairs = [*tokens, *((finite_logprob(entry.token), entry.token) for entry in scores.entries)]
    return [[value, token.token_id, token.text.decode("utf-8", "replace")] for value, token in pairs]


def native_tops(scores: PromptScores) -> list[object]:
    """Return the most likely tokens of each position in SGLang's shape."""
    nothing: list[object] = [None] if scores.lead else []
    return nothing + [native_top(entry) for entry in scores.entries]


def native_top(entry: LogprobText) -> list[object]:
    """Return the most likely tokens at one position."""
    return [[finite_logprob(token), token.token_id, token.text.decode("utf-8", "replace")] for token in entry.top]


def native_asked(scores: PromptScores, token_ids: Sequence[int]) -> list[object]:
    """Return the log probabilities of `token_ids` at each position in SGLang's shape."""
    nothing: list[object] = [None] if scores.lead else []
    return nothing + [asked_triples(entry, token_ids) for entry in scores.entries]


def asked_triples(entry: LogprobText, token_ids: Sequence[int]) -> list[object]:
    """Return the log probabilities of `token_ids` at one position."""
    return [[max(value, LEAST_LOGPROB), token_id, None] for value, token_id in zip(entry.asked, token_ids, strict=True)]

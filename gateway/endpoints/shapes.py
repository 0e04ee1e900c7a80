"""Common parts of the responses of several endpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from common.types import FinishReason
from gateway.server.errors import error_event

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from common.deltas import LogprobText, TokenText
    from common.errors import PandoError
    from common.types import Finish
    from gateway.endpoints.prompt_logprobs import PromptScores
    from gateway.generation.generation import Usage
    from gateway.generation.journal import ChoiceUpdate

DONE = b"data: [DONE]\n\n"

# JSON has no infinity; OpenAI's API returns this value for an impossible token.
LEAST_LOGPROB = -9999.0

FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Fields that all parts of one response repeat."""

    id: str
    created: int
    model: str
    fingerprint: str


@dataclass(slots=True)
class WholeChoice:
    """A choice that is collected until the response is sent as one body."""

    text: list[str] = field(default_factory=list)
    logprobs: list[LogprobText] = field(default_factory=list)
    finish_reason: str = "stop"
    matched_stop: int | str | None = None
    # See `Finish`.
    embedding: bytes | None = None
    # Number of tokens of each entry of `text`.
    tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    # Shared by all choices of a prompt.
    prompt: PromptScores | None = None


class StreamRenderer(Protocol):
    """Renders the events of one stream."""

    def events(self, update: ChoiceUpdate) -> bytes:
        """Return the events for one update; empty if they would contain nothing new."""

    def ending(self, usage: Usage) -> bytes:
        """Return the events after the last update, including the end mark."""

    def failure(self, error: PandoError) -> bytes:
        """Return the event for a failure during the stream, including the end mark."""


class PiecewiseRenderer(Protocol):
    """Renders a long response in pieces, each of which takes a short time."""

    def pieces(self, choices: Sequence[WholeChoice], usage: Usage) -> Iterator[bytes]:
        """Yield the JSON body."""


class WholeRenderer(Protocol):
    """Renders a response as one body."""

    def body(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """Return the JSON body."""


def failed_stream(error: PandoError) -> bytes:
    """Return the event for a failure during the stream, and the end mark."""
    return b"data: " + error_event(error) + b"\n\n" + DONE


def collect(updates: Iterable[ChoiceUpdate], choices: Sequence[WholeChoice]) -> None:
    """Add `updates` to their choices."""
    for update in updates:
        choice = choices[update.index]
        choice.text.append(update.text)
        choice.tokens.append(update.tokens)
        choice.token_ids.extend(update.token_ids)
        choice.logprobs.extend(update.logprobs)
        if update.prompt_logprobs is not None and choice.prompt is not None:
            choice.prompt.add(update.prompt_logprobs)
        if update.finish is not None:
            choice.finish_reason = FINISH_REASONS[update.finish.reason]
            choice.matched_stop = matched_stop(update.finish)
            choice.embedding = update.finish.embedding


def count_logprobs(updates: Iterable[ChoiceUpdate]) -> int:
    """Return the number of log probabilities of generated tokens in `updates`."""
    return sum(1 + len(entry.top) + len(entry.asked) for update in updates for entry in update.logprobs)


def matched_stop(finish: Finish) -> int | str | None:
    """Return the stop token or text that ended a choice; None if the model ended it."""
    return finish.matched_text if finish.matched_token_id is None else finish.matched_token_id


def usage_object(usage: Usage, reasoning_tokens: int = 0) -> dict[str, object]:
    """Return token counts in OpenAI's shape."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def token_string(token: TokenText) -> str:
    r"""Return the token as text; bytes that are only part of a character become `bytes:\xe2\x80`."""
    try:
        return token.text.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.text)


def finite_logprob(token: TokenText) -> float:
    """Return the log probability, limited to values that JSON can represent."""
    return max(token.logprob, LEAST_LOGPROB)

"""Collects the updates of a generation into whole choices, for responses that are sent as one body."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from common.deltas import LogprobText, PromptLogprobsText, TokenText
    from common.types import Finish
    from gateway.generation.journal import ChoiceUpdate

FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(slots=True)
class PromptScores:
    """The log probabilities received for one prompt, shared by all its choices."""

    # The first reported token, which has no log probability.
    lead: TokenText | None = None
    entries: list[LogprobText] = field(default_factory=list)
    is_complete: bool = False

    def add(self, part: PromptLogprobsText) -> None:
        """Append a part."""
        self.lead = part.lead or self.lead
        self.entries.extend(part.entries)
        self.is_complete = part.is_last

    @property
    def tokens(self) -> list[TokenText]:
        """All reported tokens."""
        return [*([self.lead] if self.lead else []), *(entry.token for entry in self.entries)]


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
    # If the request asks for them.
    prompt_ids: Sequence[int] = ()
    # Shared by all choices of a prompt.
    prompt: PromptScores | None = None


def collect(updates: Iterable[ChoiceUpdate], choices: Sequence[WholeChoice]) -> None:
    """Add `updates` to their choices."""
    for update in updates:
        choice = choices[update.index]
        choice.text.append(update.text)
        choice.tokens.append(update.tokens)
        choice.token_ids.extend(update.token_ids)
        choice.prompt_ids = update.prompt_ids or choice.prompt_ids
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
    """Return the id of the token, the stop text or the expression that ended a choice; None if none did."""
    return finish.matched_text if finish.matched_token_id is None else finish.matched_token_id

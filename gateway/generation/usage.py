"""Token counts of responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.deltas import PromptUsage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.generation.journal import JournalEntry


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one response."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    # One entry per prompt.
    prompts: tuple[PromptUsage, ...] = ()
    # Of the weights that computed the newest tokens; empty: not known.
    weight_version: str = ""
    # Tokens drafted from the requests' predictions.
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    # Tokens of the output that a grammar determined, and those of accepted drafts.
    forced_tokens: int = 0
    drafted_tokens: int = 0

    @property
    def total(self) -> int:
        """Tokens of prompts and output."""
        return self.prompt_tokens + self.completion_tokens

    def counts(self) -> dict[str, int]:
        """Return the totals, as fields of a log event."""
        return {name: getattr(self, name) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")}


def usage_of(entries: Sequence[JournalEntry]) -> Usage:
    """Return the token counts of requests so far."""
    choices = [choice for entry in entries for choice in entry.choices]
    finishes = [choice.finish for choice in choices if choice.finish is not None]
    prompts = tuple(entry.prompt_usage or PromptUsage(entry.prompt_tokens, 0) for entry in entries)
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in prompts),
        cached_tokens=sum(usage.cached_tokens for usage in prompts),
        completion_tokens=sum(entry.completion_tokens for entry in entries),
        prompts=prompts,
        weight_version=next((entry.weight_version for entry in reversed(entries) if entry.weight_version), ""),
        accepted_prediction_tokens=sum(finish.accepted_prediction_tokens for finish in finishes),
        rejected_prediction_tokens=sum(finish.rejected_prediction_tokens for finish in finishes),
        forced_tokens=sum(choice.forced_tokens for choice in choices),
        drafted_tokens=sum(choice.drafted_tokens for choice in choices),
    )

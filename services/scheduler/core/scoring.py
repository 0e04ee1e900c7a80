"""Passes a prompt's log probabilities from the workers to the detokenizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from common.prompt_logprobs import PromptLogprobs, PromptLogprobSpan, no_span

if TYPE_CHECKING:
    from common.types import TokenIds


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Log probabilities of some prompt tokens of a choice.

    `lead`, in the first part only, is the prompt token before the first one that has a log probability.
    """

    handle: int
    span: PromptLogprobSpan
    lead: int | None
    is_last: bool


class PromptScoring:
    """Tracks which log probabilities of a sequence's prompt are still to be reported."""

    __slots__ = ("_has_begun", "_next", "_prompt", "_wanted")

    def __init__(self, wanted: PromptLogprobs, prompt: TokenIds) -> None:
        """Start with the whole `wanted` range."""
        self._wanted = wanted
        self._prompt = prompt
        # Position of the next token to report.
        self._next = wanted.start + 1
        self._has_begun = False

    @property
    def remaining(self) -> PromptLogprobs | None:
        """The range that workers must report if the prompt is computed from now on; None: nothing."""
        return replace(self._wanted, start=self._next - 1) if self._next < len(self._prompt) else None

    @property
    def cacheable_tokens(self) -> int | None:
        """Number of leading tokens that may be matched in the cache, which never matches the last; None: no limit."""
        # Cached tokens are not computed, and the token before the next one to report has to be.
        return self._next if self._next < len(self._prompt) else None

    def begin(self, handle: int) -> PromptPart | None:
        """Return, once, a part without any log probabilities if none is to be computed; else None."""
        if self._has_begun or self.remaining:
            return None
        self._has_begun = True
        return self._part(handle, no_span(self._next))

    def take(self, handle: int, span: PromptLogprobSpan) -> PromptPart:
        """Return the part for a span from the workers; spans arrive in order."""
        assert span.first == self._next, f"expected position {self._next}, got {span.first}"
        part = self._part(handle, span)
        self._next = span.end
        self._has_begun = True
        return part

    def _part(self, handle: int, span: PromptLogprobSpan) -> PromptPart:
        start = self._wanted.start
        is_first = span.first == start + 1 and start < len(self._prompt)
        return PromptPart(handle, span, int(self._prompt[start]) if is_first else None, span.end >= len(self._prompt))

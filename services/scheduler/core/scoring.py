"""Log probabilities of a prompt on their way from the workers to the detokenizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from common.prompt_logprobs import PromptLogprobs, PromptLogprobSpan, no_span

if TYPE_CHECKING:
    from common.types import TokenIds


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Some of them for a choice; `lead` is the prompt token before the first that has one, in the first part."""

    handle: int
    span: PromptLogprobSpan
    lead: int | None
    is_last: bool


class PromptScoring:
    """What a sequence has yet to be told of its prompt's log probabilities."""

    __slots__ = ("_has_begun", "_next", "_prompt", "_wanted")

    def __init__(self, wanted: PromptLogprobs, prompt: TokenIds) -> None:
        """Begin with all that is `wanted`."""
        self._wanted = wanted
        self._prompt = prompt
        # Position of the next token to be told of.
        self._next = wanted.start + 1
        self._has_begun = False

    @property
    def remaining(self) -> PromptLogprobs | None:
        """What the workers are to report when the prompt is computed from now on; None: nothing more."""
        return replace(self._wanted, start=self._next - 1) if self._next < len(self._prompt) else None

    @property
    def cacheable_tokens(self) -> int | None:
        """So many leading tokens may be looked for in the cache, which never finds the last; None: any number."""
        # What is found is not computed, and the token before the next one has to be.
        return self._next if self._next < len(self._prompt) else None

    def begin(self, handle: int) -> PromptPart | None:
        """Return, once, what can be told before anything is computed: all, if no token is to be reported."""
        if self._has_begun or self.remaining:
            return None
        self._has_begun = True
        return self._part(handle, no_span(self._next))

    def take(self, handle: int, span: PromptLogprobSpan) -> PromptPart:
        """Return what a span from the workers tells; spans come in order."""
        assert span.first == self._next, f"expected position {self._next}, got {span.first}"
        part = self._part(handle, span)
        self._next = span.end
        self._has_begun = True
        return part

    def _part(self, handle: int, span: PromptLogprobSpan) -> PromptPart:
        start = self._wanted.start
        is_first = span.first == start + 1 and start < len(self._prompt)
        return PromptPart(handle, span, int(self._prompt[start]) if is_first else None, span.end >= len(self._prompt))

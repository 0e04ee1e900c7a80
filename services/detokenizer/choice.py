"""The conversion of one choice from ids to text."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from common.deltas import Delta, PromptUsage, TokenOrigin
from common.tracing import record
from common.types import Finish, FinishReason
from services.detokenizer.stops import PatternStopMatcher, StopAutomaton, StopMatcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.deltas import CachedPart, LogprobText, PromptLogprobsText
    from common.types import Resume
    from services.detokenizer.decoding import IncrementalDecoder
    from services.detokenizer.mailbox import Mailbox
    from services.detokenizer.messages import ChoiceSpec

# Finishes after which the text is complete. After others the choice may be resumed, so held-back text is not sent.
_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)


class Choice:
    """The decoder, stop matcher and counters of one open choice."""

    __slots__ = (
        "_decoder",
        "_include_stop_text",
        "_index",
        "_matcher",
        "_min_tokens",
        "_opened_at",
        "_trace",
        "_undelivered",
        "_unskipped",
        "_usage",
        "batch",
        "handle",
        "logprobs",
        "mailbox",
        "origins",
        "request_id",
        "tokens",
    )

    def __init__(self, spec: ChoiceSpec, decoder: IncrementalDecoder, mailbox: Mailbox) -> None:
        """Begin the choice, or resume an interrupted one by decoding its ids without output.

        Raises:
            InvalidRequestError: a stop pattern is invalid.
        """
        self.handle = spec.handle
        self.mailbox = mailbox
        # Tokens of the current push.
        self.batch: list[int] = []
        self.logprobs: list[LogprobText] = []
        # The origin of each token of the current push; empty: all are sampled.
        self.origins: list[int] = []
        # Generated tokens so far, including those of the interrupted predecessor.
        self.tokens = 0
        self.request_id = spec.request_id
        self._index = spec.choice_index
        self._trace = spec.trace
        self._opened_at = 0.0
        self._min_tokens = spec.min_tokens
        self._include_stop_text = spec.include_stop_text
        self._decoder = decoder
        self._matcher = _matcher_of(spec)
        self._usage: PromptUsage | None = PromptUsage(spec.prompt_tokens, 0)
        # Text of the predecessor's ids that its client did not receive; characters that it received beyond this text.
        self._undelivered = ""
        self._unskipped = 0
        if spec.resume is not None:
            self._replay(spec.resume)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string or pattern has ended the text."""
        return self._matcher is not None and self._matcher.matched is not None

    def start(self, cached_tokens: int, cached: tuple[CachedPart, ...] = ()) -> None:
        """Record the number of cached prompt tokens and their parts; called before the first token."""
        if self._usage is not None:
            self._usage = PromptUsage(self._usage.prompt_tokens, cached_tokens, cached)
        if self._trace is not None:
            self._opened_at = time.time()

    def record(self) -> None:
        """Report the span from the choice's start to its end."""
        if self._trace is not None and self._opened_at:
            attributes = {
                "pando.choice": self._index,
                "gen_ai.usage.output_tokens": self.tokens,
                "pando.stop_text": self.is_stopped,
            }
            record("detokenize", self._trace, self._opened_at, time.time(), attributes)

    def add_prompt_logprobs(self, part: PromptLogprobsText) -> Delta:
        """Return a delta with log probabilities of the prompt."""
        usage, self._usage = self._usage, None
        return Delta(self.request_id, self._index, self.tokens, (), "", (), usage, None, part)

    def advance(self, finish: Finish | None) -> Delta:
        """Decode the batch and return its delta; a `finish` marks it as the last batch.

        The choice has ended if the delta has a finish: the given one, or that of a stop string or pattern.
        """
        first, ids, logprobs = self.tokens, self.batch, self.logprobs
        self.batch, self.logprobs = [], []
        if self.is_stopped:  # within the text of the predecessor
            ids, logprobs = [], []
        text = self._decode(ids[:-1] if finish is not None and self._is_by_token(finish) else ids)
        if self.is_stopped:
            # Tokens after the match do not count.
            ids, logprobs = ids[: self.tokens - first], logprobs[: self.tokens - first]
        else:
            self.tokens = first + len(ids)
            if finish is not None and finish.reason in _COMPLETE:
                text += self._flush()
        matched = self._matcher.matched if self._matcher is not None else None
        if matched is not None:
            finish = Finish(FinishReason.STOP, matched_text=matched)
        if self._undelivered or self._unskipped:
            text = self._trim(text)
        usage, self._usage = self._usage, None
        delta = Delta(self.request_id, self._index, first, ids, text, logprobs, usage, finish)
        if not self.origins:
            return delta
        origins, self.origins = self.origins[: len(ids)], []
        return delta._replace(
            forced_tokens=origins.count(TokenOrigin.FORCED), drafted_tokens=origins.count(TokenOrigin.DRAFTED)
        )

    def _is_by_token(self, finish: Finish) -> bool:
        """Whether the last token ended the choice and does not belong to its text."""
        return finish.reason is FinishReason.STOP and finish.matched_text is None and not self._include_stop_text

    def _decode(self, token_ids: Sequence[int]) -> str:
        """Decode until a stop string or pattern matches; `tokens` counts the ids up to the match."""
        push, matcher = self._decoder.push, self._matcher
        if matcher is None:
            self.tokens += len(token_ids)
            return push(token_ids[0]) if len(token_ids) == 1 else "".join([push(token_id) for token_id in token_ids])
        shown = []
        for token_id in token_ids:
            self.tokens += 1
            shown.append(matcher.feed(push(token_id), armed=self.tokens >= self._min_tokens))
            if matcher.matched is not None:
                break
        return "".join(shown)

    def _flush(self) -> str:
        text = self._decoder.flush()
        if self._matcher is None:
            return text
        shown = self._matcher.feed(text, armed=self.tokens >= self._min_tokens)
        return shown if self._matcher.matched is not None else shown + self._matcher.flush()

    def _replay(self, resume: Resume) -> None:
        text = self._decode(resume.token_ids)
        self._undelivered = text[resume.delivered_characters :]
        self._unskipped = max(resume.delivered_characters - len(text), 0)

    def _trim(self, text: str) -> str:
        """Prepend text that the predecessor's client did not receive, or remove text that it did receive."""
        text, self._undelivered = self._undelivered + text, ""
        skipped = text[self._unskipped :]
        self._unskipped = max(self._unskipped - len(text), 0)
        return skipped


def _matcher_of(spec: ChoiceSpec) -> StopMatcher | PatternStopMatcher | None:
    if spec.stop_patterns:
        return PatternStopMatcher(spec.stop_patterns, spec.stop_strings, include_stop_text=spec.include_stop_text)
    if any(spec.stop_strings):
        return StopMatcher(StopAutomaton(spec.stop_strings), include_stop_text=spec.include_stop_text)
    return None

"""Pushes of schedulers and the responses to them, as values free of protobuf types."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.deltas import CachedPart
    from common.prompt_logprobs import PromptLogprobSpan
    from common.types import Finish, RequestId, Resume, SubscriberId, TokenLogprob, TraceContext


@dataclass(frozen=True, slots=True)
class ChoiceSpec:
    """A choice to open; see `ChoiceOpen` in protos/pando/v1/detokenizer.proto."""

    handle: int
    request_id: RequestId
    choice_index: int
    subscriber_id: SubscriberId
    stop_strings: tuple[str, ...] = ()
    include_stop_text: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    prompt_tokens: int = 0
    resume: Resume | None = None
    stop_patterns: tuple[str, ...] = ()
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True)
class Push:
    """The results of one step: `handles[i]` got `token_ids[i]`; `logprobs` by index i; `finishes` by handle.

    `starts` has the number of cached prompt tokens, by handle, of choices that were assigned a row, and `cached` their
    parts. `weight_version` names the weights that computed the tokens; empty: those of the push before. `origins` has
    a `TokenOrigin` for each token in a byte, or none if all were sampled.
    """

    opens: Sequence[ChoiceSpec] = ()
    handles: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    logprobs: Mapping[int, TokenLogprob] = field(default_factory=dict)
    finishes: Mapping[int, Finish] = field(default_factory=dict)
    starts: Mapping[int, int] = field(default_factory=dict)
    prompt_logprobs: Sequence[PromptLogprobsPart] = ()
    weight_version: str = ""
    cached: Mapping[int, tuple[CachedPart, ...]] = field(default_factory=dict)
    origins: bytes = b""


# The following are created for every push: named tuples cost a third of frozen dataclasses.


class PromptLogprobsPart(NamedTuple):
    """Log probabilities of a part of a choice's prompt; see `ChoicePromptLogprobs` in detokenizer.proto."""

    handle: int
    span: PromptLogprobSpan
    lead: int | None
    is_last: bool


class StopHit(NamedTuple):
    """A choice that ended because of stop text, with its number of generated tokens up to the match."""

    handle: int
    completion_tokens: int


class Answers(NamedTuple):
    """Handles that a scheduler must free: choices that ended because of stop text, and choices without a subscriber."""

    stop_hits: Sequence[StopHit]
    gone_handles: Sequence[int]

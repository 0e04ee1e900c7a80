"""What comes in with a push, and what its sender has to be told, as values without protobuf."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.prompt_logprobs import PromptLogprobSpan
    from common.types import Finish, RequestId, Resume, SubscriberId, TokenLogprob


@dataclass(frozen=True, slots=True)
class ChoiceSpec:
    """A choice that begins; see `ChoiceOpen` in the contract."""

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


@dataclass(frozen=True, slots=True)
class Push:
    """What one step produced: `handles[i]` got `token_ids[i]`; `logprobs` by that i; `finishes` by handle.

    `starts` are the cached prompt tokens, by handle, of choices that got a row.
    """

    opens: Sequence[ChoiceSpec] = ()
    handles: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    logprobs: Mapping[int, TokenLogprob] = field(default_factory=dict)
    finishes: Mapping[int, Finish] = field(default_factory=dict)
    starts: Mapping[int, int] = field(default_factory=dict)
    prompt_logprobs: Sequence[PromptPart] = ()


# The following are made for every push: named tuples cost a third of frozen dataclasses.


class PromptPart(NamedTuple):
    """Log probabilities of a part of a choice's prompt; see `ChoicePromptLogprobs` in the contract."""

    handle: int
    span: PromptLogprobSpan
    lead: int | None
    is_last: bool


class StopHit(NamedTuple):
    """A choice that ended by stop text, and how many generated tokens count."""

    handle: int
    completion_tokens: int


class Answers(NamedTuple):
    """What a pushing scheduler has to be told."""

    stop_hits: Sequence[StopHit]
    gone_handles: Sequence[int]

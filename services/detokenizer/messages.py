"""What comes in with a push and goes out to subscribers, as values without protobuf."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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


# The following are made for every row of every step: tuples cost a third of frozen dataclasses.


class TokenText(NamedTuple):
    """A token's log probability and its own bytes, which may be a part of a character."""

    token_id: int
    logprob: float
    text: bytes


class LogprobText(NamedTuple):
    """A generated token, and the most likely ones, best first."""

    token: TokenText
    top: tuple[TokenText, ...]


class PromptUsage(NamedTuple):
    """Length of a prompt, and how much of it came from the cache."""

    prompt_tokens: int
    cached_tokens: int


class Delta(NamedTuple):
    """What one step added to one choice."""

    request_id: RequestId
    choice_index: int
    # Generated tokens of the choice before this delta's.
    first_token_index: int
    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[LogprobText]
    prompt_usage: PromptUsage | None
    finish: Finish | None


class StopHit(NamedTuple):
    """A choice that ended by stop text, and how many generated tokens count."""

    handle: int
    completion_tokens: int


class Answers(NamedTuple):
    """What a pushing scheduler has to be told."""

    stop_hits: Sequence[StopHit]
    gone_handles: Sequence[int]

"""What detokenizers send to gateways, as values without protobuf.

They are made for every row of every step: named tuples cost a third of frozen dataclasses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.types import Finish, RequestId


class TokenText(NamedTuple):
    """A token's log probability and its own bytes, which may be a part of a character."""

    token_id: int
    logprob: float
    text: bytes


class LogprobText(NamedTuple):
    """A generated token, and the most likely ones, best first."""

    token: TokenText
    top: tuple[TokenText, ...] = ()
    # Log probabilities of the ids that the request named, in its order.
    asked: tuple[float, ...] = ()
    # Place of a prompt's token among all ids, from 1.
    rank: int | None = None


class PromptLogprobsText(NamedTuple):
    """Consecutive tokens of a prompt from position `first` on; `lead` is the token before, which has none.

    The lead comes in a choice's first part.
    """

    first: int
    entries: Sequence[LogprobText]
    lead: TokenText | None = None
    is_last: bool = False


class PromptUsage(NamedTuple):
    """Length of a prompt, and how much of it came from the cache."""

    prompt_tokens: int
    cached_tokens: int


class Delta(NamedTuple):
    """What one step added to one choice.

    `text` is what became certain: it may be empty and may belong to earlier tokens.
    """

    request_id: RequestId
    choice_index: int
    # Generated tokens of the choice before this delta's.
    first_token_index: int
    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[LogprobText] = ()
    prompt_usage: PromptUsage | None = None
    finish: Finish | None = None
    # Before the choice's first token.
    prompt_logprobs: PromptLogprobsText | None = None

"""The values that detokenizers send to gateways, free of protobuf types.

They are named tuples because one is created per row and step, at a third of the cost of a frozen dataclass.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.types import Finish, RequestId


class TokenText(NamedTuple):
    """A token's log probability and its bytes, which may be an incomplete UTF-8 character."""

    token_id: int
    logprob: float
    text: bytes


class LogprobText(NamedTuple):
    """A token with its log probability, and the most likely alternatives, best first."""

    token: TokenText
    top: tuple[TokenText, ...] = ()
    # Log probabilities of the ids that the request named, in the request's order.
    asked: tuple[float, ...] = ()
    # Rank of a prompt's token among all ids, from 1; None for generated tokens.
    rank: int | None = None


class PromptLogprobsText(NamedTuple):
    """Log probabilities of consecutive prompt tokens, starting at position `first`.

    `lead` is the token before them, which has no log probability; only a choice's first part carries it.
    """

    first: int
    entries: Sequence[LogprobText]
    lead: TokenText | None = None
    is_last: bool = False


class TokenOrigin(IntEnum):
    """Origin of an output token: sampled, determined by a grammar, or drafted and accepted."""

    SAMPLED = 0
    FORCED = 1
    DRAFTED = 2


# Tiers of the cache, the fastest first, and its levels of visibility, in their order on every path.
CACHE_TIERS = ("device", "host", "storage")
CACHE_LEVELS = ("public", "tenant", "private")


class CachedPart(NamedTuple):
    """Prompt tokens that came from one tier of the cache, at one level."""

    tier: str
    level: str
    tokens: int


class PromptUsage(NamedTuple):
    """Token counts of a prompt: all, those that came from the cache, and the parts of these (empty: not known)."""

    prompt_tokens: int
    cached_tokens: int
    cached: tuple[CachedPart, ...] = ()


class Delta(NamedTuple):
    """The output that one step added to one choice.

    `text` is the text that became final: it may be empty, and it may stem from tokens of earlier deltas.
    """

    request_id: RequestId
    choice_index: int
    # Number of tokens that the choice generated before this delta.
    first_token_index: int
    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[LogprobText] = ()
    prompt_usage: PromptUsage | None = None
    finish: Finish | None = None
    # Sent before the choice's first token.
    prompt_logprobs: PromptLogprobsText | None = None
    # The weights that computed the tokens, in the first and in the last delta of a choice; empty: not known.
    weight_version: str = ""
    # Of `token_ids`, those that a grammar determined, and those of accepted drafts.
    forced_tokens: int = 0
    drafted_tokens: int = 0

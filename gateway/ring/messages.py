"""What the gateway hears from the ring, as values without protobuf; what it asks for is in `common/requests.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.types import Finish, RequestId


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token's log probability and its own bytes, which may be a part of a character."""

    token_id: int
    logprob: float
    text: bytes


@dataclass(frozen=True, slots=True)
class LogprobText:
    """The sampled token, and the most likely ones, best first."""

    token: TokenText
    top: tuple[TokenText, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptUsage:
    """Length of a prompt, and how much of it was not computed again."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one choice; `first_token_index` counts the choice's generated tokens before it.

    `text` is what became certain: it may be empty and may belong to earlier tokens.
    """

    request_id: RequestId
    choice_index: int
    first_token_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[LogprobText, ...] = ()
    prompt_usage: PromptUsage | None = None
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served, and its limits."""

    name: str
    max_context_tokens: int
    vocabulary_size: int
    has_chat_template: bool
    created_unix_s: int


@dataclass(frozen=True, slots=True)
class Tokenization:
    """An encoded text; `tokens` are the vocabulary's entries, where the call returns them."""

    ids: tuple[int, ...]
    tokens: tuple[str, ...] = ()

    def without_strings(self) -> Tokenization:
        """Return the ids alone."""
        return Tokenization(self.ids)

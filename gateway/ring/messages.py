"""What the gateway sends into the ring and hears from it, as values without protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from common.types import CacheMode

if TYPE_CHECKING:
    from common.types import (
        Finish,
        Principal,
        RequestId,
        Resume,
        SamplingParams,
        StopConditions,
        TraceContext,
    )


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation; `tool_calls_json` is a JSON array of OpenAI tool call objects."""

    role: str
    content: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls_json: str | None = None
    reasoning_content: str | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the model's chat template."""

    messages: tuple[ChatMessage, ...]
    tools_json: tuple[str, ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_variables_json: str | None = None


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt that the client encoded itself."""

    ids: tuple[int, ...]


Prompt: TypeAlias = str | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt to continue, `n` times. `request_id` is unique for all time and the key of all that comes back."""

    request_id: RequestId
    principal: Principal
    model: str
    prompt: Prompt
    sampling: SamplingParams
    stop: StopConditions
    n: int = 1
    priority: int = 0
    cache_mode: CacheMode = CacheMode.DEFAULT
    skip_special_tokens: bool = True
    resume: Resume | None = None
    timeout_ms: int | None = None
    trace: TraceContext | None = None


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

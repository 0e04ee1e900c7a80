"""What gateways ask tokenizers for, as values without protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from common.types import CacheMode

if TYPE_CHECKING:
    from common.prompt_logprobs import PromptLogprobs
    from common.types import (
        Pooling,
        RequestId,
        Resume,
        SamplingParams,
        SessionTurn,
        StopConditions,
        TraceContext,
        View,
    )


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation; absent parts are absent for the template too."""

    role: str
    content: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    # A JSON array of OpenAI tool call objects.
    tool_calls_json: str | None = None
    reasoning_content: str | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the model's chat template. JSON is parsed where the template runs, off the event loop."""

    messages: tuple[ChatMessage, ...]
    # Each an OpenAI tool object.
    tools_json: tuple[str, ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    # One object with extra variables for the template.
    template_variables_json: str | None = None
    # What the answer shall begin with.
    assistant_prefix: str | None = None


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt that the client encoded itself."""

    ids: tuple[int, ...]


# A `str` is a text to continue.
Prompt: TypeAlias = str | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt to continue, `n` times. `request_id` is unique for all time and the key of all that comes back."""

    request_id: RequestId
    view: View
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
    # The conversation it belongs to, within its view.
    session: str | None = None
    turn: SessionTurn | None = None
    max_context_tokens: int | None = None
    # Set: the prompt is embedded, and nothing is generated.
    pooling: Pooling | None = None
    # What the client calls its prompt, for errors about it.
    prompt_name: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    # Whether the prompt gets what the model's post-processor adds; None: texts do, chats don't.
    add_special_tokens: bool | None = None
    # Keep so many tokens of the prompt, the last ones.
    truncate_prompt_tokens: int | None = None
    # Texts that are not to be generated.
    bad_words: tuple[str, ...] = ()
    # Where there are several scheduler groups, requests of one view with equal keys go to the same one.
    routing_key: str | None = None

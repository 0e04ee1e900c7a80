"""The tokenizer's answers to the gateway, as values without protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.types import Pooling

if TYPE_CHECKING:
    from common.types import ReasoningStyle, ToolStyle


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model's name, limits and capabilities."""

    name: str
    max_context_tokens: int
    vocabulary_size: int
    has_chat_template: bool
    created_unix_s: int
    # None: the chat template does not support tools.
    tool_style: ToolStyle | None = None
    # None: the model marks no reasoning.
    reasoning_style: ReasoningStyle | None = None
    # Whether the prompt opens the reasoning: by itself, if the request asks for reasoning, and if it asks for none.
    begins_with_reasoning: bool = False
    begins_with_reasoning_on_request: bool = False
    begins_with_reasoning_although_off: bool = False
    reads_reasoning_effort: bool = False
    # Why requests with tools are refused.
    tools_problem: str | None = None
    # The model only embeds.
    is_encoder: bool = False
    # The default pooling of embeddings.
    pooling: Pooling = Pooling.LAST
    embedding_dimensions: int = 0


@dataclass(frozen=True, slots=True)
class Tokenization:
    """An encoded text; `tokens` are the vocabulary's entries, where the call returns them."""

    ids: tuple[int, ...]
    tokens: tuple[str, ...] = ()

    def without_strings(self) -> Tokenization:
        """Return a copy that has the ids only."""
        return Tokenization(self.ids)

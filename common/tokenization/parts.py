"""The common result of the readers of model directories, GGUF files and placeholders."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from common.types import Pooling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenizers import Tokenizer

    from common.heads import Head


class PairStyle(Enum):
    """The notation of a pair of texts: as the tokenizer joins two, or the prompt of Qwen3-Reranker."""

    TOKENIZER = "tokenizer"
    QWEN3_RERANKER = "qwen3_reranker"


@dataclass(frozen=True, slots=True)
class EmbeddingTraits:
    """Use of a model's hidden states: embeddings of `dimensions` components, or a head."""

    is_encoder: bool = False
    # The default of requests.
    pooling: Pooling = Pooling.LAST
    dimensions: int = 0
    # The model is made for embeddings.
    only_embeds: bool = False
    # The model serves nothing but this classification head.
    head: Head | None = None
    pair_style: PairStyle = PairStyle.TOKENIZER
    # Texts that are put before those to embed, by name; and the name of the one for requests that name none.
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None

    @property
    def generates(self) -> bool:
        """Whether the model can generate."""
        return not (self.is_encoder or self.only_embeds or self.head)


NO_TRAITS = EmbeddingTraits()


@dataclass(frozen=True, slots=True)
class TextParts:
    """A model's tokenizer, chat templates and limits, as read from its files."""

    tokenizer: Tokenizer
    chat_templates: Mapping[str, str]
    special_tokens: Mapping[str, str]
    # None: not in the files.
    max_context_tokens: int | None
    # Rows of the embedding; 0: not in the files.
    vocabulary_size: int
    embedding: EmbeddingTraits = NO_TRAITS

"""The common result of the readers of model directories, GGUF files and placeholders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.types import Pooling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class EmbeddingTraits:
    """Properties of a model's embeddings, which have `dimensions` components; an encoder can only embed."""

    is_encoder: bool = False
    # The default of requests.
    pooling: Pooling = Pooling.LAST
    dimensions: int = 0


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

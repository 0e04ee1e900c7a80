"""What the readers of the different model forms hand back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.types import Pooling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class EmbeddingTraits:
    """How a model embeds: `dimensions` components each; an encoder can do nothing else."""

    is_encoder: bool = False
    # Unless a request says otherwise.
    pooling: Pooling = Pooling.LAST
    dimensions: int = 0


NO_TRAITS = EmbeddingTraits()


@dataclass(frozen=True, slots=True)
class TextParts:
    """A model's text side as its files state it."""

    tokenizer: Tokenizer
    chat_templates: Mapping[str, str]
    special_tokens: Mapping[str, str]
    # None: the files don't say.
    max_context_tokens: int | None
    # Rows of the embedding; 0: the files don't say.
    vocabulary_size: int
    embedding: EmbeddingTraits = NO_TRAITS

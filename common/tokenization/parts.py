"""What the readers of the different model forms hand back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenizers import Tokenizer


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

"""The vocabulary that grammars are compiled for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VocabularySource:
    """Where the vocabulary is that grammars are compiled for.

    `vocabulary_size` counts the logits, which may be more than the tokenizer's entries; `eos_token_ids` may end an
    output once its grammar is complete.
    """

    model: str
    load_format: str
    vocabulary_size: int
    eos_token_ids: tuple[int, ...]

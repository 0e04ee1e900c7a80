"""Writes small GGUF files with the `gguf` package, as llama.cpp's converters do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import gguf

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a small vocabulary with what a converter writes about them."""

    model: str
    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str] = ()
    scores: Sequence[float] = ()
    pre: str | None = None
    bos: int | None = None
    eos: int | None = None
    flags: dict[str, bool] = field(default_factory=dict)
    chat_template: str | None = None


def write(path: Path, vocabulary: Vocabulary, architecture: str = "llama", context: int | None = 512) -> Path:
    """Write a GGUF file without tensors."""
    writer = gguf.GGUFWriter(str(path), architecture)
    if context is not None:
        writer.add_context_length(context)
    writer.add_tokenizer_model(vocabulary.model)
    if vocabulary.pre is not None:
        writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.types))
    if vocabulary.merges:
        writer.add_token_merges(list(vocabulary.merges))
    if vocabulary.scores:
        writer.add_token_scores(list(vocabulary.scores))
    if vocabulary.bos is not None:
        writer.add_bos_token_id(vocabulary.bos)
    if vocabulary.eos is not None:
        writer.add_eos_token_id(vocabulary.eos)
    for key, value in vocabulary.flags.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path

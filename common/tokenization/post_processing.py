"""The special tokens that a tokenizer adds before and after a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers.processors import TemplateProcessing

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def set_framing(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `encode(add_special_tokens=True)` prepend `bos` and append `eos`, unless they are None."""
    special = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token is not None]
    template = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)

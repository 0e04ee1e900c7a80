"""A Llama small enough to load in no time, with random weights so large that no two tokens are nearly as likely."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 96


def save_tiny_llama(directory: Path, hidden_size: int = 64) -> None:
    """Write config.json and weights; each of four heads has a quarter of `hidden_size` dimensions."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden_size, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, eos_token_id=2,
        initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)

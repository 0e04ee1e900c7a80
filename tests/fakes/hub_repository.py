"""What a repository on a hub holds: a tiny random Llama with a vocabulary of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.services.worker.engine.families import save_model

if TYPE_CHECKING:
    from pathlib import Path

# Enough layers for weights of 30 MB, of which the hub's client writes 10 MB at a time.
SHAPE = {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}


def save_repository(folder: Path, max_shard_size: str = "25MB") -> Path:
    """Save the files, the weights in two shards or more, and once more as a pickle; return their folder."""
    saved = save_model(folder, "Llama", SHAPE, max_shard_size=max_shard_size)
    specials = ["<pad>", "<s>", "<|end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|end|>")
    fast.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    fast.save_pretrained(saved)
    (saved / "pytorch_model.bin").write_bytes(b"pickle")
    return saved

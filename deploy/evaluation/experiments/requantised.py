"""Copies of a Llama with its matrices in other formats, rounded to nearest, as the usual tools would store them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from common.errors import ConfigurationError
from services.worker.engine.checkpoints.opening import open_checkpoint
from services.worker.engine.transformers_models.checkpoint import TransformersCheckpoint
from tests.services.worker.engine.quantization.stored_formats import SCHEMES, store_quantised

if TYPE_CHECKING:
    from pathlib import Path

    from services.worker.engine.model.config import ModelConfig

_MATRICES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_FEED_FORWARD = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")


def write_copy(model: str, scheme: str, directory: Path) -> Path:
    """Write the model with matrices in a scheme of the tests' to `directory`, which is returned.

    Raises:
        ConfigurationError: it is no plain Llama.
    """
    checkpoint = open_checkpoint(model, "auto")
    config = checkpoint.config
    if isinstance(checkpoint, TransformersCheckpoint) or config.family != "llama" or config.rotary.frequency_divisors:
        raise ConfigurationError(f"{model}: only a Llama without scaled rotary embedding is copied")
    names = ["model.embed_tokens", "model.norm", *([] if config.tied_embeddings else ["lm_head"])]
    parts = (*_MATRICES, *_FEED_FORWARD, *_NORMS)
    names += [f"model.layers.{layer}.{part}" for layer in range(config.layers) for part in parts]
    directory.mkdir()
    tensors = {f"{name}.weight": checkpoint.read(f"{name}.weight").contiguous() for name in names}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(_described(config)), encoding="utf-8")
    store_quantised(directory, SCHEMES[scheme])
    return directory


def _described(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.query_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary.theta,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": "bfloat16",
    }

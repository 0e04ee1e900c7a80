"""Writes a model of `transformers` as the converters of llama.cpp do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from services.worker.engine.checkpoints.gguf_file import gguf_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from services.worker.engine.model.config import ModelConfig


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, torch.Tensor],
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    **fields: Any,  # whatever a test wants to add
) -> Path:
    """Write `tensors`, named as in `transformers`; matrices are quantised."""
    arch = "qwen2" if config.family == "qwen2" else "qwen3" if config.family == "qwen3" else "llama"
    writer = GGUFWriter(path, arch)
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.query_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rotary.theta)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_token_list([f"token {i}" for i in range(config.vocabulary_size)])
    writer.add_eos_token_id(config.eos_token_ids[0])
    for key, value in fields.items():
        writer.add_key_value(key.replace("__", "."), *value)
    if config.rotary.frequency_divisors:
        writer.add_tensor("rope_freqs.weight", np.array(config.rotary.frequency_divisors, np.float32))
    for name, tensor in tensors.items():
        values = tensor.numpy().astype(np.float32)
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = values.reshape(-1, 2, config.head_dim // 2, *values.shape[1:])
            values = heads.swapaxes(1, 2).reshape(values.shape)
        kind = quantization if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

"""Seed-OSS: Llama with biases in the projections of queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from services.worker.engine.model.family import Family, GgufFamily
from services.worker.engine.model.gguf_fields import read_gguf_decoder
from services.worker.engine.model.json_fields import read_decoder

if TYPE_CHECKING:
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.model.family import JsonConfig
    from services.worker.engine.model.gguf_fields import GgufFields


def _read_seed(config: JsonConfig) -> ModelConfig:
    return replace(read_decoder(config), output_bias=config["attention_out_bias"])


def _gguf_seed(own: GgufFields) -> ModelConfig:
    return replace(read_gguf_decoder(own), qkv_bias=True)


FAMILIES = (
    Family(
        "seed_oss",
        "Seed-OSS",
        _read_seed,
        defaults={"head_dim": 128, "rms_norm_eps": 1e-6, "attention_bias": True, "attention_out_bias": False},
        gguf=GgufFamily("seed_oss", _gguf_seed, tensors={"post_attention_layernorm": "post_attention_norm"}),
    ),
)

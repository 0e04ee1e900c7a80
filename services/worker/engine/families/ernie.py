"""ERNIE 4.5: Llama whose heads are rotated in pairs side by side, and one option for all biases."""

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


def _read_ernie(config: JsonConfig) -> ModelConfig:
    return _as_ernie(read_decoder(config), has_biases=bool(config["use_bias"]))


def _gguf_ernie(own: GgufFields) -> ModelConfig:
    return _as_ernie(read_gguf_decoder(own), has_biases=own.has_tensor("attn_q.bias"))


def _as_ernie(read: ModelConfig, *, has_biases: bool) -> ModelConfig:
    return replace(
        read,
        rotary=replace(read.rotary, is_interleaved=True),
        qkv_bias=has_biases,
        output_bias=has_biases,
        mlp_bias=has_biases,
    )


FAMILIES = (
    Family(
        "ernie4_5",
        "ERNIE 4.5 (dense)",
        _read_ernie,
        defaults={
            "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "use_bias": False,
            "max_position_embeddings": 131_072, "tie_word_embeddings": True, "eos_token_id": 2,
        },
        gguf=GgufFamily("ernie4_5", _gguf_ernie),
    ),
)  # fmt: skip

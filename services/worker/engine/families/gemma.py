"""Gemma 3: norms of outputs, too, scaled embeddings, and windows in five of six layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from services.worker.engine.model.config import Activation, RotaryConfig
from services.worker.engine.model.family import Family, GgufFamily
from services.worker.engine.model.gguf_fields import read_gguf_decoder, read_gguf_windows
from services.worker.engine.model.json_fields import (
    FULL,
    SLIDING,
    read_decoder,
    read_local_rotary,
    read_windows,
    refuse,
)

if TYPE_CHECKING:
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.model.family import JsonConfig
    from services.worker.engine.model.gguf_fields import GgufFields

_PATTERN = 6
_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
# The one size of Gemma 3 whose scores are scaled by its width; GGUF files do not contain that.
_27B_LAYERS = 62


def _read_gemma3(config: JsonConfig) -> ModelConfig:
    refuse(config, "attn_logit_softcapping")
    read = read_decoder(config)
    rotary, local_rotary = read_local_rotary(config, read.head_dim, _THETA, _LOCAL_THETA)
    pattern = config.get("sliding_window_pattern", _PATTERN)
    kinds = [SLIDING if (i + 1) % pattern else FULL for i in range(read.layers)]
    return replace(
        _as_gemma(read),
        rotary=rotary,
        local_rotary=local_rotary,
        qk_norm=True,
        windows=read_windows(config, kinds, is_used=True),
        attention_scale=config["query_pre_attn_scalar"] ** -0.5,
        norm_offset=1.0,
        logits_softcap=config.get("final_logit_softcapping"),
    )


def _gguf_gemma3(own: GgufFields) -> ModelConfig:
    read = read_gguf_decoder(own)
    is_scaled_by_width = read.layers == _27B_LAYERS
    return replace(
        _as_gemma(read),
        local_rotary=RotaryConfig(own.get("rope.freq_base_swa", _LOCAL_THETA)),
        qk_norm=True,
        windows=read_gguf_windows(own, _PATTERN),
        attention_scale=(read.hidden_size / read.query_heads) ** -0.5 if is_scaled_by_width else None,
        activation=Activation.GELU_TANH,
        # Activations overflow in float16.
        dtype="bfloat16",
    )


def _as_gemma(read: ModelConfig) -> ModelConfig:
    return replace(read, embedding_scale=read.hidden_size**0.5, post_norms=True)


FAMILIES = (
    Family(
        "gemma3_text",
        _read_gemma3,
        wrappers=("gemma3",),
        defaults={
            "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096,
            "hidden_activation": "gelu_pytorch_tanh", "rope_theta": _THETA,
        },
        gguf=GgufFamily(
            "gemma3",
            _gguf_gemma3,
            # One name of other families is that of another norm here. Converters have added the one that norms lack.
            tensors={
                "post_attention_layernorm": "post_attention_norm",
                "pre_feedforward_layernorm": "ffn_norm",
                "post_feedforward_layernorm": "post_ffw_norm",
            },
        ),
    ),
)  # fmt: skip

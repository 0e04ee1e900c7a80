"""Gemma: scaled embeddings; from Gemma 2 on norms of outputs, too, and windows in every second layer or more."""

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
# The sizes whose scores are scaled by their width; GGUF files do not contain that.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
_TANH = Activation.GELU_TANH.value


def _read_gemma(config: JsonConfig) -> ModelConfig:
    # The published files say "gelu", but mean this.
    approximate = {"hidden_act": _TANH} if config["hidden_act"] == "gelu" else {}
    return replace(_as_gemma(read_decoder({**config, **approximate})), norm_offset=1.0, post_norms=False)


def _read_gemma2(config: JsonConfig) -> ModelConfig:
    read = read_decoder(config)
    kinds = [FULL if i % 2 else SLIDING for i in range(read.layers)]
    return replace(
        _as_gemma(read),
        windows=read_windows(config, kinds, is_used=True),
        attention_scale=config["query_pre_attn_scalar"] ** -0.5,
        attention_softcap=config["attn_logit_softcapping"],
        norm_offset=1.0,
        logits_softcap=config["final_logit_softcapping"],
    )


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


def _gguf_gemma(own: GgufFields) -> ModelConfig:
    return replace(_read_gguf(own), post_norms=False)


def _gguf_gemma2(own: GgufFields) -> ModelConfig:
    return replace(
        _read_gguf(own),
        windows=read_gguf_windows(own, 2),
        attention_scale=_gguf_scale(own, "gemma2"),
        attention_softcap=own.get("attn_logit_softcapping", 50.0),
    )


def _gguf_gemma3(own: GgufFields) -> ModelConfig:
    return replace(
        _read_gguf(own),
        local_rotary=RotaryConfig(own.get("rope.freq_base_swa", _LOCAL_THETA)),
        qk_norm=True,
        windows=read_gguf_windows(own, _PATTERN),
        attention_scale=_gguf_scale(own, "gemma3"),
    )


def _read_gguf(own: GgufFields) -> ModelConfig:
    # Converters have added the one that norms lack.
    return replace(_as_gemma(read_gguf_decoder(own)), activation=Activation.GELU_TANH)


def _gguf_scale(own: GgufFields, architecture: str) -> float | None:
    if own["block_count"] != _LAYERS_OF_27B[architecture]:
        return None
    return float((own["embedding_length"] / own["attention.head_count"]) ** -0.5)


def _as_gemma(read: ModelConfig) -> ModelConfig:
    return replace(read, embedding_scale=read.hidden_size**0.5, post_norms=True)


# One name of other families is that of another norm here.
_GGUF_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

FAMILIES = (
    Family(
        "gemma",
        "Gemma",
        _read_gemma,
        defaults={
            "vocab_size": 256_000, "hidden_size": 3072, "intermediate_size": 24_576, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": _TANH,
        },
        overflows_float16=True,
        gguf=GgufFamily("gemma", _gguf_gemma),
    ),
    Family(
        "gemma2",
        "Gemma 2",
        _read_gemma2,
        defaults={
            "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_activation": _TANH,
            "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        overflows_float16=True,
        gguf=GgufFamily("gemma2", _gguf_gemma2, tensors=_GGUF_NORMS),
    ),
    Family(
        "gemma3_text",
        "Gemma 3",
        _read_gemma3,
        wrappers=("gemma3",),
        defaults={
            "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_activation": _TANH,
            "query_pre_attn_scalar": 256, "sliding_window": 4096, "rope_theta": _THETA,
        },
        overflows_float16=True,
        gguf=GgufFamily("gemma3", _gguf_gemma3, tensors=_GGUF_NORMS),
    ),
)  # fmt: skip

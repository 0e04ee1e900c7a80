"""Gemma: scaled embeddings; from Gemma 2 on norms of outputs, too, and windows in every second layer or more."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from services.worker.engine.model.config import Activation, KvHeads, MoeConfig, RotaryConfig
from services.worker.engine.model.family import Family, GgufFamily
from services.worker.engine.model.gguf_fields import read_gguf_decoder, read_gguf_windows
from services.worker.engine.model.json_fields import (
    FULL,
    SLIDING,
    layer_windows,
    read_decoder,
    read_local_rotary,
    read_windows,
    refuse,
)
from services.worker.engine.model.rotary_config import read_rotary

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def _read_gemma4(config: JsonConfig) -> ModelConfig:
    # Only tokens of images look ahead.
    causal = {"use_bidirectional_attention": None} if config.get("use_bidirectional_attention") == "vision" else {}
    read = read_decoder({**config, **causal})
    kinds = list(
        config.get("layer_types") or [FULL if i % _PATTERN == _PATTERN - 1 else SLIDING for i in range(read.layers)]
    )
    # As `transformers` reads it.
    kinds[-1] = FULL
    heads, local_heads = _gemma4_heads(config, kinds)
    rotary, context = config["rope_parameters"], read.max_context
    return replace(
        _as_gemma(read),
        kv_heads=heads.count,
        head_dim=heads.dim,
        local_heads=local_heads,
        keys_are_values=bool(config["attention_k_eq_v"]),
        qk_norm=True,
        value_norm=True,
        rotary=read_rotary(rotary[FULL], _THETA, heads.dim, context),
        local_rotary=read_rotary(rotary.get(SLIDING) or {}, _LOCAL_THETA, local_heads.dim, context),
        windows=layer_windows(config["sliding_window"], kinds),
        attention_scale=1.0,
        has_layer_scales=True,
        logits_softcap=config.get("final_logit_softcapping"),
        moe=_read_gemma4_experts(config) if config.get("enable_moe_block") else None,
    )


def _gemma4_heads(config: JsonConfig, kinds: Sequence[str]) -> tuple[KvHeads, KvHeads]:
    """Return the heads of layers without and with a window."""
    count, dim = config["num_key_value_heads"], config["head_dim"]
    by_layer = config.get("per_layer_config")
    if by_layer is None:
        # What published files have; `transformers` writes an entry for each layer that differs.
        global_count = config.get("num_global_key_value_heads") if config["attention_k_eq_v"] else None
        return KvHeads(global_count or count, config["global_head_dim"]), KvHeads(count, dim)
    by_kind: dict[str, set[KvHeads]] = {FULL: set(), SLIDING: set()}
    # `transformers` pads the numbers of layers to the same length: "05" of 30.
    by_number = {int(number): own for number, own in by_layer.items()}
    for layer, kind in enumerate(kinds):
        own = by_number.get(layer, {})
        by_kind[kind].add(KvHeads(own.get("num_key_value_heads", count), own.get("head_dim", dim)))
    if not by_kind[SLIDING]:
        by_kind[SLIDING] = by_kind[FULL]
    if max(map(len, by_kind.values())) > 1:
        raise ConfigurationError("per_layer_config: other heads in layers of the same kind are not supported")
    return by_kind[FULL].pop(), next(iter(by_kind[SLIDING]))


def _read_gemma4_experts(config: JsonConfig) -> MoeConfig:
    return MoeConfig(
        experts=config["num_experts"],
        experts_per_token=config["top_k_experts"],
        intermediate_size=config["moe_intermediate_size"],
        normalizes_routing_weights=True,
        is_beside_dense=True,
        has_expert_scales=True,
    )


def _covers_gemma4(config: JsonConfig) -> bool:
    # E2B and E4B: embeddings of each layer's own, and layers that take keys and values of earlier ones.
    return not (config["hidden_size_per_layer_input"] or config.get("num_kv_shared_layers"))


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
    Family(
        "gemma4_text",
        "Gemma 4 (26B-A4B, 31B)",
        _read_gemma4,
        covers=_covers_gemma4,
        wrappers=("gemma4",),
        defaults={
            "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
            "attention_k_eq_v": False, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True, "hidden_activation": _TANH, "sliding_window": 512, "eos_token_id": 1,
            "hidden_size_per_layer_input": 256,
            "rope_parameters": {
                FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": _THETA},
                SLIDING: {"rope_type": "default", "rope_theta": _LOCAL_THETA},
            },
        },
        tensors={
            "layer_scale.weight": "layer_scalar",
            "mlp.gate": "router.proj",
            "mlp.gate.input_norm.weight": "router.scale",
            "mlp.gate.expert_scale.weight": "router.per_expert_scale",
            "mlp.experts_input_norm": "pre_feedforward_layernorm_2",
            "mlp.dense_output_norm": "post_feedforward_layernorm_1",
            "mlp.experts_output_norm": "post_feedforward_layernorm_2",
            "mlp.experts.*.gate_up_proj.weight": "experts.gate_up_proj",
            "mlp.experts.*.down_proj.weight": "experts.down_proj",
        },
        overflows_float16=True,
    ),
)  # fmt: skip

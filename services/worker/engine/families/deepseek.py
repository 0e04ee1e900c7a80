"""DeepSeek V2 and V3, and Kimi K2: latent attention, and mixtures of grouped experts beside shared ones."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from services.worker.engine.model.config import ExpertGroups, LatentConfig, MoeConfig, RouterScores, SharedExperts
from services.worker.engine.model.family import Family, GgufFamily
from services.worker.engine.model.gguf_fields import read_gguf_decoder, read_gguf_grouped_moe
from services.worker.engine.model.json_fields import read_decoder, refuse
from services.worker.engine.model.rotary_config import yarn_amplitude

if TYPE_CHECKING:
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.model.family import JsonConfig
    from services.worker.engine.model.gguf_fields import GgufFields

# How `topk_method` makes the score of a group: of so many of its highest ones. Greedy ones have no groups.
_BEST_OF_GROUP = {"greedy": 0, "group_limited_greedy": 1, "noaux_tc": 2}


def _read_deepseek(config: JsonConfig) -> ModelConfig:
    refuse(config, "attention_bias")
    latent = LatentConfig(
        rank=config["kv_lora_rank"],
        query_rank=config.get("q_lora_rank"),
        content_dim=config["qk_nope_head_dim"],
        rotary_dim=config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
    )
    heads = config["num_attention_heads"]
    if (config.get("num_key_value_heads") or heads) != heads:
        raise ConfigurationError(f"num_key_value_heads: {config['num_key_value_heads']}, where {heads} are expected")
    # Rotary embedding is that of the components that are rotated.
    read = read_decoder({**config, "head_dim": latent.rotary_dim})
    return replace(
        read,
        kv_heads=1,
        head_dim=latent.row_width,
        rotary=replace(read.rotary, is_interleaved=bool(config.get("rope_interleave", True))),
        attention_scale=_score_scale(config, latent),
        latent=latent,
        moe=_read_moe(config) if config.get("n_routed_experts") else None,
    )


def _score_scale(config: JsonConfig, latent: LatentConfig) -> float:
    scaling = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    scale = 1.0 / math.sqrt(latent.query_dim)
    if scaling.get("rope_type", scaling.get("type", "default")) != "default" and scaling.get("mscale_all_dim"):
        # All components grow, not only the rotated ones, to which `RotaryConfig.amplitude` belongs.
        growth = yarn_amplitude(float(scaling["factor"]), float(scaling["mscale_all_dim"]))
        scale *= growth * growth
    return scale


def _read_moe(config: JsonConfig) -> MoeConfig:
    method, scores = config["topk_method"], config["scoring_func"]
    if method not in _BEST_OF_GROUP:
        raise ConfigurationError(f"topk_method: {method!r} is not supported; supported: {', '.join(_BEST_OF_GROUP)}")
    kinds = {each.value: each for each in RouterScores}
    if scores not in kinds:
        raise ConfigurationError(f"scoring_func: {scores!r} is not supported; supported: {', '.join(kinds)}")
    normalizes, scale = bool(config["norm_topk_prob"]), float(config["routed_scaling_factor"])
    if kinds[scores] is RouterScores.SOFTMAX and normalizes and scale != 1.0:
        # Implementations differ in whether normalised weights are scaled; no published model has both.
        raise ConfigurationError("norm_topk_prob: True with scoring_func 'softmax' and a routed_scaling_factor")
    best, step = _BEST_OF_GROUP[method], config.get("moe_layer_freq") or 1
    first, layers = config["first_k_dense_replace"], config["num_hidden_layers"]
    shared = (config.get("n_shared_experts") or 0) * config["moe_intermediate_size"]
    return MoeConfig(
        experts=config["n_routed_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        normalizes_routing_weights=normalizes,
        dense_layers=tuple(i for i in range(layers) if i < first or i % step),
        scores=kinds[scores],
        has_correction=method == "noaux_tc",
        groups=ExpertGroups(config["n_group"], config["topk_group"], best) if best else None,
        routing_scale=scale,
        routes_in_float32=True,
        shared=SharedExperts(shared) if shared else None,
    )


def _gguf_deepseek(own: GgufFields) -> ModelConfig:
    # Files since 2025 describe attention over rows, earlier ones attention over each head's keys and values.
    query_dim = own.get("attention.key_length_mla") or own["attention.key_length"]
    rotary_dim = own["rope.dimension_count"]
    latent = LatentConfig(
        rank=own["attention.kv_lora_rank"],
        query_rank=own.get("attention.q_lora_rank"),
        content_dim=query_dim - rotary_dim,
        rotary_dim=rotary_dim,
        value_dim=own.get("attention.value_length_mla") or own["attention.value_length"],
    )
    read, scale = read_gguf_decoder(own, can_be_partial=True), 1.0 / math.sqrt(latent.query_dim)
    if own.get("rope.scaling.type") == "yarn":
        # A tenth of `mscale_all_dim`. Rotated components do not grow further, as where `mscale` is the same number.
        growth = 1.0 + own.get("rope.scaling.yarn_log_multiplier", 0.0) * math.log(own["rope.scaling.factor"])
        scale *= growth * growth
    return replace(
        read,
        kv_heads=1,
        head_dim=latent.row_width,
        rotary=replace(read.rotary, rotated=None, is_interleaved=True, amplitude=1.0),
        attention_scale=scale,
        latent=latent,
        moe=read_gguf_grouped_moe(own, RouterScores.SOFTMAX) if own.get("expert_count") else None,
    )


_SHARED_TENSORS = {
    f"mlp.shared_expert.{name}": f"mlp.shared_experts.{name}" for name in ("gate_proj", "up_proj", "down_proj")
}
_V2_DEFAULTS = {
    "rms_norm_eps": 1e-6, "scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "first_k_dense_replace": 0,
}  # fmt: skip
# Layers of multi-token prediction, which follow the model's own (`num_nextn_predict_layers`), are not read.
_V3_DEFAULTS = {
    "rms_norm_eps": 1e-6, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
}  # fmt: skip
FAMILIES = (
    Family(
        "deepseek_v2",
        "DeepSeek V2",
        _read_deepseek,
        defaults=_V2_DEFAULTS,
        tensors=_SHARED_TENSORS,
        gguf=GgufFamily("deepseek2", _gguf_deepseek),
    ),
    Family(
        "deepseek_v3",
        "DeepSeek V3 and R1, Kimi K2",
        _read_deepseek,
        aliases=("kimi_k2",),
        defaults=_V3_DEFAULTS,
        tensors=_SHARED_TENSORS,
        gguf_name="deepseek2",
    ),
)

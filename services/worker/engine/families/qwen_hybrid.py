"""Qwen3-Next and Qwen3.5: gated delta nets, and gated attention in every fourth layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from services.worker.engine.families.qwen import read_moe
from services.worker.engine.model.config import MoeConfig, RecurrentConfig, SharedExperts
from services.worker.engine.model.family import Family
from services.worker.engine.model.json_fields import FULL, read_decoder, refuse

if TYPE_CHECKING:
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.model.family import JsonConfig

_LINEAR = "linear_attention"


def _read_next(config: JsonConfig) -> ModelConfig:
    read = _read(config)
    recurrent = None if read.recurrent is None else replace(read.recurrent, is_by_head=True)
    return replace(read, recurrent=recurrent, moe=_read_experts(config) if config["num_experts"] else None)


def _read_dense(config: JsonConfig) -> ModelConfig:
    return _read(config)


def _read_mixture(config: JsonConfig) -> ModelConfig:
    # No layer is dense; ranks share columns of experts.
    config = {"intermediate_size": config["moe_intermediate_size"], **config, "norm_topk_prob": True}
    return replace(_read(config), moe=_read_experts(config))


def _read(config: JsonConfig) -> ModelConfig:
    refuse(config, "attention_bias")
    layers = config["num_hidden_layers"]
    interval = config.get("full_attention_interval") or 4
    kinds = config.get("layer_types") or [FULL if (i + 1) % interval == 0 else _LINEAR for i in range(layers)]
    unknown = set(kinds) - {_LINEAR, FULL}
    if unknown:
        raise ConfigurationError(f"layer_types: {', '.join(sorted(unknown))} are not supported")
    if len(kinds) != layers or FULL not in kinds:
        raise ConfigurationError(
            f"layer_types: one of {layers} layers at least has to be {FULL}, each of them is named"
        )
    linear = tuple(i for i, kind in enumerate(kinds) if kind == _LINEAR)
    recurrent = RecurrentConfig(
        layers=linear,
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        kernel=config["linear_conv_kernel_dim"],
    )
    return replace(
        read_decoder(config, can_be_partial=True),
        qk_norm=True,
        norm_offset=1.0,
        gated_attention=True,
        recurrent=recurrent if linear else None,
    )


def _read_experts(config: JsonConfig) -> MoeConfig:
    shared = SharedExperts(config["shared_expert_intermediate_size"], is_gated=True)
    return replace(read_moe(config), shared=shared)


_DEFAULTS = {
    "rms_norm_eps": 1e-6, "head_dim": 256, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}  # fmt: skip
# Experts are in one tensor for all, or, where they are quantised, in one each.
_STACKED = {
    "mlp.experts.*.gate_up_proj.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.*.down_proj.weight": "mlp.experts.down_proj",
}
FAMILIES = (
    Family("qwen3_next", "Qwen3-Next", _read_next, defaults={**_DEFAULTS, "norm_topk_prob": True}),
    Family("qwen3_5_text", "Qwen3.5", _read_dense, wrappers=("qwen3_5",), defaults=_DEFAULTS),
    Family(
        "qwen3_5_moe_text",
        "Qwen3.5 (mixtures)",
        _read_mixture,
        wrappers=("qwen3_5_moe",),
        defaults=_DEFAULTS,
        tensors=_STACKED,
        has_single_experts=True,
    ),
)

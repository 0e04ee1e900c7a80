"""Qwen2 and Qwen3: biases in the projections of the one, norms of queries and keys in the other, and their mixtures."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from services.worker.engine.model.config import MoeConfig, SharedExperts
from services.worker.engine.model.family import Family, GgufFamily
from services.worker.engine.model.gguf_fields import read_gguf_decoder, read_gguf_moe
from services.worker.engine.model.json_fields import FULL, SLIDING, read_decoder, read_windows, refuse

if TYPE_CHECKING:
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.model.family import JsonConfig
    from services.worker.engine.model.gguf_fields import GgufFields

# Layers without a window where files do not say.
_FULL_LAYERS = 28


def _read_qwen2(config: JsonConfig) -> ModelConfig:
    return replace(_read(config, _first_windowed(config)), qkv_bias=True, output_bias=False)


def _read_qwen3(config: JsonConfig) -> ModelConfig:
    return replace(_read(config, _first_windowed(config)), qk_norm=True)


def _read_qwen3_moe(config: JsonConfig) -> ModelConfig:
    return replace(_read(config, 0), qk_norm=True, moe=read_moe(config))


def _read_qwen2_moe(config: JsonConfig) -> ModelConfig:
    has_bias = bool(config.get("qkv_bias", True))
    shared = SharedExperts(config["shared_expert_intermediate_size"], is_gated=True)
    read = _read(config, _first_windowed(config))
    return replace(read, qkv_bias=has_bias, output_bias=False, moe=replace(read_moe(config), shared=shared))


def _read(config: JsonConfig, first_windowed: int) -> ModelConfig:
    refuse(config, "attn_logit_softcapping")
    kinds = [FULL if i < first_windowed else SLIDING for i in range(config["num_hidden_layers"])]
    # Most files contain a window that is not used.
    return replace(read_decoder(config), windows=read_windows(config, kinds))


def _first_windowed(config: JsonConfig) -> int:
    return int(config.get("max_window_layers", _FULL_LAYERS))


def read_moe(config: JsonConfig) -> MoeConfig:
    """Read the experts of a Qwen mixture, without the layer beside them."""
    step, layers = config.get("decoder_sparse_step", 1), config["num_hidden_layers"]
    alone = config.get("mlp_only_layers") or ()
    return MoeConfig(
        experts=config["num_experts"] if "num_experts" in config else config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        normalizes_routing_weights=bool(config.get("norm_topk_prob", False)),
        dense_layers=tuple(i for i in range(layers) if i in alone or (i + 1) % step),
    )


def _gguf_qwen2(own: GgufFields) -> ModelConfig:
    return replace(read_gguf_decoder(own), qkv_bias=True)


def _gguf_qwen3(own: GgufFields) -> ModelConfig:
    return replace(read_gguf_decoder(own), qk_norm=True)


def _gguf_qwen2_moe(own: GgufFields) -> ModelConfig:
    shared = SharedExperts(own["expert_shared_feed_forward_length"], is_gated=True)
    moe = replace(read_gguf_moe(own), normalizes_routing_weights=False, shared=shared)
    return replace(read_gguf_decoder(own), qkv_bias=True, moe=moe)


def _gguf_qwen3_moe(own: GgufFields) -> ModelConfig:
    return replace(read_gguf_decoder(own), qk_norm=True, moe=read_gguf_moe(own))


FAMILIES = (
    Family("qwen2", "Qwen2, Qwen2.5", _read_qwen2, wrappers=("qwen2_5_vl",), gguf=GgufFamily("qwen2", _gguf_qwen2)),
    Family("qwen2_moe", "Qwen1.5-MoE, Qwen2-MoE", _read_qwen2_moe, gguf=GgufFamily("qwen2moe", _gguf_qwen2_moe)),
    Family("qwen3", "Qwen3", _read_qwen3, wrappers=("qwen3_vl",), gguf=GgufFamily("qwen3", _gguf_qwen3)),
    Family("qwen3_moe", "Qwen3-MoE", _read_qwen3_moe, gguf=GgufFamily("qwen3moe", _gguf_qwen3_moe)),
)

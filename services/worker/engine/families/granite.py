"""Granite 3: factors of embeddings, scores, residuals and logits; mixtures with and without a shared layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from services.worker.engine.model.config import MoeConfig, SharedExperts
from services.worker.engine.model.family import Family, GgufFamily
from services.worker.engine.model.gguf_fields import read_gguf_decoder, read_gguf_moe
from services.worker.engine.model.json_fields import read_decoder

if TYPE_CHECKING:
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.model.family import JsonConfig
    from services.worker.engine.model.gguf_fields import GgufFields


def _read_granite(config: JsonConfig) -> ModelConfig:
    return replace(
        read_decoder(config),
        embedding_scale=float(config["embedding_multiplier"]),
        residual_scale=float(config["residual_multiplier"]),
        attention_scale=float(config["attention_multiplier"]),
        logits_divisor=float(config["logits_scaling"]),
    )


def _read_granite_moe(config: JsonConfig) -> ModelConfig:
    read, columns = _read_granite(config), config.get("shared_intermediate_size", 0)
    moe = MoeConfig(
        experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=read.intermediate_size,
        normalizes_routing_weights=True,
        shared=SharedExperts(columns) if columns else None,
    )
    return replace(read, moe=moe)


def _gguf_granite(own: GgufFields) -> ModelConfig:
    return replace(
        read_gguf_decoder(own),
        embedding_scale=own.get("embedding_scale", 1.0),
        residual_scale=own.get("residual_scale", 1.0),
        attention_scale=own.get("attention.scale"),
        logits_divisor=own.get("logit_scale", 1.0),
    )


def _gguf_granite_moe(own: GgufFields) -> ModelConfig:
    columns = own.get("expert_shared_feed_forward_length", 0)
    moe = replace(read_gguf_moe(own), shared=SharedExperts(columns) if columns else None)
    return replace(_gguf_granite(own), moe=moe)


_DEFAULTS = {
    "rms_norm_eps": 1e-6, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}  # fmt: skip
_MOE_TENSORS = {
    "mlp.gate": "block_sparse_moe.router.layer",
    "mlp.experts.*.gate_up_proj": "block_sparse_moe.input_linear",
    "mlp.experts.*.down_proj": "block_sparse_moe.output_linear",
    "mlp.shared_expert.gate_up_proj": "shared_mlp.input_linear",
    "mlp.shared_expert.down_proj": "shared_mlp.output_linear",
}
FAMILIES = (
    Family(
        "granite",
        "Granite 3",
        _read_granite,
        defaults=_DEFAULTS,
        gguf=GgufFamily("granite", _gguf_granite, interleaves_rotary=True),
    ),
    Family(
        "granitemoe",
        "Granite 3 MoE",
        _read_granite_moe,
        defaults=_DEFAULTS,
        tensors=_MOE_TENSORS,
        gguf=GgufFamily("granitemoe", _gguf_granite_moe, interleaves_rotary=True),
    ),
    Family(
        "granitemoeshared",
        "Granite 3 MoE with a shared expert",
        _read_granite_moe,
        defaults=_DEFAULTS,
        tensors=_MOE_TENSORS,
        gguf_name="granitemoe",
    ),
)

"""GLM-4: half of each head is rotated, in pairs side by side; norms of outputs (`glm4`), mixtures (`glm4_moe`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from services.worker.engine.model.config import ExpertGroups, MoeConfig, RouterScores, SharedExperts
from services.worker.engine.model.family import Family, GgufFamily
from services.worker.engine.model.gguf_fields import read_gguf_decoder, read_gguf_grouped_moe
from services.worker.engine.model.json_fields import read_decoder

if TYPE_CHECKING:
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.model.family import JsonConfig
    from services.worker.engine.model.gguf_fields import GgufFields


def _read_glm(config: JsonConfig) -> ModelConfig:
    read = read_decoder(config, can_be_partial=True)
    return replace(read, output_bias=False, rotary=replace(read.rotary, is_interleaved=True))


def _read_glm4(config: JsonConfig) -> ModelConfig:
    return replace(_read_glm(config), post_norms=True)


def _read_glm4_moe(config: JsonConfig) -> ModelConfig:
    read = read_decoder(config, can_be_partial=True)
    shared = config["n_shared_experts"] * config["moe_intermediate_size"]
    moe = MoeConfig(
        experts=config["n_routed_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        normalizes_routing_weights=config["norm_topk_prob"],
        dense_layers=tuple(range(config["first_k_dense_replace"])),
        scores=RouterScores.SIGMOID,
        has_correction=True,
        groups=ExpertGroups(config["n_group"], config["topk_group"], best=2),
        routing_scale=config["routed_scaling_factor"],
        routes_in_float32=True,
        shared=SharedExperts(shared) if shared else None,
    )
    return replace(read, output_bias=False, qk_norm=config["use_qk_norm"], moe=moe)


def _gguf_glm4(own: GgufFields) -> ModelConfig:
    read = read_gguf_decoder(own, can_be_partial=True)
    return replace(read, qkv_bias=True, post_norms=True, rotary=replace(read.rotary, is_interleaved=True))


def _gguf_glm4_moe(own: GgufFields) -> ModelConfig:
    return replace(
        read_gguf_decoder(own, can_be_partial=True),
        qkv_bias=own.has_tensor("attn_q.bias"),
        qk_norm=own.has_tensor("attn_q_norm.weight"),
        moe=read_gguf_grouped_moe(own, RouterScores.SIGMOID),
    )


_DEFAULTS = {
    "head_dim": 128, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5, "attention_bias": True,
    "eos_token_id": [151_329, 151_336, 151_338], "max_position_embeddings": 131_072,
}  # fmt: skip
FAMILIES = (
    Family("glm", "GLM-4 (9B of 2024)", _read_glm, defaults=_DEFAULTS),
    Family(
        "glm4",
        "GLM-4-0414, GLM-Z1",
        _read_glm4,
        defaults=_DEFAULTS,
        tensors={
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
        gguf=GgufFamily(
            "glm4",
            _gguf_glm4,
            tensors={
                "mlp.gate_up_proj": "ffn_up",
                "post_attention_layernorm": "post_attention_norm",
                "pre_feedforward_layernorm": "ffn_norm",
                "post_feedforward_layernorm": "post_ffw_norm",
            },
        ),
    ),
    Family(
        "glm4_moe",
        "GLM-4.5, GLM-4.6",
        _read_glm4_moe,
        defaults={
            "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "n_shared_experts": 1, "routed_scaling_factor": 1.0,
            "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": False,
        },
        tensors={
            "mlp.shared_expert.gate_proj": "mlp.shared_experts.gate_proj",
            "mlp.shared_expert.up_proj": "mlp.shared_experts.up_proj",
            "mlp.shared_expert.down_proj": "mlp.shared_experts.down_proj",
        },
        gguf=GgufFamily("glm4moe", _gguf_glm4_moe, tensors={"post_attention_layernorm": "post_attention_norm"}),
    ),
)  # fmt: skip

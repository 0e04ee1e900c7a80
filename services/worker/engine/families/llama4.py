"""Llama 4: layers that attend to chunks beside layers without positions, and experts that take weighted inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from services.worker.engine.model.config import MoeConfig, QueryTemperature, RouterScores, SharedExperts
from services.worker.engine.model.family import Family, StackedPart
from services.worker.engine.model.json_fields import CHUNKED, FULL, read_chunks, read_decoder

if TYPE_CHECKING:
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.model.family import JsonConfig


def _read_llama4(config: JsonConfig) -> ModelConfig:
    read = read_decoder(config)
    layers = range(read.layers)
    interval = config["no_rope_layer_interval"]
    rotated = config.get("no_rope_layers") or [(i + 1) % interval for i in layers]
    step = config["interleave_moe_layer_step"]
    mixtures = config.get("moe_layers")
    if mixtures is None:
        mixtures = range(step - 1, read.layers, step)
    columns = read.intermediate_size
    moe = MoeConfig(
        experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=columns,
        normalizes_routing_weights=False,
        dense_layers=tuple(i for i in layers if i not in mixtures),
        scores=RouterScores.SIGMOID,
        shared=SharedExperts(columns),
        weights_inputs=True,
    )
    # The norm of heads follows their rotation, so it takes an amplitude back.
    amplitude = 1.0 if config["use_qk_norm"] else read.rotary.amplitude
    is_tuned = config["attn_temperature_tuning"]
    return replace(
        read,
        intermediate_size=config["intermediate_size_mlp"],
        rotary=replace(read.rotary, is_interleaved=True, amplitude=amplitude),
        bare_qk_norm=config["use_qk_norm"],
        windows=read_chunks(config, [CHUNKED if rotated[i] else FULL for i in layers]),
        has_chunks=True,
        unrotated=tuple(i for i in layers if not rotated[i]),
        temperature=QueryTemperature(config["floor_scale"], config["attn_scale"]) if is_tuned else None,
        moe=moe if len(mixtures) else None,
    )


FAMILIES = (
    Family(
        "llama4_text",
        "Llama 4",
        _read_llama4,
        wrappers=("llama4",),
        defaults={
            "vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16_384,
            "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "eos_token_id": 2,
            "num_experts_per_tok": 1, "num_local_experts": 16, "interleave_moe_layer_step": 1, "use_qk_norm": True,
            "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "attn_temperature_tuning": True,
            "floor_scale": 8192, "attn_scale": 0.1,
        },
        tensors={
            "mlp.gate_proj": "feed_forward.gate_proj",
            "mlp.up_proj": "feed_forward.up_proj",
            "mlp.down_proj": "feed_forward.down_proj",
            "mlp.gate": "feed_forward.router",
            "mlp.experts.*.gate_up_proj.weight": StackedPart("feed_forward.experts.gate_up_proj", is_transposed=True),
            "mlp.experts.*.down_proj.weight": StackedPart("feed_forward.experts.down_proj", is_transposed=True),
            "mlp.shared_expert.gate_proj": "feed_forward.shared_expert.gate_proj",
            "mlp.shared_expert.up_proj": "feed_forward.shared_expert.up_proj",
            "mlp.shared_expert.down_proj": "feed_forward.shared_expert.down_proj",
        },
    ),
)  # fmt: skip

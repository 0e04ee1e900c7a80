"""Llama, Mistral and Mixtral, and families that publish themselves as Llama (SmolLM, Yi)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from services.worker.engine.model.config import MoeConfig
from services.worker.engine.model.family import Family, GgufFamily
from services.worker.engine.model.gguf_fields import read_gguf_decoder, read_gguf_moe
from services.worker.engine.model.json_fields import SLIDING, read_decoder, read_windows, refuse

if TYPE_CHECKING:
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.model.family import JsonConfig
    from services.worker.engine.model.gguf_fields import GgufFields


def _read_llama(config: JsonConfig) -> ModelConfig:
    refuse(config, "attn_logit_softcapping")
    return replace(read_decoder(config), windows=read_windows(config, (SLIDING,) * config["num_hidden_layers"]))


def _read_mistral(config: JsonConfig) -> ModelConfig:
    refuse(config, "attn_logit_softcapping")
    windows = read_windows(config, (SLIDING,) * config["num_hidden_layers"], is_used=True)
    return replace(read_decoder(config), windows=windows)


def _read_mixtral(config: JsonConfig) -> ModelConfig:
    read = _read_mistral(config)
    moe = MoeConfig(
        experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=read.intermediate_size,
        normalizes_routing_weights=True,
    )
    return replace(read, moe=moe)


def _gguf_llama(own: GgufFields) -> ModelConfig:
    read = read_gguf_decoder(own)
    return replace(read, moe=read_gguf_moe(own)) if own.get("expert_count") else read


FAMILIES = (
    Family(
        "llama",
        "Llama 2, 3.x, SmolLM 1 and 2, Yi",
        _read_llama,
        gguf=GgufFamily("llama", _gguf_llama, interleaves_rotary=True),
    ),
    Family("mistral", "Mistral", _read_mistral, gguf_name="llama"),
    Family(
        "mixtral",
        "Mixtral",
        _read_mixtral,
        defaults={"rope_theta": 1e6},
        tensors={
            "mlp.gate": "block_sparse_moe.gate",
            "mlp.experts.*.gate_proj": "block_sparse_moe.experts.*.w1",
            "mlp.experts.*.up_proj": "block_sparse_moe.experts.*.w3",
            "mlp.experts.*.down_proj": "block_sparse_moe.experts.*.w2",
        },
        gguf_name="llama",
    ),
)

"""Phi-3, Phi-3.5 and Phi-4: projections stored as one matrix, LongRoPE, and heads that are rotated in part."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from services.worker.engine.model.family import Family, GgufFamily
from services.worker.engine.model.gguf_fields import read_gguf_decoder
from services.worker.engine.model.json_fields import SLIDING, read_decoder, read_windows

if TYPE_CHECKING:
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.model.family import JsonConfig
    from services.worker.engine.model.gguf_fields import GgufFields


def _read_phi3(config: JsonConfig) -> ModelConfig:
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if scaling.get("rope_type", scaling.get("type")) == "yarn":
        scaling["rope_type"] = "longrope"  # the same, as the first files call it
    if "original_max_position_embeddings" in config:
        scaling["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    read = read_decoder({**config, "rope_parameters": scaling}, can_be_partial=True)
    return replace(read, windows=read_windows(config, (SLIDING,) * read.layers, is_used=True))


def _gguf_phi3(own: GgufFields) -> ModelConfig:
    return read_gguf_decoder(own, can_be_partial=True)


FAMILIES = (
    Family(
        "phi3",
        "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
        _read_phi3,
        defaults={"rms_norm_eps": 1e-5},
        gguf=GgufFamily("phi3", _gguf_phi3, tensors={"mlp.gate_up_proj": "ffn_up"}),
    ),
)

"""SmolLM3: Llama with layers without positions; SmolLM 1 and 2 publish themselves as Llama."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from services.worker.engine.model.family import Family, GgufFamily
from services.worker.engine.model.gguf_fields import read_gguf_decoder
from services.worker.engine.model.json_fields import FULL, SLIDING, read_decoder, read_windows

if TYPE_CHECKING:
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.model.family import JsonConfig
    from services.worker.engine.model.gguf_fields import GgufFields

# Every fourth layer of GGUF files, which do not say so.
_INTERVAL = 4


def _read_smollm3(config: JsonConfig) -> ModelConfig:
    read = read_decoder(config)
    unrotated = _every(read, config["no_rope_layer_interval"])
    if stated := config.get("no_rope_layers"):
        unrotated = tuple(layer for layer in range(read.layers) if not stated[layer])
    kinds = [SLIDING if layer in unrotated else FULL for layer in range(read.layers)]
    return replace(read, unrotated=unrotated, windows=read_windows(config, kinds))


def _gguf_smollm3(own: GgufFields) -> ModelConfig:
    read = read_gguf_decoder(own)
    return replace(read, unrotated=_every(read, _INTERVAL))


def _every(read: ModelConfig, interval: int) -> tuple[int, ...]:
    return tuple(range(interval - 1, read.layers, interval))


FAMILIES = (
    Family(
        "smollm3",
        "SmolLM3",
        _read_smollm3,
        defaults={
            "rms_norm_eps": 1e-6, "rope_theta": 2_000_000.0, "no_rope_layer_interval": _INTERVAL,
            "max_position_embeddings": 32_768, "tie_word_embeddings": True, "eos_token_id": 128_001,
        },
        gguf=GgufFamily("smollm3", _gguf_smollm3, interleaves_rotary=True),
    ),
)  # fmt: skip

"""OLMo 2 and 3: norms of what layers add instead of their inputs, and of whole queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from services.worker.engine.model.config import RotaryConfig
from services.worker.engine.model.family import Family, GgufFamily
from services.worker.engine.model.gguf_fields import read_gguf_decoder, read_gguf_windows
from services.worker.engine.model.json_fields import (
    FULL,
    SLIDING,
    read_decoder,
    read_local_rotary,
    read_windows,
)

if TYPE_CHECKING:
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.model.family import JsonConfig
    from services.worker.engine.model.gguf_fields import GgufFields

_PATTERN = 4


def _read_olmo2(config: JsonConfig) -> ModelConfig:
    return _normed(read_decoder(config))


def _read_olmo3(config: JsonConfig) -> ModelConfig:
    read, theta = _read_olmo2(config), config.get("rope_theta", 10000.0)
    kinds = [SLIDING if (i + 1) % _PATTERN else FULL for i in range(read.layers)]
    # Only layers without a window have scaled embeddings.
    rotary, local_rotary = read_local_rotary(config, read.head_dim, theta, theta)
    windows = read_windows(config, kinds, is_used=True)
    return replace(read, windows=windows, rotary=rotary, local_rotary=local_rotary)


def _gguf_olmo2(own: GgufFields) -> ModelConfig:
    read = _normed(read_gguf_decoder(own))
    windows = read_gguf_windows(own, _PATTERN)
    # OLMo 3 has the same name there.
    return replace(read, windows=windows, local_rotary=RotaryConfig(read.rotary.theta) if windows else None)


def _normed(read: ModelConfig) -> ModelConfig:
    return replace(read, pre_norms=False, post_norms=True, projection_norm=True)


FAMILIES = (
    Family(
        "olmo2",
        "OLMo 2",
        _read_olmo2,
        defaults={"rms_norm_eps": 1e-5},
        gguf=GgufFamily(
            "olmo2",
            _gguf_olmo2,
            tensors={
                "post_attention_layernorm": "post_attention_norm",
                "post_feedforward_layernorm": "post_ffw_norm",
            },
        ),
    ),
    Family("olmo3", "OLMo 3", _read_olmo3, defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096}, gguf_name="olmo2"),
)

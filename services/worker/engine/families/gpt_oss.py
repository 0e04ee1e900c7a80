"""gpt-oss: attention with sinks and a window in every second layer, biases everywhere, experts in MXFP4."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from services.worker.engine.model.config import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation, MoeConfig
from services.worker.engine.model.family import Family, GgufFamily, StackedPart
from services.worker.engine.model.gguf_fields import read_gguf_decoder, read_gguf_moe, read_gguf_windows
from services.worker.engine.model.json_fields import FULL, SLIDING, read_decoder, read_windows

if TYPE_CHECKING:
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.model.family import JsonConfig
    from services.worker.engine.model.gguf_fields import GgufFields

# <|return|> and <|call|>, where outputs wait for results; the first published files do not name the latter.
_ENDS = 200_002, 200_012
# Every second layer has no window.
_PATTERN = 2


def _read(config: JsonConfig) -> ModelConfig:
    for key, supported in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if config[key] != supported:
            raise ConfigurationError(f"{key}: {config[key]!r} is not supported; supported: {supported}")
    kinds = [SLIDING if (i + 1) % _PATTERN else FULL for i in range(config["num_hidden_layers"])]
    moe = MoeConfig(
        experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=config["intermediate_size"],
        # A softmax over the chosen experts' logits, which is the same.
        normalizes_routing_weights=True,
        has_biases=True,
    )
    return _as_gpt_oss(read_decoder(config), moe, read_windows(config, kinds, is_used=True))


def _gguf(own: GgufFields) -> ModelConfig:
    read = replace(read_gguf_decoder(own, truncates_yarn=False), qkv_bias=True, output_bias=True)
    moe = replace(read_gguf_moe(own), has_biases=True)
    # What files call the end of a turn ends a message: others follow.
    ends = (own.everything["tokenizer.ggml.eos_token_id"], *(end for end in _ENDS if end < read.vocabulary_size))
    read = replace(read, eos_token_ids=tuple(dict.fromkeys(ends)))
    return _as_gpt_oss(read, moe, read_gguf_windows(own, _PATTERN))


def _as_gpt_oss(read: ModelConfig, moe: MoeConfig, windows: tuple[int | None, ...]) -> ModelConfig:
    return replace(read, activation=Activation.CLAMPED_SWIGLU, has_sinks=True, moe=moe, windows=windows)


def _experts() -> dict[str, StackedPart]:
    """Return where experts are: gate and up are every second output of one tensor, transposed unless in MXFP4."""
    places = {}
    for name, stored, first, step in (
        ("gate_proj", "gate_up_proj", 0, 2),
        ("up_proj", "gate_up_proj", 1, 2),
        ("down_proj", "down_proj", 0, 1),
    ):
        ours, theirs = f"mlp.experts.*.{name}", f"mlp.experts.{stored}"
        places[f"{ours}.weight"] = StackedPart(theirs, first, step, is_transposed=True)
        for part in ("blocks", "scales", "bias"):
            places[f"{ours}.{part}"] = StackedPart(f"{theirs}_{part}", first, step)
    return places


FAMILIES = (
    Family(
        "gpt_oss",
        "gpt-oss",
        _read,
        defaults={
            "num_hidden_layers": 36, "num_local_experts": 128, "vocab_size": 201_088, "hidden_size": 2880,
            "intermediate_size": 2880, "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
            "sliding_window": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "num_experts_per_tok": 4,
            "swiglu_alpha": SWIGLU_ALPHA, "swiglu_limit": SWIGLU_LIMIT, "attention_bias": True, "rope_theta": 150_000.0,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        tensors={"mlp.gate": "mlp.router", "self_attn.sinks.weight": "self_attn.sinks", **_experts()},
        ends=_ENDS,
        overflows_float16=True,
        gguf=GgufFamily(
            "gpt-oss",
            _gguf,
            tensors={"self_attn.sinks": "attn_sinks", "post_attention_layernorm": "post_attention_norm"},
        ),
    ),
)  # fmt: skip

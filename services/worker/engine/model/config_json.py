"""The shape of a decoder from its config.json."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from common.encoders import is_encoder
from common.errors import ConfigurationError
from services.worker.engine.model.config import FAMILIES, Activation, ModelConfig, MoeConfig, RotaryConfig
from services.worker.engine.model.rotary_config import read_rotary
from services.worker.engine.quantization.checkpoint_scheme import stored_format

if TYPE_CHECKING:
    from collections.abc import Mapping

# Checkpoints with a vision tower; only their text model is served.
_TEXT_PARTS = {"gemma3": "gemma3_text"}
_ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}
# Defaults of `transformers` that Gemma 3's files leave out.
_GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
_GEMMA3_PATTERN = 6
_GEMMA3_THETA, _GEMMA3_LOCAL_THETA = 1_000_000.0, 10_000.0
# Layers without a window in Qwen2 and Qwen3 where files do not say.
_QWEN_FULL_LAYERS = 28
_SLIDING, _FULL = "sliding_attention", "full_attention"


def config_from_json(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read a `config.json` as `transformers` writes it, versions 4 and 5, and its `generation_config.json`.

    Raises:
        ConfigurationError: the family or one of its options is not supported, or a field is missing.
    """
    text = _text_part(config)
    family = text.get("model_type", config.get("model_type"))
    if family not in FAMILIES:
        raise ConfigurationError(f"model family {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    quantization = config.get("quantization_config") or text.get("quantization_config")
    stored = stored_format(quantization) if quantization else None
    try:
        return replace(_read(family, text, generation or {}), stored_format=stored)
    except KeyError as error:
        raise ConfigurationError(f"config.json has no {error.args[0]!r}") from error


class Implementation(Enum):
    """The code that computes a model."""

    ENCODER = "encoder"
    OWN = "own"
    """A decoder of a family in `FAMILIES`."""
    TRANSFORMERS = "transformers"


def implementation_of(config: Mapping[str, Any]) -> Implementation:
    """Return which code would compute the model of a config.json; it may still refuse one of the model's options."""
    if is_encoder(config):
        return Implementation.ENCODER
    is_own = _text_part(config).get("model_type") in FAMILIES
    return Implementation.OWN if is_own else Implementation.TRANSFORMERS


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    family = config.get("model_type")
    if family not in _TEXT_PARTS:
        return config
    outer = {key: config[key] for key in ("eos_token_id", "dtype", "torch_dtype") if key in config}
    return {**outer, "model_type": _TEXT_PARTS[family], **config.get("text_config", {})}


def _read(family: str, config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    is_gemma = family == "gemma3_text"
    if is_gemma:
        config = {**_GEMMA3_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    hidden_size, query_heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden_size // query_heads
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    attention_bias = bool(config.get("attention_bias", False))
    rotary, local_rotary = _gemma_rotary(config, head_dim) if is_gemma else (_rotary(config, head_dim), None)
    return ModelConfig(
        family=family,
        vocabulary_size=config["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        query_heads=query_heads,
        kv_heads=config.get("num_key_value_heads") or query_heads,
        head_dim=head_dim,
        max_context=int(config["max_position_embeddings"]),
        norm_epsilon=config["rms_norm_eps"],
        rotary=rotary,
        # Left out, transformers' own default holds: false in all families but Gemma.
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family != "qwen2" and attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        windows=_windows(family, config),
        local_rotary=local_rotary,
        attention_scale=config["query_pre_attn_scalar"] ** -0.5 if is_gemma else None,
        activation=_activation(config, is_gemma),
        embedding_scale=hidden_size**0.5 if is_gemma else 1.0,
        norm_offset=1.0 if is_gemma else 0.0,
        post_norms=is_gemma,
        logits_softcap=config.get("final_logit_softcapping") if is_gemma else None,
        moe=_moe(config) if family == "qwen3_moe" else None,
    )


def _activation(config: Mapping[str, Any], is_gemma: bool) -> Activation:
    key = "hidden_activation" if is_gemma else "hidden_act"
    name = config.get(key, "gelu_pytorch_tanh" if is_gemma else "silu")
    if name not in _ACTIVATIONS:
        raise ConfigurationError(f"{key}: {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    for unsupported in ("use_bidirectional_attention", "attn_logit_softcapping"):
        if config.get(unsupported):
            raise ConfigurationError(f"{unsupported}: {config[unsupported]!r} is not supported")
    return _ACTIVATIONS[name]


def _windows(family: str, config: Mapping[str, Any]) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    # Qwen's files contain a window that is not used.
    if not window or not config.get("use_sliding_window", family in ("mistral", "gemma3_text")):
        return ()
    layers = config["num_hidden_layers"]
    if config.get("layer_types"):
        kinds = config["layer_types"]
        unknown = set(kinds) - {_SLIDING, _FULL}
        if unknown:
            raise ConfigurationError(f"layer_types: {', '.join(sorted(unknown))} are not supported")
    elif family == "gemma3_text":
        pattern = config.get("sliding_window_pattern", _GEMMA3_PATTERN)
        kinds = [_SLIDING if (i + 1) % pattern else _FULL for i in range(layers)]
    else:
        first = config.get("max_window_layers", _QWEN_FULL_LAYERS) if family in ("qwen2", "qwen3") else 0
        kinds = [_FULL if i < first else _SLIDING for i in range(layers)]
    return tuple(int(window) if kind == _SLIDING else None for kind in kinds)


def _rotary(config: Mapping[str, Any], head_dim: int) -> RotaryConfig:
    parameters = dict(config.get("rope_scaling") or {})
    parameters.update(config.get("rope_parameters") or {})
    parameters.setdefault("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    return read_rotary(parameters, config.get("rope_theta", 10000.0), head_dim, config["max_position_embeddings"])


def _gemma_rotary(config: Mapping[str, Any], head_dim: int) -> tuple[RotaryConfig, RotaryConfig]:
    """Return the rotary embeddings of layers without and with a window."""
    by_kind = config.get("rope_parameters") or {}
    context = config["max_position_embeddings"]
    everywhere = by_kind.get(_FULL) or config.get("rope_scaling") or {}
    local = by_kind.get(_SLIDING) or {}
    return (
        read_rotary(everywhere, config.get("rope_theta", _GEMMA3_THETA), head_dim, context),
        read_rotary(local, config.get("rope_local_base_freq", _GEMMA3_LOCAL_THETA), head_dim, context),
    )


def _moe(config: Mapping[str, Any]) -> MoeConfig:
    step, layers = config.get("decoder_sparse_step", 1), config["num_hidden_layers"]
    alone = config.get("mlp_only_layers") or ()
    return MoeConfig(
        experts=config["num_experts"] if "num_experts" in config else config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        normalizes_routing_weights=bool(config.get("norm_topk_prob", False)),
        dense_layers=tuple(i for i in range(layers) if i in alone or (i + 1) % step),
    )

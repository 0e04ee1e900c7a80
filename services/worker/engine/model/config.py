"""The shape of a decoder of the Llama family, whatever file it was described in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

# `model_type` of config.json, and `general.architecture` of GGUF files (which call Mistral `llama`).
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """Rotary position embedding (RoFormer, Su et al. 2021), halves of a head rotated against each other.

    `frequency_divisors` [head_dim / 2] stretch single frequencies; empty means none is stretched.
    """

    theta: float
    frequency_divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that a forward pass needs to know of a model except its weights."""

    family: str
    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    norm_epsilon: float
    rotary: RotaryConfig
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Reject shapes that no code here could run."""
        if self.family not in FAMILIES:
            raise ConfigurationError(f"model family {self.family!r} is not supported; supported: {', '.join(FAMILIES)}")
        if self.query_heads % self.kv_heads:
            raise ConfigurationError(f"{self.query_heads} query heads cannot share {self.kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ConfigurationError(f"head_dim {self.head_dim} is odd: rotary embedding needs two halves")

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads


def config_from_json(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read a `config.json` as `transformers` writes it, versions 4 and 5, and its `generation_config.json`.

    Raises:
        ConfigurationError: the family or one of its options is not supported, or a field is missing.
    """
    try:
        return _config_from_json(config, generation or {})
    except KeyError as error:
        raise ConfigurationError(f"config.json has no {error.args[0]!r}") from error


def _config_from_json(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    family = config["model_type"]
    hidden_size, query_heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden_size // query_heads
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigurationError(f"activation {config['hidden_act']!r} is not supported; supported: silu")
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    attention_bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        family=family,
        vocabulary_size=config["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        query_heads=query_heads,
        kv_heads=config.get("num_key_value_heads") or query_heads,
        head_dim=head_dim,
        max_context=_full_attention_context(config),
        norm_epsilon=config["rms_norm_eps"],
        rotary=_rotary_from_json(config, head_dim),
        # Left out, transformers' own default holds: false in all families here.
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family != "qwen2" and attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        head_norms=family == "qwen3",
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def _full_attention_context(config: Mapping[str, Any]) -> int:
    """Return the longest context in which every layer sees all tokens.

    Within a sliding window, windowed attention is full attention; beyond it this engine would be wrong.
    """
    window = config.get("sliding_window")
    windowed = config.get("use_sliding_window", window is not None)
    context = int(config["max_position_embeddings"])
    return min(context, window) if windowed and window else context


def _rotary_from_json(config: Mapping[str, Any], head_dim: int) -> RotaryConfig:
    parameters = dict(config.get("rope_scaling") or {})
    parameters.update(config.get("rope_parameters") or {})
    theta = float(parameters.get("rope_theta", config.get("rope_theta", 10000.0)))
    if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigurationError("partial rotary embedding is not supported")
    match parameters.get("rope_type", parameters.get("type", "default")):
        case "default":
            return RotaryConfig(theta)
        case "linear":
            return RotaryConfig(theta, (float(parameters["factor"]),) * (head_dim // 2))
        case "llama3":
            return RotaryConfig(theta, llama3_divisors(theta, head_dim, parameters))
        case other:
            raise ConfigurationError(f"rope type {other!r} is not supported; supported: default, linear, llama3")


def llama3_divisors(theta: float, head_dim: int, parameters: Mapping[str, Any]) -> tuple[float, ...]:
    """Return by how much Llama 3.1 divides each frequency: long waves by `factor`, short ones not, between smoothly."""
    factor, low, high = (float(parameters[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(parameters["original_max_position_embeddings"])
    divisors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        if wavelength > original / low:
            divisors.append(factor)
        elif wavelength < original / high:
            divisors.append(1.0)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1.0 / ((1 - smooth) / factor + smooth))
    return tuple(divisors)


def config_from_gguf(fields: Mapping[str, Any], *, tied_embeddings: bool, divisors: tuple[float, ...]) -> ModelConfig:
    """Read a GGUF file's metadata.

    `divisors` are its tensor `rope_freqs.weight`, if there is one.

    Raises:
        ConfigurationError: the architecture is not supported, or a field is missing.
    """
    try:
        return _config_from_gguf(fields, tied_embeddings, divisors)
    except KeyError as error:
        raise ConfigurationError(f"the GGUF file has no field {error.args[0]!r}") from error


def _config_from_gguf(fields: Mapping[str, Any], tied_embeddings: bool, divisors: tuple[float, ...]) -> ModelConfig:
    family = fields["general.architecture"]
    hidden_size, query_heads = fields[f"{family}.embedding_length"], fields[f"{family}.attention.head_count"]
    head_dim = fields.get(f"{family}.attention.key_length", hidden_size // query_heads)
    if fields.get(f"{family}.rope.dimension_count", head_dim) != head_dim:
        raise ConfigurationError("partial rotary embedding is not supported")
    scaling = fields.get(f"{family}.rope.scaling.type", "none")
    if scaling == "linear":
        divisors = (float(fields[f"{family}.rope.scaling.factor"]),) * (head_dim // 2)
    elif scaling != "none":
        raise ConfigurationError(f"rope scaling {scaling!r} is not supported in GGUF files; supported: none, linear")
    eos = [fields[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in fields]
    window = fields.get(f"{family}.attention.sliding_window", 0)
    context = fields[f"{family}.context_length"]
    return ModelConfig(
        family=family,
        vocabulary_size=fields.get(f"{family}.vocab_size") or len(fields["tokenizer.ggml.tokens"]),
        hidden_size=hidden_size,
        intermediate_size=fields[f"{family}.feed_forward_length"],
        layers=fields[f"{family}.block_count"],
        query_heads=query_heads,
        kv_heads=fields.get(f"{family}.attention.head_count_kv", query_heads),
        head_dim=head_dim,
        max_context=min(context, window) if window else context,
        norm_epsilon=fields[f"{family}.attention.layer_norm_rms_epsilon"],
        rotary=RotaryConfig(fields.get(f"{family}.rope.freq_base", 10000.0), divisors),
        tied_embeddings=tied_embeddings,
        qkv_bias=family == "qwen2",
        head_norms=family == "qwen3",
        eos_token_ids=tuple(dict.fromkeys(eos)),
        dtype="float16",
    )

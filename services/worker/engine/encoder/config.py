"""The shapes of encoders: of the BERT family, and of ModernBERT."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from common.encoders import encoder_context, first_position
from common.errors import ConfigurationError
from common.types import Pooling

if TYPE_CHECKING:
    from collections.abc import Mapping


class EncoderActivation(Enum):
    """The activation function of an encoder's feed-forward layers."""

    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    """GELU by its approximation with a hyperbolic tangent."""
    RELU = "relu"
    SILU = "silu"


# As `hidden_act` spells them.
_ACTIVATIONS = {
    "gelu": EncoderActivation.GELU,
    "gelu_new": EncoderActivation.GELU_TANH,
    "gelu_pytorch_tanh": EncoderActivation.GELU_TANH,
    "relu": EncoderActivation.RELU,
    "silu": EncoderActivation.SILU,
    "swish": EncoderActivation.SILU,
}

# As `layer_types` spells them.
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Everything that a forward pass needs to know of an encoder except its weights."""

    family: str
    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    max_context: int
    first_position: int
    """Row of the position table that a text's first token gets."""
    norm_epsilon: float
    activation: EncoderActivation
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Reject shapes that no code here could run."""
        if self.hidden_size % self.heads:
            raise ConfigurationError(f"{self.heads} heads cannot share a hidden size of {self.hidden_size}")

    @property
    def head_dim(self) -> int:
        """Components of one head."""
        return self.hidden_size // self.heads


@dataclass(frozen=True, slots=True)
class ModernConfig:
    """The shape of a ModernBERT."""

    family: str
    vocabulary_size: int
    hidden_size: int
    layers: int
    heads: int
    max_context: int
    norm_epsilon: float
    activation: EncoderActivation
    windows: tuple[int | None, ...]
    """[layers], how far a token sees to each side; None: all tokens."""
    thetas: tuple[float, ...]
    """[layers], the base of the rotary frequencies."""
    head_activation: EncoderActivation
    """Of the classification head."""
    head_input: Pooling
    """The hidden states that a head of whole texts reads."""
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Reject shapes that no code here could run."""
        if self.hidden_size % (2 * self.heads):
            raise ConfigurationError(f"{self.heads} heads cannot share a hidden size of {self.hidden_size}")

    @property
    def head_dim(self) -> int:
        """Components of one head."""
        return self.hidden_size // self.heads


def encoder_config(config: Mapping[str, Any]) -> EncoderConfig | ModernConfig:
    """Read the `config.json` of an encoder as `transformers` writes it.

    Raises:
        ConfigurationError: one of its options is not supported, or a field is missing.
    """
    try:
        return _read_modern(config) if config["model_type"] == "modernbert" else _read(config)
    except KeyError as error:
        raise ConfigurationError(f"config.json has no {error.args[0]!r}") from error


def _read(config: Mapping[str, Any]) -> EncoderConfig:
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise ConfigurationError("is_decoder and add_cross_attention are not supported in models of the BERT family")
    positions = config.get("position_embedding_type", "absolute")
    if positions != "absolute":
        raise ConfigurationError(f"position_embedding_type {positions!r} is not supported; supported: absolute")
    return EncoderConfig(
        family=config["model_type"],
        vocabulary_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        max_context=encoder_context(config),
        first_position=first_position(config),
        norm_epsilon=config["layer_norm_eps"],
        activation=_activation(config.get("hidden_act", "gelu")),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def _read_modern(config: Mapping[str, Any]) -> ModernConfig:
    layers = config["num_hidden_layers"]
    every = config.get("global_attn_every_n_layers", 3)
    kinds = config.get("layer_types") or [_SLIDING if i % every else _FULL for i in range(layers)]
    parameters, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling")
    stated = [scaling or {}, *(parameters.get(kind) or {} for kind in (_FULL, _SLIDING))]
    if any(each.get("rope_type", "default") != "default" for each in stated):
        raise ConfigurationError(f"rotary embedding {scaling or parameters} is not supported in ModernBERT")
    thetas = {
        kind: float((parameters.get(kind) or {}).get("rope_theta") or config.get(key) or default)
        for kind, key, default in ((_FULL, "global_rope_theta", 160_000.0), (_SLIDING, "local_rope_theta", 10_000.0))
    }
    pooling = config.get("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise ConfigurationError(f"classifier_pooling {pooling!r} is not supported; supported: cls, mean")
    return ModernConfig(
        family=config["model_type"],
        vocabulary_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        layers=layers,
        heads=config["num_attention_heads"],
        max_context=encoder_context(config),
        norm_epsilon=config.get("norm_eps", 1e-5),
        activation=_activation(config.get("hidden_activation", "gelu")),
        windows=tuple(config.get("local_attention", 128) // 2 if kind == _SLIDING else None for kind in kinds),
        thetas=tuple(thetas[kind] for kind in kinds),
        head_activation=_activation(config.get("classifier_activation", "gelu")),
        head_input=Pooling(pooling),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def _activation(name: str) -> EncoderActivation:
    if name not in _ACTIVATIONS:
        raise ConfigurationError(f"activation {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]

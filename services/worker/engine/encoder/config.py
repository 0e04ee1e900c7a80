"""The shape of an encoder of the BERT family."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from common.encoders import encoder_context, first_position
from common.errors import ConfigurationError

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


def encoder_config(config: Mapping[str, Any]) -> EncoderConfig:
    """Read the `config.json` of an encoder as `transformers` writes it.

    Raises:
        ConfigurationError: one of its options is not supported, or a field is missing.
    """
    try:
        return _read(config)
    except KeyError as error:
        raise ConfigurationError(f"config.json has no {error.args[0]!r}") from error


def _read(config: Mapping[str, Any]) -> EncoderConfig:
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise ConfigurationError("is_decoder and add_cross_attention are not supported in models of the BERT family")
    positions = config.get("position_embedding_type", "absolute")
    if positions != "absolute":
        raise ConfigurationError(f"position_embedding_type {positions!r} is not supported; supported: absolute")
    name = config.get("hidden_act", "gelu")
    if name not in _ACTIVATIONS:
        raise ConfigurationError(f"activation {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
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
        activation=_ACTIVATIONS[name],
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )

"""Classification heads of encoders, over the first token's hidden state or over each token's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from common.errors import ConfigurationError
from common.types import Pooling
from services.worker.engine.encoder.config import ModernConfig
from services.worker.engine.encoder.model import ACTIVATIONS
from services.worker.engine.execution.pooler import PoolerHead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.heads import Head
    from services.worker.engine.encoder.config import EncoderActivation, EncoderConfig
    from services.worker.engine.encoder.weights import TensorSource


@dataclass(frozen=True, slots=True)
class EncoderHead:
    """Layers of weight [outputs, inputs] and bias [outputs], float32, with a hyperbolic tangent between them."""

    layers: Sequence[tuple[torch.Tensor, torch.Tensor]]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the outputs of hidden states [n, hidden], [n, labels] float32."""
        values = hidden.float()
        for number, (weight, bias) in enumerate(self.layers):
            values = torch.nn.functional.linear(torch.tanh(values) if number else values, weight, bias)
        return values


@dataclass(frozen=True, slots=True)
class ModernHead:
    """A layer with an activation, a norm, and the layer of the labels, float32."""

    dense: tuple[torch.Tensor, torch.Tensor | None]
    activation: EncoderActivation
    norm: tuple[torch.Tensor, torch.Tensor | None]
    epsilon: float
    classifier: tuple[torch.Tensor, torch.Tensor | None]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the outputs of hidden states [n, hidden], [n, labels] float32."""
        values = ACTIVATIONS[self.activation](torch.nn.functional.linear(hidden.float(), *self.dense))
        normed = torch.nn.functional.layer_norm(values, values.shape[1:], *self.norm, eps=self.epsilon)
        return torch.nn.functional.linear(normed, *self.classifier)


def read_encoder_head(
    tensors: TensorSource, config: EncoderConfig | ModernConfig, head: Head, device: torch.device
) -> PoolerHead:
    """Read the head of an encoder.

    Raises:
        ConfigurationError: a tensor is missing, or of another shape.
    """
    if isinstance(config, ModernConfig):
        return _read_modern_head(tensors, config, head, device)
    if head.pooling is Pooling.TOKEN_CLASSIFY:
        names = ["classifier"]
    elif config.family == "bert":
        names = ["bert.pooler.dense", "classifier"]
    else:
        names = ["classifier.dense", "classifier.out_proj"]
    layers = [
        tuple(tensors.read(f"{name}.{kind}").to(device, torch.float32, copy=True) for kind in ("weight", "bias"))
        for name in names
    ]
    _check_shape(layers[-1][0], config, head)
    classify = EncoderHead([(weight, bias) for weight, bias in layers])
    return PoolerHead(classify, Pooling.FIRST if head.pooling is Pooling.CLASSIFY else None)


def _read_modern_head(tensors: TensorSource, config: ModernConfig, head: Head, device: torch.device) -> PoolerHead:
    def layer(name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = tensors.read(f"{name}.weight").to(device, torch.float32, copy=True)
        if not tensors.has(f"{name}.bias"):
            return weight, None
        return weight, tensors.read(f"{name}.bias").to(device, torch.float32, copy=True)

    classifier = layer("classifier")
    _check_shape(classifier[0], config, head)
    classify = ModernHead(
        layer("head.dense"), config.head_activation, layer("head.norm"), config.norm_epsilon, classifier
    )
    return PoolerHead(classify, config.head_input if head.pooling is Pooling.CLASSIFY else None)


def _check_shape(weight: torch.Tensor, config: EncoderConfig | ModernConfig, head: Head) -> None:
    shape = tuple(weight.shape)
    if shape != (len(head.labels), config.hidden_size):
        raise ConfigurationError(
            f"the classification head has the shape {shape}, where config.json says {len(head.labels)} labels and a "
            f"hidden size of {config.hidden_size}"
        )

"""Classification heads of decoders: a layer, or two with a ReLU between them, over final hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from common.errors import ConfigurationError
from common.types import Pooling
from services.worker.engine.execution.pooler import PoolerHead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.heads import Head


class HeadTensors(Protocol):
    """Random access to the tensors of a model."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """Return a tensor, or some rows of it, on the CPU, or raise ConfigurationError."""


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """Layers of weight [outputs, inputs] and bias [outputs], float32, as every rank has them."""

    layers: Sequence[tuple[torch.Tensor, torch.Tensor | None]]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the outputs of hidden states [n, hidden], [n, labels] float32."""
        values = hidden.float()
        for number, (weight, bias) in enumerate(self.layers):
            values = torch.nn.functional.linear(torch.relu(values) if number else values, weight, bias)
        return values


def read_score_head(
    tensors: HeadTensors,
    head: Head,
    hidden_size: int,
    device: torch.device,
    *,
    token_ids: Sequence[int] = (),
    vocabulary: str = "lm_head.weight",
) -> PoolerHead:
    """Read the head of a decoder; of `head.tokens`, whose ids are `token_ids`, rows of `vocabulary` make one.

    Raises:
        ConfigurationError: a tensor is missing, or of another shape.
    """
    if head.tokens and not tensors.has("score.weight"):
        first, second = (tensors.read(vocabulary, slice(token_id, token_id + 1)).float() for token_id in token_ids)
        layers: list[tuple[torch.Tensor, torch.Tensor | None]] = [((second - first).to(device), None)]
    else:
        names = ["score"] if tensors.has("score.weight") else ["score.0", "score.2"]
        layers = [_layer(tensors, name, device) for name in names]
    shapes = [tuple(weight.shape) for weight, _ in layers]
    if shapes[-1][0] != len(head.labels) or any(width != hidden_size for _, width in shapes):
        raise ConfigurationError(
            f"the classification head has the shape {shapes}, where config.json says {len(head.labels)} labels and a "
            f"hidden size of {hidden_size}"
        )
    return PoolerHead(ScoreHead(layers), Pooling.LAST if head.pooling is Pooling.CLASSIFY else None)


def _layer(tensors: HeadTensors, name: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = tensors.read(f"{name}.weight").to(device, torch.float32, copy=True)
    if not tensors.has(f"{name}.bias"):
        return weight, None
    return weight, tensors.read(f"{name}.bias").to(device, torch.float32, copy=True)

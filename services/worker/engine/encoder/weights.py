"""From the files of an encoder to its weights, laid out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from common.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.worker.engine.encoder.config import EncoderConfig
    from services.worker.engine.kernels.interface import Kernels, Linear


class TensorSource(Protocol):
    """Random access to the tensors of a model."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU, or raise ConfigurationError."""


@dataclass(frozen=True, slots=True)
class Norm:
    """Scale and shift of a layer norm, [hidden] each."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """One layer's weights. The norms follow the residual sums (Devlin et al. 2019, after Vaswani et al. 2017)."""

    qkv: Linear
    attention_output: Linear
    attention_norm: Norm
    up: Linear
    down: Linear
    output_norm: Norm


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """All weights. `positions` begins with the row of a text's first token, and has the first type's row added."""

    words: torch.Tensor  # [vocabulary, hidden]
    positions: torch.Tensor  # [max_context, hidden]
    second_type: torch.Tensor | None  # [hidden], the second token type's row minus the first one's; None: there is one
    norm: Norm
    layers: Sequence[EncoderLayer]


def read_weights(
    tensors: TensorSource,
    config: EncoderConfig,
    kernels: Kernels,
    device: torch.device,
    report: Callable[[float], None],
) -> EncoderWeights:
    """Read everything; `report` gets the share that is done after each layer.

    Raises:
        ConfigurationError: a tensor is missing.
    """
    return _Reader(tensors, config, kernels, device).read(report)


class _Reader:
    def __init__(self, tensors: TensorSource, config: EncoderConfig, kernels: Kernels, device: torch.device) -> None:
        self._tensors = tensors
        self._config = config
        self._kernels = kernels
        self._device = device
        # In checkpoints with a head, such as masked language models, the encoder has its family's name as prefix.
        candidates = ("", f"{config.family.removeprefix('xlm-')}.")
        found = [prefix for prefix in candidates if tensors.has(f"{prefix}embeddings.word_embeddings.weight")]
        if not found:
            raise ConfigurationError("the checkpoint has no tensor 'embeddings.word_embeddings.weight'")
        self._prefix = found[0]

    def read(self, report: Callable[[float], None]) -> EncoderWeights:
        config = self._config
        words = self._tensor("embeddings.word_embeddings.weight")
        positions = self._tensor("embeddings.position_embeddings.weight")[config.first_position :]
        # Of a pair, tokens of the second text have the second token type; all others have the first one.
        types = self._tensor("embeddings.token_type_embeddings.weight").float()
        report(1 / (config.layers + 1))
        layers = []
        for i in range(config.layers):
            layers.append(self._layer(f"encoder.layer.{i}"))
            report((i + 2) / (config.layers + 1))
        return EncoderWeights(
            words=self._placed(words),
            positions=self._placed(positions.float() + types[0]),
            second_type=self._placed(types[1] - types[0]) if len(types) > 1 else None,
            norm=self._norm("embeddings.LayerNorm"),
            layers=tuple(layers),
        )

    def _layer(self, prefix: str) -> EncoderLayer:
        attention = f"{prefix}.attention"
        parts = [f"{attention}.self.{name}" for name in ("query", "key", "value")]
        qkv = self._kernels.linear(
            torch.cat([self._tensor(f"{part}.weight") for part in parts]),
            torch.cat([self._tensor(f"{part}.bias") for part in parts]),
        )
        return EncoderLayer(
            qkv=qkv,
            attention_output=self._linear(f"{attention}.output.dense"),
            attention_norm=self._norm(f"{attention}.output.LayerNorm"),
            up=self._linear(f"{prefix}.intermediate.dense"),
            down=self._linear(f"{prefix}.output.dense"),
            output_norm=self._norm(f"{prefix}.output.LayerNorm"),
        )

    def _linear(self, name: str) -> Linear:
        return self._kernels.linear(self._tensor(f"{name}.weight"), self._tensor(f"{name}.bias"))

    def _norm(self, name: str) -> Norm:
        return Norm(self._placed(self._tensor(f"{name}.weight")), self._placed(self._tensor(f"{name}.bias")))

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        # A copy: the tensor may be a view of the whole file.
        return tensor.to(self._device, self._kernels.activation_dtype, copy=True)

    def _tensor(self, name: str) -> torch.Tensor:
        return self._tensors.read(f"{self._prefix}{name}")

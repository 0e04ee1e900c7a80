"""ModernBERT (Warner et al. 2024): rotary positions, gated feed-forward layers, and windows in most layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import layer_norm

from common.errors import ConfigurationError
from services.worker.engine.encoder.model import ACTIVATIONS, TextAttention

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from services.worker.engine.encoder.config import ModernConfig
    from services.worker.engine.encoder.weights import TensorSource
    from services.worker.engine.kernels.interface import Kernels, Linear

_FIRST = "embeddings.tok_embeddings.weight"


@dataclass(frozen=True, slots=True)
class ModernNorm:
    """Scale and, in some models, shift of a layer norm, [hidden] each."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ModernLayer:
    """One layer's weights. The norms precede attention and feed-forward; the first layer has none before attention."""

    attention_norm: ModernNorm | None
    qkv: Linear
    attention_output: Linear
    feed_forward_norm: ModernNorm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModernWeights:
    """All weights."""

    words: torch.Tensor  # [vocabulary, hidden]
    norm: ModernNorm
    layers: Sequence[ModernLayer]
    final_norm: ModernNorm


class ModernEncoder:
    """Computes hidden states of whole texts, and keeps nothing between them; see `Encoder`."""

    def __init__(self, weights: ModernWeights, config: ModernConfig) -> None:
        """Run `weights`."""
        self._weights = weights
        self._config = config
        self._activate = ACTIVATIONS[config.activation]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: NDArray[np.int64],
        is_second: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return hidden states [tokens, hidden]; see `Encoder.forward`. There are no token types."""
        weights, config = self._weights, self._config
        hidden = self._normed(weights.words[token_ids], weights.norm)
        attention = {
            window: TextAttention(lengths, config.heads, hidden.device, window=window) for window in set(config.windows)
        }
        angles = {theta: _angles(positions, theta, config.head_dim) for theta in set(config.thetas)}
        for layer, window, theta in zip(weights.layers, config.windows, config.thetas, strict=True):
            normed = hidden if layer.attention_norm is None else self._normed(hidden, layer.attention_norm)
            attended = attention[window](self._rotated(layer.qkv(normed), angles[theta]))
            hidden = hidden + layer.attention_output(attended)
            inner, gate = layer.gate_up(self._normed(hidden, layer.feed_forward_norm)).chunk(2, dim=-1)
            hidden = hidden + layer.down(self._activate(inner) * gate)
        return self._normed(hidden, weights.final_norm)

    def _rotated(self, qkv: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Rotate queries and keys of [tokens, 3 hidden], halves of a head against each other, in float32."""
        heads = qkv.view(-1, 3, self._config.heads, self._config.head_dim)
        cosines, sines = angles.cos()[:, None, None], angles.sin()[:, None, None]
        first, second = heads[:, :2].float().chunk(2, dim=-1)
        rotated = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
        return torch.cat([rotated.to(qkv.dtype), heads[:, 2:]], dim=1).view(qkv.shape)

    def _normed(self, hidden: torch.Tensor, norm: ModernNorm) -> torch.Tensor:
        return layer_norm(hidden, hidden.shape[1:], norm.weight, norm.bias, self._config.norm_epsilon)


def _angles(positions: torch.Tensor, theta: float, head_dim: int) -> torch.Tensor:
    """Return the angles of each token, [tokens, head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    return positions[:, None].float() * theta**-exponents


def read_modern_weights(
    tensors: TensorSource,
    config: ModernConfig,
    kernels: Kernels,
    device: torch.device,
    report: Callable[[float], None],
) -> ModernWeights:
    """Read everything; `report` gets the share that is done after each layer.

    Raises:
        ConfigurationError: a tensor is missing.
    """
    # In checkpoints with a head the encoder is called `model`.
    found = [prefix for prefix in ("", "model.") if tensors.has(prefix + _FIRST)]
    if not found:
        raise ConfigurationError(f"the checkpoint has no tensor {_FIRST!r}")
    prefix = found[0]

    def placed(name: str) -> torch.Tensor:
        return tensors.read(prefix + name).to(device, kernels.activation_dtype, copy=True)

    def norm(name: str) -> ModernNorm:
        bias = placed(f"{name}.bias") if tensors.has(f"{prefix}{name}.bias") else None
        return ModernNorm(placed(f"{name}.weight"), bias)

    def linear(name: str) -> Linear:
        bias = tensors.read(f"{prefix}{name}.bias") if tensors.has(f"{prefix}{name}.bias") else None
        return kernels.linear(tensors.read(f"{prefix}{name}.weight"), bias)

    layers = []
    for i in range(config.layers):
        layers.append(
            ModernLayer(
                attention_norm=norm(f"layers.{i}.attn_norm") if i else None,
                qkv=linear(f"layers.{i}.attn.Wqkv"),
                attention_output=linear(f"layers.{i}.attn.Wo"),
                feed_forward_norm=norm(f"layers.{i}.mlp_norm"),
                gate_up=linear(f"layers.{i}.mlp.Wi"),
                down=linear(f"layers.{i}.mlp.Wo"),
            )
        )
        report((i + 1) / config.layers)
    return ModernWeights(placed(_FIRST), norm("embeddings.norm"), tuple(layers), norm("final_norm"))

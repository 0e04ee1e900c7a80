"""The forward pass of the BERT family (Devlin et al. 2019): every token sees every other one of its text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.functional import gelu, layer_norm, relu, silu

from services.worker.engine.encoder.attention import TextAttention
from services.worker.engine.encoder.config import Activation

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from services.worker.engine.encoder.config import EncoderConfig
    from services.worker.engine.encoder.weights import EncoderLayer, EncoderWeights, Norm

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.GELU: gelu,
    Activation.GELU_TANH: lambda inputs: gelu(inputs, approximate="tanh"),
    Activation.RELU: relu,
    Activation.SILU: silu,
}


class Encoder:
    """Computes hidden states of whole texts, and keeps nothing between them."""

    def __init__(self, weights: EncoderWeights, config: EncoderConfig) -> None:
        """Run `weights`."""
        self._weights = weights
        self._heads = config.heads
        self._epsilon = config.norm_epsilon
        self._activate = _ACTIVATIONS[config.activation]

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, lengths: NDArray[np.int64]) -> torch.Tensor:
        """Return hidden states [tokens, hidden] of consecutive texts of `lengths` tokens.

        `token_ids` and `positions`, from 0 in each text, are [tokens] int64.
        """
        weights = self._weights
        hidden = self._normed(weights.words[token_ids] + weights.positions[positions], weights.norm)
        attention = TextAttention(lengths, self._heads, hidden.device)
        for layer in weights.layers:
            hidden = self._run(layer, hidden, attention)
        return hidden

    def _run(self, layer: EncoderLayer, hidden: torch.Tensor, attention: TextAttention) -> torch.Tensor:
        layer.attention_output.add_to(attention(layer.qkv(hidden)), hidden)
        hidden = self._normed(hidden, layer.attention_norm)
        layer.down.add_to(self._activate(layer.up(hidden)), hidden)
        return self._normed(hidden, layer.output_norm)

    def _normed(self, hidden: torch.Tensor, norm: Norm) -> torch.Tensor:
        return layer_norm(hidden, hidden.shape[1:], norm.weight, norm.bias, self._epsilon)

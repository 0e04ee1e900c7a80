"""The forward pass of the BERT family (Devlin et al. 2019): every token sees every other one of its text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import gelu, layer_norm, relu, scaled_dot_product_attention, silu

from services.worker.engine.encoder.config import EncoderActivation
from services.worker.engine.uploads import to_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from services.worker.engine.encoder.config import EncoderConfig
    from services.worker.engine.encoder.weights import EncoderLayer, EncoderWeights, Norm

ACTIVATIONS: dict[EncoderActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    EncoderActivation.GELU: gelu,
    EncoderActivation.GELU_TANH: lambda inputs: gelu(inputs, approximate="tanh"),
    EncoderActivation.RELU: relu,
    EncoderActivation.SILU: silu,
}
# Texts whose lengths fall between the same multiples of this are computed together, filled up to the longest of them.
_STEP = 16
# Of FlashAttention: the oldest GPUs, types, and components of a head, which are a multiple of a step up to a limit.
_FLASH_CAPABILITY = (8, 0)
_FLASH_TYPES = (torch.bfloat16, torch.float16)
_FLASH_STEP, _FLASH_WIDEST = 8, 256


class Encoder:
    """Computes hidden states of whole texts, and keeps nothing between them."""

    def __init__(self, weights: EncoderWeights, config: EncoderConfig) -> None:
        """Run `weights`."""
        self._weights = weights
        self._heads = config.heads
        self._epsilon = config.norm_epsilon
        self._activate = ACTIVATIONS[config.activation]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: NDArray[np.int64],
        is_second: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return hidden states [tokens, hidden] of consecutive texts of `lengths` tokens.

        `token_ids` and `positions`, from 0 in each text, are [tokens] int64; `is_second` [tokens] bool marks the second
        texts of pairs.
        """
        weights = self._weights
        embedded = weights.words[token_ids] + weights.positions[positions]
        if is_second is not None and weights.second_type is not None:
            embedded += is_second[:, None] * weights.second_type
        hidden = self._normed(embedded, weights.norm)
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


@dataclass(frozen=True, slots=True)
class _Group:
    """Texts of similar lengths as a rectangle; tokens are numbered as in the batch."""

    tokens: torch.Tensor  # [texts, longest] int64, what fills up is any token
    sees: torch.Tensor | None  # [texts, 1, 1 or longest, longest] bool, which keys queries see; None: all
    is_filled_up: bool
    places: torch.Tensor  # [real tokens] int64, of the flattened rectangle
    numbers: torch.Tensor  # [real tokens] int64, the tokens there


class TextAttention:
    """Bidirectional attention for one batch.

    Texts of one length are a rectangle. Others are computed as they are by FlashAttention (Dao 2023, as torch packages
    it for GPUs from Ampere on), and elsewhere as rectangles: what fills those up is masked, and nothing of it is kept.
    """

    def __init__(
        self, lengths: NDArray[np.int64], heads: int, device: torch.device, *, window: int | None = None
    ) -> None:
        """Prepare for consecutive texts of `lengths` tokens, which see `window` tokens to each side; None: all."""
        self._heads = heads
        self.lengths = lengths
        self._device = device
        self._window = window
        self._longest = int(lengths.max(initial=0))
        has_window = window is not None and self._longest > window + 1
        self._are_equal = not has_window and len(lengths) > 0 and bool((lengths == self._longest).all())
        self._ends = (
            to_device(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32), device)
            if has_flash_attention(device)
            else None
        )

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """Return the attention output [tokens, hidden] for queries, keys and values side by side [tokens, 3 hidden]."""
        hidden = qkv.shape[1] // 3
        heads = qkv.view(-1, 3, self._heads, hidden // self._heads)
        if self._are_equal:
            texts = heads.view(len(self.lengths), self._longest, *heads.shape[1:])
            attended = scaled_dot_product_attention(*texts.permute(2, 0, 3, 1, 4))
            return attended.transpose(1, 2).reshape(-1, hidden)
        if self._ends is not None and len(qkv) and _suits_flash(heads):
            from torch.nn.attention.varlen import varlen_attn

            queries, keys, values = heads.unbind(1)
            seen = -1 if self._window is None else self._window
            packed = varlen_attn(
                queries, keys, values, self._ends, self._ends, self._longest, self._longest, window_size=(seen, seen)
            )
            assert isinstance(packed, torch.Tensor), "nothing beside it was asked for"
            return packed.reshape(-1, hidden)
        output = qkv.new_empty(qkv.shape[0], hidden)
        for group in self._groups:
            # [3, texts, heads, longest, head_dim]
            queries, keys, values = heads[group.tokens].permute(2, 0, 3, 1, 4)
            attended = scaled_dot_product_attention(queries, keys, values, attn_mask=group.sees)
            flat = attended.transpose(1, 2).reshape(-1, hidden)
            output[group.numbers] = flat[group.places] if group.is_filled_up else flat
        return output

    @cached_property
    def _groups(self) -> list[_Group]:
        lengths, starts = self.lengths, np.cumsum(self.lengths) - self.lengths
        buckets = -(-lengths // _STEP)
        return [
            _group(starts[buckets == one], lengths[buckets == one], self._device, self._window)
            for one in np.unique(buckets)
        ]


def has_flash_attention(device: torch.device) -> bool:
    """Whether torch has FlashAttention for a device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FLASH_CAPABILITY


def import_flash_attention(device: torch.device) -> None:
    """Import FlashAttention before the first batch on a device that has it.

    That takes about a second and brings torch's compiler, which nothing else on a CPU needs.
    """
    if has_flash_attention(device):
        import torch.nn.attention.varlen  # noqa: F401


def _suits_flash(heads: torch.Tensor) -> bool:
    head_dim = heads.shape[-1]
    return heads.dtype in _FLASH_TYPES and head_dim % _FLASH_STEP == 0 and head_dim <= _FLASH_WIDEST


def _group(starts: NDArray[np.int64], lengths: NDArray[np.int64], device: torch.device, window: int | None) -> _Group:
    longest = int(lengths.max())
    offsets = np.arange(longest)
    is_real = offsets[None, :] < lengths[:, None]
    tokens = starts[:, None] + np.minimum(offsets[None, :], lengths[:, None] - 1)
    is_filled_up = not is_real.all()
    sees = to_device(is_real[:, None, None], device) if is_filled_up else None
    if window is not None and longest > window + 1:
        places = torch.arange(longest, device=device)
        is_near = (places[:, None] - places[None, :]).abs() <= window
        # Every query sees itself, so that what fills up has no empty row.
        sees = is_near[None, None] if sees is None else is_near & (sees | (places[:, None] == places[None, :]))
    return _Group(
        tokens=to_device(tokens, device),
        sees=sees,
        is_filled_up=is_filled_up,
        places=to_device(np.flatnonzero(is_real), device),
        numbers=to_device(tokens[is_real], device),
    )

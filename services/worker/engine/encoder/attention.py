"""Attention among all tokens of each text, over texts of different lengths in one batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Texts whose lengths fall between the same multiples of this are computed together, filled up to the longest of them.
_STEP = 16


@dataclass(frozen=True, slots=True)
class _Group:
    """Texts of similar lengths as a rectangle; tokens are numbered as in the batch."""

    tokens: torch.Tensor  # [texts, longest] int64, what fills up is any token
    is_real: torch.Tensor | None  # [texts, 1, 1, longest] bool; None: nothing fills up
    places: torch.Tensor  # [real tokens] int64, of the flattened rectangle
    numbers: torch.Tensor  # [real tokens] int64, the tokens there


class TextAttention:
    """Bidirectional attention for one batch. What fills rectangles up is masked, and nothing of it is kept."""

    def __init__(self, lengths: NDArray[np.int64], heads: int, device: torch.device) -> None:
        """Prepare for consecutive texts of `lengths` tokens."""
        self._heads = heads
        starts = np.cumsum(lengths) - lengths
        buckets = -(-lengths // _STEP)
        self._groups = [_group(starts[buckets == one], lengths[buckets == one], device) for one in np.unique(buckets)]

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """Return the attention output [tokens, hidden] for queries, keys and values side by side [tokens, 3 hidden]."""
        hidden = qkv.shape[1] // 3
        heads = qkv.view(-1, 3, self._heads, hidden // self._heads)
        output = qkv.new_empty(qkv.shape[0], hidden)
        for group in self._groups:
            # [3, texts, heads, longest, head_dim]
            queries, keys, values = heads[group.tokens].permute(2, 0, 3, 1, 4)
            attended = scaled_dot_product_attention(queries, keys, values, attn_mask=group.is_real)
            flat = attended.transpose(1, 2).reshape(-1, hidden)
            output[group.numbers] = flat if group.is_real is None else flat[group.places]
        return output


def _group(starts: NDArray[np.int64], lengths: NDArray[np.int64], device: torch.device) -> _Group:
    longest = int(lengths.max())
    offsets = np.arange(longest)
    is_real = offsets[None, :] < lengths[:, None]
    tokens = starts[:, None] + np.minimum(offsets[None, :], lengths[:, None] - 1)
    return _Group(
        tokens=torch.from_numpy(tokens).to(device),
        is_real=None if is_real.all() else torch.from_numpy(is_real[:, None, None]).to(device),
        places=torch.from_numpy(np.flatnonzero(is_real)).to(device),
        numbers=torch.from_numpy(tokens[is_real]).to(device),
    )

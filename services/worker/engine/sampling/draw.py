"""Drawing tokens by inverting the cumulative distribution, with one uniform number per row."""

from __future__ import annotations

import torch

from services.worker.engine.sampling.order import BLOCK


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the index at which each row's cumulative weight exceeds its uniform share of the total, [rows] int64.

    An entry of weight 0 is never drawn. The search goes by blocks: sums of blocks cost one pass over the weights, a
    cumulative sum of all of them would cost many times that.

    Args:
        weights: [rows, entries] float32, at least 0, entries in whole blocks; need not sum to 1.
        uniforms: [rows] float32 in [0, 1).
    """
    rows, entries = weights.shape
    blocks = weights.view(rows, entries // BLOCK, BLOCK)
    mass = blocks.sum(-1).cumsum(-1)
    target = uniforms * mass[:, -1]
    block = _invert(mass, target)
    before = torch.where(block > 0, mass.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    inner = blocks.gather(1, block[:, None, None].expand(-1, -1, BLOCK))[:, 0].cumsum(-1)
    return block * BLOCK + _invert(inner, target - before)


def _invert(mass: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the first index of each row whose cumulative mass exceeds the target.

    Rounding may leave none; then it is the first index that has all the mass, which is the last with a weight.
    """
    beyond = (mass <= target[:, None]).sum(-1)
    final = (mass < mass[:, -1:]).sum(-1)
    return torch.minimum(beyond, final)

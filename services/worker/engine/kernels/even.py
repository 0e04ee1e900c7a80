"""Elementwise functions that torch computes in the same way wherever an element lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from collections.abc import Callable

# On CPUs, torch computes whole steps of elements in vector registers, and what is left over at the end of a tensor, or
# of a thread's share, by other instructions, whose last bits differ. A multiple of every processor's step; and fewer
# elements than torch divides among threads.
_STEP, _PIECE = 64, 16384


def evenly(function: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    """Return `function` of each element, which does not depend on the element's place or the size of `inputs`.

    Not needed for functions whose results are rounded exactly, such as sums, products, quotients and square roots.
    """
    if inputs.device.type != "cpu":
        return function(inputs)
    flat = inputs.flatten()
    count = flat.numel()
    padded = pad(flat, (0, -count % _STEP))
    if count <= _PIECE:
        return function(padded)[:count].view(inputs.shape)
    return torch.cat([function(piece) for piece in torch.split(padded, _PIECE)])[:count].view(inputs.shape)

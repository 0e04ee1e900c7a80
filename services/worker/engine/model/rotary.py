"""The angles of rotary position embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from services.worker.engine.model.config import RotaryConfig


def rotary_table(rotary: RotaryConfig, head_dim: int, positions: int, device: torch.device) -> torch.Tensor:
    """Return [positions, head_dim] float32: cosines of each position's angles, then their sines, times the amplitude.

    Computed as `transformers` does, in float32 throughout: the last bits decide near ties between tokens.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rotary.theta**exponents)
    if rotary.frequency_divisors:
        frequencies = frequencies / torch.tensor(rotary.frequency_divisors, dtype=torch.float32)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * rotary.amplitude).to(device)

"""The angles of rotary position embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from services.worker.engine.model.config import RotaryConfig


def rotary_table(rotary: RotaryConfig, head_dim: int, positions: int, device: torch.device) -> torch.Tensor:
    """Return [positions, head_dim] float32: cosines of each position's angles, then their sines, times the amplitude.

    Components that are not rotated come last in each half, with angles of 0; see `head_order`.

    Computed as `transformers` does, in float32 throughout: the last bits decide near ties between tokens.
    """
    rotated = rotary.rotated or head_dim
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
    frequencies = 1.0 / (rotary.theta**exponents)
    if rotary.frequency_divisors:
        frequencies = frequencies / torch.tensor(rotary.frequency_divisors, dtype=torch.float32)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    still = (0, (head_dim - rotated) // 2)
    cosines, sines = angles.cos() * rotary.amplitude, angles.sin() * rotary.amplitude
    return torch.cat((pad(cosines, still, value=1.0), pad(sines, still)), dim=1).to(device)

"""The angles of rotary position embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from services.worker.engine.model.config import RotaryConfig


class AxisAngles:
    """Angles of tokens with coordinates on several axes: each frequency takes those of one of them."""

    def __init__(self, table: torch.Tensor, axes: tuple[int, ...]) -> None:
        """Take rows of `table`, which is `rotary_table`'s; frequency i takes the coordinates on `axes[i]`."""
        self._table = table
        # Those that are not rotated take any.
        still = table.shape[1] // 2 - len(axes)
        self._axes = torch.tensor((*axes, *(0,) * still) * 2, device=table.device)

    def __call__(self, coordinates: torch.Tensor) -> torch.Tensor:
        """Return [tokens, head_dim] as `rotary_table` does for coordinates [axes, tokens] int64."""
        return self._table.gather(0, coordinates[self._axes].t())


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

"""Angles of rotary position embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from services.worker.engine.model.config import ModelConfig


def rotary_table(config: ModelConfig, positions: int, device: torch.device) -> torch.Tensor:
    """Return [positions, head_dim] float32: cosines of each position's angles, then their sines.

    Computed as `transformers` does, in float32 throughout: the last bits decide near ties between tokens.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rotary.theta**exponents)
    if config.rotary.frequency_divisors:
        frequencies = frequencies / torch.tensor(config.rotary.frequency_divisors, dtype=torch.float32)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(device)

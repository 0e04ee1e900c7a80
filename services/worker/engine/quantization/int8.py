"""INT8 matrices with one scale per output, and activations with one scale per token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGEST, SMALLEST_VALUE = 127.0, -128.0
# Half of the range from -128 to 127 by which compressed-tensors divides the largest absolute value.
HALF_RANGE = 127.5
# Rows of zeros are scaled as if this were the largest of their values.
SMALLEST = 1e-12


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """A matrix [out, in]: row i is `values[i] * scales[i]`."""

    values: torch.Tensor  # [out, in] int8
    scales: torch.Tensor  # [out] float32

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def columns(self, part: slice) -> Int8Matrix:
        """Return some of the inputs' columns; the scales stay those of whole rows."""
        return Int8Matrix(self.values[:, part].contiguous(), self.scales)

    def to(self, device: torch.device) -> Int8Matrix:
        """Return the matrix on `device`."""
        return Int8Matrix(self.values.to(device).contiguous(), self.scales.to(device))


def quantise(weight: torch.Tensor) -> Int8Matrix:
    """Return a matrix [out, in] in INT8."""
    values, scales = quantise_rows(weight)
    return Int8Matrix(values, scales[:, 0])


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [tokens, width] in INT8, rounded to nearest even, and their scales.

    Returns:
        [tokens, width] int8 and [tokens, 1] float32.
    """
    wide = rows.float()
    scales = wide.abs().amax(dim=-1, keepdim=True).clamp_min(SMALLEST) / HALF_RANGE
    return (wide / scales).round_().clamp_(SMALLEST_VALUE, LARGEST).to(torch.int8), scales

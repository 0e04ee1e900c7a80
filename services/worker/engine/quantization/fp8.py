"""Matrices in FP8 with a scale for each output, and their products where nothing multiplies FP8.

The type is e4m3 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"): four bits of exponent, three of mantissa,
no infinity. Activations are scaled, too, each token by itself when it is multiplied: so what a token gets does not
depend on what it is batched with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


FP8 = torch.float8_e4m3fn
LARGEST = 448.0
# Rows of zeros are scaled as if this were the largest of their values.
SMALLEST = 1e-12
# Units multiply blocks of so many values, in both dimensions of a matrix.
WIDTH_UNIT = 16
# Rows of a matrix that are widened together while it is quantised.
_ROWS_AT_ONCE = 2048


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A matrix [out, in]: row i is `values[i] * scales[i]`."""

    values: torch.Tensor  # [out, in] float8_e4m3fn
    scales: torch.Tensor  # [out] float32

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def columns(self, part: slice) -> Fp8Matrix:
        """Return some of the inputs' columns; the scales stay those of whole rows."""
        return Fp8Matrix(self.values[:, part].contiguous(), self.scales)

    def to(self, device: torch.device) -> Fp8Matrix:
        """Return the matrix on `device`."""
        return Fp8Matrix(self.values.to(device).contiguous(), self.scales.to(device))


def stacked(matrices: Sequence[Fp8Matrix]) -> Fp8Matrix:
    """Return matrices of the same inputs as one, above each other."""
    # As bytes: not everything that moves them knows the type.
    values = torch.cat([each.values.view(torch.uint8) for each in matrices]).view(FP8)
    return Fp8Matrix(values, torch.cat([each.scales for each in matrices]))


def above(*matrices: torch.Tensor | Fp8Matrix) -> torch.Tensor | Fp8Matrix:
    """Return matrices of the same inputs, all in FP8 or none, as one: the first lies above the others."""
    narrow = [matrix for matrix in matrices if isinstance(matrix, Fp8Matrix)]
    wide = [matrix for matrix in matrices if not isinstance(matrix, Fp8Matrix)]
    assert not (narrow and wide), "matrices of one product are held alike"
    return stacked(narrow) if narrow else torch.cat(wide)


def quantise(weight: torch.Tensor) -> Fp8Matrix:
    """Return a matrix [out, in] in FP8, each row scaled so that its largest value is the largest there is."""
    blocks = [quantise_rows(block) for block in torch.split(weight, _ROWS_AT_ONCE)]
    return stacked([Fp8Matrix(values, scales[:, 0]) for values, scales in blocks])


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [tokens, width] in FP8, rounded to nearest even, and their scales.

    Returns:
        [tokens, width] float8_e4m3fn and [tokens, 1] float32.
    """
    wide = rows.float()
    scales = wide.abs().amax(dim=-1, keepdim=True).clamp_min(SMALLEST) / LARGEST
    # What rounding pushes beyond the largest value would become a NaN in some versions of torch.
    return (wide / scales).clamp_(-LARGEST, LARGEST).to(FP8), scales

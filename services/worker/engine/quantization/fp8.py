"""Matrices in FP8 with a scale for each output, or for each block, and the quantisation of activations.

The type is e4m3 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"): four bits of exponent, three of mantissa,
no infinity. Activations are scaled, too, each token by itself when it is multiplied: so what a token gets does not
depend on what it is batched with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from services.worker.engine.quantization.formats import FP8_BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence


FP8 = torch.float8_e4m3fn
LARGEST = 448.0
# Rows of zeros are scaled as if this were the largest of their values.
SMALLEST = 1e-12
# Units multiply blocks of so many values, in both dimensions of a matrix.
WIDTH_UNIT = 16
# Of activations beside dummy weights: the largest is 28.
DUMMY_INPUT_SCALE = 1 / 16
# Rows of a matrix that are widened together while it is quantised.
_ROWS_AT_ONCE = 2048


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A matrix [out, in]: row i is `values[i] * scales[i]`."""

    values: torch.Tensor  # [out, in] float8_e4m3fn
    scales: torch.Tensor  # [out] float32
    input_scale: torch.Tensor | None = None  # [1] float32, of all activations; None: each token has its own

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def columns(self, part: slice) -> Fp8Matrix:
        """Return some of the inputs' columns; the scales stay those of whole rows."""
        return replace(self, values=self.values[:, part].contiguous())

    def to(self, device: torch.device) -> Fp8Matrix:
        """Return the matrix on `device`."""
        input_scale = None if self.input_scale is None else self.input_scale.to(device)
        return Fp8Matrix(self.values.to(device).contiguous(), self.scales.to(device), input_scale)


@dataclass(frozen=True, slots=True)
class Fp8BlockMatrix:
    """A matrix [out, in] with a scale for each 128 inputs of a row, as activations have them.

    Stored scales belong to blocks of 128 x 128. They are repeated for each row, so that matrices can be cut and stacked
    anywhere; that takes 3 % of the matrix's memory. The last columns are filled up with zeros.
    """

    values: torch.Tensor  # [out, blocks * 128] float8_e4m3fn
    scales: torch.Tensor  # [out, blocks] float32
    inputs: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.values.shape[0], self.inputs))

    def columns(self, part: slice) -> Fp8BlockMatrix:
        """Return some of the inputs' columns, whole blocks."""
        assert part.start % FP8_BLOCK == 0, "blocks of activations are not cut"
        blocks = slice(part.start // FP8_BLOCK, -(-part.stop // FP8_BLOCK))
        columns = slice(part.start, blocks.stop * FP8_BLOCK)
        return Fp8BlockMatrix(
            self.values[:, columns].contiguous(), self.scales[:, blocks].contiguous(), part.stop - part.start
        )

    def to(self, device: torch.device) -> Fp8BlockMatrix:
        """Return the matrix on `device`."""
        return Fp8BlockMatrix(self.values.to(device).contiguous(), self.scales.to(device).contiguous(), self.inputs)

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights, computed in float32, in `dtype`, [out, blocks * 128]."""
        outputs, blocks = self.scales.shape
        values = self.values.view(outputs, blocks, FP8_BLOCK).float() * self.scales[:, :, None]
        return values.to(dtype).view(outputs, -1)


def block_matrix(values: torch.Tensor, scales: torch.Tensor) -> Fp8BlockMatrix:
    """Return a matrix [out, in] of FP8 values with scales [out, ceil(in / 128)]."""
    inputs = values.shape[1]
    missing = -inputs % FP8_BLOCK
    # As bytes: not everything that moves them knows the type.
    padded = pad(values.view(torch.uint8), (0, missing)).view(FP8) if missing else values
    return Fp8BlockMatrix(padded, scales.float().contiguous(), inputs)


def stacked(matrices: Sequence[Fp8Matrix]) -> Fp8Matrix:
    """Return matrices of the same inputs as one, above each other; of several scales for activations the largest."""
    # As bytes: not everything that moves them knows the type.
    values = torch.cat([each.values.view(torch.uint8) for each in matrices]).view(FP8)
    given = [each.input_scale for each in matrices if each.input_scale is not None]
    return Fp8Matrix(
        values, torch.cat([each.scales for each in matrices]), torch.cat(given).amax(0, keepdim=True) if given else None
    )


def stacked_blocks(matrices: Sequence[Fp8BlockMatrix]) -> Fp8BlockMatrix:
    """Return matrices of the same inputs as one, above each other."""
    values = torch.cat([each.values.view(torch.uint8) for each in matrices]).view(FP8)
    return Fp8BlockMatrix(values, torch.cat([each.scales for each in matrices]), matrices[0].inputs)


def quantise(weight: torch.Tensor) -> Fp8Matrix:
    """Return a matrix [out, in] in FP8, each row scaled so that its largest value is the largest there is."""
    blocks = [quantise_rows(block) for block in torch.split(weight, _ROWS_AT_ONCE)]
    return stacked([Fp8Matrix(values, scales[:, 0]) for values, scales in blocks])


def quantise_static(weight: torch.Tensor) -> Fp8Matrix:
    """Return the same with a scale of activations, as dummy weights have it: these were measured nowhere."""
    return replace(quantise(weight), input_scale=torch.full((1,), DUMMY_INPUT_SCALE, device=weight.device))


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [tokens, width] in FP8, rounded to nearest even, and their scales.

    Returns:
        [tokens, width] float8_e4m3fn and [tokens, 1] float32.
    """
    wide = rows.float()
    scales = wide.abs().amax(dim=-1, keepdim=True).clamp_min(SMALLEST) / LARGEST
    # What rounding pushes beyond the largest value would become a NaN in some versions of torch.
    return (wide / scales).clamp_(-LARGEST, LARGEST).to(FP8), scales


def quantise_with(rows: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [tokens, width] in FP8 by one scale [1], larger values cut off, and that scale for each row.

    Returns:
        [tokens, width] float8_e4m3fn and [tokens, 1] float32.
    """
    values = (rows.float() / scale).clamp_(-LARGEST, LARGEST).to(FP8)
    return values, scale.expand(rows.shape[0], 1)


def quantise_groups(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [tokens, width] in FP8, filled up with zeros, each 128 of them with a scale.

    Returns:
        [tokens, groups * 128] float8_e4m3fn and [tokens, groups] float32.
    """
    values, scales = quantise_rows(in_blocks(rows).reshape(-1, FP8_BLOCK))
    return values.view(rows.shape[0], -1), scales.view(rows.shape[0], -1)


def quantise_blocks(weight: torch.Tensor) -> Fp8BlockMatrix:
    """Return a matrix [out, in] in FP8 with one scale for each block of 128 x 128."""
    outputs, inputs = weight.shape
    padded = pad(weight.float(), (0, -inputs % FP8_BLOCK, 0, -outputs % FP8_BLOCK))
    blocks = padded.view(padded.shape[0] // FP8_BLOCK, FP8_BLOCK, -1, FP8_BLOCK)
    scales = blocks.abs().amax(dim=(1, 3)).clamp_min(SMALLEST) / LARGEST
    of_rows = scales.repeat_interleave(FP8_BLOCK, dim=0)[:outputs]
    spread = of_rows.repeat_interleave(FP8_BLOCK, dim=1)[:, :inputs]
    return block_matrix((weight.float() / spread).clamp_(-LARGEST, LARGEST).to(FP8), of_rows)


def in_blocks(rows: torch.Tensor) -> torch.Tensor:
    """Return rows [tokens, width] filled up with zeros to a multiple of 128."""
    missing = -rows.shape[1] % FP8_BLOCK
    return pad(rows, (0, missing)) if missing else rows

"""Rows of activations in FP8, scaled and rounded row by row; other programs do so with what they compute."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.worker.engine.kernels.gpu.dependent_launch import follow, launch_options
from services.worker.engine.quantization.fp8 import FP8, LARGEST, SMALLEST

# The constants of programs that call `in_fp8`.
LIMITS = {"LARGEST": LARGEST, "SMALLEST": SMALLEST}


@triton.jit
def _to_grid(values, LARGEST: tl.constexpr):
    """Return values that FP8 has, rounded to nearest even and saturated, as float32.

    A cast alone would do on a GPU, but not in Triton's interpreter, which loses what the mantissa carries over. What
    FP8 has exactly, all cast alike.
    """
    bits = values.to(tl.int32, bitcast=True)
    # To three bits of mantissa; 20 are dropped.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    # Below 2^-6 in steps of 2^-9, which are the last bits of numbers around 1.5 * 2^14.
    subnormal = (values + 24576.0) - 24576.0
    rounded = tl.where(tl.abs(values) < 0.015625, subnormal, normal)
    return tl.minimum(tl.maximum(rounded, -LARGEST), LARGEST)


@triton.jit
def in_fp8(row, given_scale, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, IS_GIVEN: tl.constexpr):
    """Return values that FP8 has, and the scale that they are to be multiplied by, both float32.

    Args:
        row: float32, zeros beyond its end; the whole row, unless IS_GIVEN.
        given_scale: where the scale of all rows is, if IS_GIVEN.
        LARGEST: value of FP8.
        SMALLEST: rows without larger values are scaled as if this were the largest.
        IS_GIVEN: use `given_scale`, not the row's own.
    """
    if IS_GIVEN:
        scale = tl.load(given_scale)
    else:
        # Bits of numbers without a sign are ordered as the numbers are, and those of a NaN come last: it spoils
        # its row.
        bits = row.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.max(bits, axis=0).to(tl.float32, bitcast=True)
        # Divided exactly, as the reference does: many quotients are half way between two values.
        scale = tl.div_rn(tl.where(largest < SMALLEST, SMALLEST, largest), tl.full([], LARGEST, tl.float32))
    return _to_grid(tl.div_rn(row, tl.zeros_like(row) + scale), LARGEST=LARGEST), scale


@triton.jit
def _quantise_rows(
    inputs, given_scale, values, scales, width,
    BLOCK: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, IS_GIVEN: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Quantise a row by its own scale, or by one for all rows if IS_GIVEN."""
    if OVERLAPS:
        follow()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    wide = tl.load(inputs + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    grid, scale = in_fp8(wide, given_scale, LARGEST=LARGEST, SMALLEST=SMALLEST, IS_GIVEN=IS_GIVEN)
    tl.store(scales + row, scale)
    tl.store(values + row * width + columns, grid.to(values.dtype.element_ty), mask=inside)


def quantise_rows(inputs: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [tokens, width] in FP8 and their scales, [tokens, 1] float32; `scale` [1] is that of all rows.

    Nothing waits for the device.
    """
    inputs = inputs.contiguous()
    tokens, width = inputs.shape
    values, scales = empty_rows(inputs)
    if tokens:
        block = triton.next_power_of_2(width)
        _quantise_rows[(tokens,)](
            inputs, scales if scale is None else scale, values, scales, width,
            BLOCK=block, IS_GIVEN=scale is not None, num_warps=min(max(block // 1024, 1), 16), **LIMITS,
            **launch_options(tokens),
        )  # fmt: skip
    return values, scales


def empty_rows(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for rows `like` [tokens, width] in FP8, and for their scales [tokens, 1] float32."""
    return torch.empty_like(like, dtype=FP8), like.new_empty(like.shape[0], 1, dtype=torch.float32)

"""Products in FP8 by the device's matrix units; activations are scaled and rounded token by token ahead of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from services.worker.engine.kernels.gpu import elementwise, small_linear
from services.worker.engine.kernels.gpu.dependent_launch import follow, launch_options
from services.worker.engine.quantization.fp8 import FP8, LARGEST, SMALLEST

if TYPE_CHECKING:
    from services.worker.engine.model.config import Activation
    from services.worker.engine.quantization.fp8 import Fp8Matrix


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
    if IS_GIVEN:
        scale = tl.load(given_scale)
    else:
        # Bits of numbers without a sign are ordered as the numbers are, and those of a NaN come last: it spoils
        # its row.
        bits = wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.max(bits, axis=0).to(tl.float32, bitcast=True)
        # Divided exactly, as the reference does: many quotients are half way between two values.
        scale = tl.div_rn(tl.where(largest < SMALLEST, SMALLEST, largest), tl.full([], LARGEST, tl.float32))
    tl.store(scales + row, scale)
    grid = _to_grid(tl.div_rn(wide, tl.zeros([BLOCK], tl.float32) + scale), LARGEST=LARGEST)
    tl.store(values + row * width + columns, grid.to(values.dtype.element_ty), mask=inside)


def quantise_rows(inputs: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [tokens, width] in FP8 and their scales, [tokens, 1] float32; `scale` [1] is that of all rows.

    Nothing waits for the device.
    """
    inputs = inputs.contiguous()
    tokens, width = inputs.shape
    values = torch.empty_like(inputs, dtype=FP8)
    scales = inputs.new_empty(tokens, 1, dtype=torch.float32)
    if tokens:
        block = triton.next_power_of_2(width)
        _quantise_rows[(tokens,)](
            inputs, scales if scale is None else scale, values, scales, width,
            BLOCK=block, LARGEST=LARGEST, SMALLEST=SMALLEST, IS_GIVEN=scale is not None,
            num_warps=min(max(block // 1024, 1), 16), **launch_options(tokens),
        )  # fmt: skip
    return values, scales


class GpuFp8Linear:
    """One FP8 matrix; activations are bfloat16."""

    def __init__(self, matrix: Fp8Matrix, bias: torch.Tensor | None) -> None:
        """Keep the matrix [out, in] and bias [out]."""
        self._matrix = matrix
        self._bias = bias

    def __call__(self, inputs: torch.Tensor, outputs: torch.Tensor | None = None) -> torch.Tensor:
        if inputs.shape[0] > small_linear.MOST_TOKENS:
            return multiply(inputs, self._matrix, self._bias, outputs)
        if outputs is None:
            outputs = inputs.new_empty(inputs.shape[0], self._matrix.shape[0])
        multiply_few(inputs, self._matrix, self._bias, outputs)
        return outputs

    def add_to(self, inputs: torch.Tensor, sums: torch.Tensor) -> None:
        if inputs.shape[0] <= small_linear.MOST_TOKENS and sums.is_contiguous():
            multiply_few(inputs, self._matrix, self._bias, sums, adds=True)
        else:
            sums += self(inputs)


class GpuFp8GatedLinear:
    """Gate and up projection as one product."""

    def __init__(self, matrix: Fp8Matrix, bias: torch.Tensor | None, activation: Activation) -> None:
        """Keep the matrix [2 intermediate, in], gate above up, and bias [2 intermediate]."""
        self._matrix = matrix
        self._bias = bias
        self._activation = activation

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the gated product; see `Activation`."""
        if inputs.shape[0] > small_linear.MOST_TOKENS:
            return elementwise.gate(multiply(inputs, self._matrix, self._bias), self._activation)
        outputs = inputs.new_empty(inputs.shape[0], self._matrix.shape[0] // 2)
        multiply_few(inputs, self._matrix, self._bias, outputs, activation=self._activation)
        return outputs

    def halves(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return both products; see `GatedLinear.halves`."""
        return multiply(inputs, self._matrix, self._bias)


def multiply(
    inputs: torch.Tensor, matrix: Fp8Matrix, bias: torch.Tensor | None, outputs: torch.Tensor | None = None
) -> torch.Tensor:
    """Return inputs [tokens, in] times the matrix [out, in], plus bias [out], all bfloat16, in `outputs` if given."""
    values, scales = quantise_rows(inputs, matrix.input_scale)
    product: torch.Tensor = torch._scaled_mm(
        values, matrix.values.t(), scale_a=scales, scale_b=matrix.scales[None], bias=bias, out_dtype=inputs.dtype
    )
    return product if outputs is None else outputs.copy_(product)


def multiply_few(
    inputs: torch.Tensor, matrix: Fp8Matrix, bias: torch.Tensor | None, outputs: torch.Tensor, *, adds: bool = False,
    activation: Activation | None = None,
) -> None:  # fmt: skip
    """Write the product of few tokens to `outputs` [tokens, out], or add it; gated if there is an activation."""
    if inputs.shape[0]:
        values, scales = quantise_rows(inputs, matrix.input_scale)
        small_linear.launch(
            values, matrix.values, bias, outputs, small_linear.Scales(scales, matrix.scales), adds=adds,
            activation=activation,
        )  # fmt: skip

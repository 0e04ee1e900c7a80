"""Matrix products of one or two tokens: bound by reading the weights, which libraries do at half the bandwidth.

FP8 inputs and weights are widened in registers, and their product is scaled in the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from services.worker.engine.kernels.gpu.dependent_launch import follow, launch_options
from services.worker.engine.kernels.gpu.elementwise import ACTIVATIONS, gated
from services.worker.engine.model.config import Activation

if TYPE_CHECKING:
    import torch

MOST_TOKENS = 2
# Weights per step of a program; the fastest of the tried sizes at most shapes.
_STEP = 1024
# Rows of a matrix so short that a program takes two.
_SHORT_ROW = 1024
# A row is read at once up to this length, if all programs find room on the device together (32 on each multiprocessor).
_LONGEST_AT_ONCE = 4096
_RESIDENT_PROGRAMS = 132 * 32


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a product of FP8 values."""

    of_inputs: torch.Tensor  # [tokens] float32
    of_outputs: torch.Tensor  # [rows of the weights] float32


@triton.jit
def _finished(
    sums, gated_sums, bias, input_scale, weight_scales, target, rows, inside, columns_out,
    HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, ADDS: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Return the value to store: the product, scaled, with its bias, gated, or added to the stored sums."""
    element = target.dtype.element_ty
    product = tl.sum(sums, axis=1)
    if SCALED:
        product *= tl.load(input_scale) * tl.load(weight_scales + rows, mask=inside, other=0.0)
    if HAS_BIAS:
        product += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(gated_sums, axis=1)
        if SCALED:
            up *= tl.load(input_scale) * tl.load(weight_scales + columns_out + rows, mask=inside, other=0.0)
        if HAS_BIAS:
            up += tl.load(bias + columns_out + rows, mask=inside, other=0.0).to(tl.float32)
        gate = product.to(element).to(tl.float32)
        product = gated(gate, up.to(element).to(tl.float32), ELEMENT=element, ACTIVATION=ACTIVATION)
    if ADDS:
        product = product.to(element).to(tl.float32) + tl.load(target, mask=inside, other=0.0).to(tl.float32)
    return product.to(element)


@triton.jit
def _product(
    inputs, weight, bias, input_scales, weight_scales, outputs, width, columns_out,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, ADDS: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Read the weights in steps of BLOCK, which divides `width`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1)
    inside = rows < columns_out
    steps = tl.arange(0, BLOCK)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    gated_sums = tl.zeros([ROWS, BLOCK], tl.float32)
    at_rows = weight + rows.to(tl.int64)[:, None] * width
    at_gated = weight + (rows + columns_out).to(tl.int64)[:, None] * width
    if OVERLAPS:
        follow()
    for start in range(0, width, BLOCK):
        at = start + steps
        given = tl.load(inputs + token * width + at).to(tl.float32)[None, :]
        sums += tl.load(at_rows + at[None, :], mask=inside[:, None], other=0.0).to(tl.float32) * given
        if GATED:
            gated_sums += tl.load(at_gated + at[None, :], mask=inside[:, None], other=0.0).to(tl.float32) * given
    target = outputs + token * columns_out + rows
    tl.store(target, _finished(
        sums, gated_sums, bias, input_scales + token, weight_scales, target, rows, inside, columns_out,
        HAS_BIAS=HAS_BIAS, SCALED=SCALED, ADDS=ADDS, GATED=GATED, ACTIVATION=ACTIVATION,
    ), mask=inside)  # fmt: skip


@triton.jit
def _product_at_once(
    inputs, weight, bias, input_scales, weight_scales, outputs, width, columns_out,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, ADDS: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Have all weights on their way while the program before still runs."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1)
    inside = rows < columns_out
    at = tl.arange(0, BLOCK)
    mask = inside[:, None] & (at < width)[None, :]
    weights = tl.load(weight + rows.to(tl.int64)[:, None] * width + at[None, :], mask=mask, other=0.0)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    gated_sums = tl.zeros([ROWS, BLOCK], tl.float32)
    if GATED:
        at_gated = weight + (rows + columns_out).to(tl.int64)[:, None] * width
        gated_weights = tl.load(at_gated + at[None, :], mask=mask, other=0.0)
    if OVERLAPS:
        follow()
    given = tl.load(inputs + token * width + at, mask=at < width, other=0.0).to(tl.float32)[None, :]
    sums += weights.to(tl.float32) * given
    if GATED:
        gated_sums += gated_weights.to(tl.float32) * given
    target = outputs + token * columns_out + rows
    tl.store(target, _finished(
        sums, gated_sums, bias, input_scales + token, weight_scales, target, rows, inside, columns_out,
        HAS_BIAS=HAS_BIAS, SCALED=SCALED, ADDS=ADDS, GATED=GATED, ACTIVATION=ACTIVATION,
    ), mask=inside)  # fmt: skip


def launch(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, outputs: torch.Tensor,
    scales: Scales | None = None, *, adds: bool = False, activation: Activation | None = None,
) -> None:  # fmt: skip
    """Write inputs [tokens, in] times weight, plus bias, to `outputs` [tokens, out], which are contiguous.

    Args:
        inputs: contiguous, and in FP8 if the weights are.
        weight: [out, in]; of a gated layer [2 out, in], the gate's rows, then those of up.
        bias: as many as rows.
        outputs: what is written.
        scales: of FP8 inputs and weights.
        adds: add to `outputs` instead.
        activation: of a gated layer.
    """
    tokens, columns_out = outputs.shape
    width = weight.shape[1]
    rows = 2 if width <= _SHORT_ROW else 1
    block = triton.next_power_of_2(width)
    programs = triton.cdiv(columns_out, rows)
    at_once = block <= _LONGEST_AT_ONCE and (programs <= _RESIDENT_PROGRAMS or width % _STEP)
    if not at_once:
        block = next(step for step in (1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1) if width % step == 0)
    run = _product_at_once if at_once else _product
    run[(programs, tokens)](
        inputs, weight, weight if bias is None else bias, scales.of_inputs if scales else weight,
        scales.of_outputs if scales else weight, outputs, width, columns_out,
        ROWS=rows, BLOCK=block, HAS_BIAS=bias is not None, SCALED=scales is not None, ADDS=adds,
        GATED=activation is not None, ACTIVATION=ACTIVATIONS[activation or Activation.SILU],
        num_warps=max(2, block // 1024) if at_once else 2, num_stages=3, **launch_options(tokens),
    )  # fmt: skip


def product(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, outputs: torch.Tensor | None = None
) -> torch.Tensor:
    """Return inputs [tokens, in] times weight [out, in], plus bias [out], in `outputs` if given."""
    if outputs is None:
        outputs = inputs.new_empty(inputs.shape[0], weight.shape[0])
    launch(inputs.contiguous(), weight, bias, outputs)
    return outputs


def add_product(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sums: torch.Tensor) -> None:
    """Add the product to `sums` [tokens, out] in place."""
    launch(inputs.contiguous(), weight, bias, sums, adds=True)


def gated_product(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
) -> torch.Tensor:
    """Return the gated product, where `weight` [2 out, in] holds the gate's rows, then those of up."""
    outputs = inputs.new_empty(inputs.shape[0], weight.shape[0] // 2)
    launch(inputs.contiguous(), weight, bias, outputs, activation=activation)
    return outputs

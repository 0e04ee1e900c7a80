"""Matrix products of one or two tokens: bound by reading the weights, which libraries do at half the bandwidth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from services.worker.engine.kernels.gpu.elementwise import activated
from services.worker.engine.kernels.gpu.overlap import follow, launch_options
from services.worker.engine.model.config import Activation

if TYPE_CHECKING:
    import torch

MOST_TOKENS = 2
# Weights per step of a program; of what was tried, the fastest at most shapes.
_STEP = 1024
# Rows of a matrix so short that a program takes two.
_SHORT_ROW = 1024
# A row is read at once up to this length, if all programs find room on the device together (32 on each multiprocessor).
_LONGEST_AT_ONCE = 4096
_RESIDENT_PROGRAMS = 132 * 32


@triton.jit
def _finished(
    sums, gated_sums, bias, target, rows, inside, columns_out,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """Return what is to be stored: the product with its bias, gated, or added to what is there."""
    element = target.dtype.element_ty
    product = tl.sum(sums, axis=1)
    if HAS_BIAS:
        product += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(gated_sums, axis=1)
        if HAS_BIAS:
            up += tl.load(bias + columns_out + rows, mask=inside, other=0.0).to(tl.float32)
        gate = product.to(element).to(tl.float32)
        product = activated(gate, GELU=GELU).to(element).to(tl.float32) * up.to(element).to(tl.float32)
    if ADDS:
        product = product.to(element).to(tl.float32) + tl.load(target, mask=inside, other=0.0).to(tl.float32)
    return product.to(element)


@triton.jit
def _product(
    inputs, weight, bias, outputs, width, columns_out,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, GATED: tl.constexpr,
    GELU: tl.constexpr, OVERLAPS: tl.constexpr,
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
        sums, gated_sums, bias, target, rows, inside, columns_out, HAS_BIAS=HAS_BIAS, ADDS=ADDS, GATED=GATED,
        GELU=GELU,
    ), mask=inside)  # fmt: skip


@triton.jit
def _product_at_once(
    inputs, weight, bias, outputs, width, columns_out,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, GATED: tl.constexpr,
    GELU: tl.constexpr, OVERLAPS: tl.constexpr,
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
        sums, gated_sums, bias, target, rows, inside, columns_out, HAS_BIAS=HAS_BIAS, ADDS=ADDS, GATED=GATED,
        GELU=GELU,
    ), mask=inside)  # fmt: skip


def _launch(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, outputs: torch.Tensor, *,
    adds: bool = False, gated: bool = False, gelu: bool = False,
) -> None:  # fmt: skip
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
        inputs, weight, weight if bias is None else bias, outputs, width, columns_out,
        ROWS=rows, BLOCK=block, HAS_BIAS=bias is not None, ADDS=adds, GATED=gated, GELU=gelu,
        num_warps=max(2, block // 1024) if at_once else 2, num_stages=3, **launch_options(tokens),
    )  # fmt: skip


def product(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return inputs [tokens, in] times weight [out, in], plus bias [out]."""
    outputs = inputs.new_empty(inputs.shape[0], weight.shape[0])
    _launch(inputs.contiguous(), weight, bias, outputs)
    return outputs


def add_product(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sums: torch.Tensor) -> None:
    """Add the product to `sums` [tokens, out] in place."""
    _launch(inputs.contiguous(), weight, bias, sums, adds=True)


def gated_product(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
) -> torch.Tensor:
    """Return activation(gate) * up, where `weight` [2 out, in] holds the gate's rows, then those of up."""
    outputs = inputs.new_empty(inputs.shape[0], weight.shape[0] // 2)
    _launch(inputs.contiguous(), weight, bias, outputs, gated=True, gelu=activation is Activation.GELU_TANH)
    return outputs

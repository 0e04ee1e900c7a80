"""Matrix products of one or two tokens: bound by reading the weights, which libraries do at half the bandwidth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

MOST_TOKENS = 2


@triton.jit
def _product(
    inputs, weight, bias, outputs, width, columns_out,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < columns_out
    steps = tl.arange(0, BLOCK)
    token = tl.program_id(1)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    gated_sums = tl.zeros([ROWS, BLOCK], tl.float32)
    at_rows = weight + rows.to(tl.int64)[:, None] * width
    at_gated = weight + (rows + columns_out).to(tl.int64)[:, None] * width
    for start in range(0, width, BLOCK):
        at = start + steps
        if WHOLE:
            mask = inside[:, None]
            given = tl.load(inputs + token * width + at)
        else:
            mask = inside[:, None] & (at < width)[None, :]
            given = tl.load(inputs + token * width + at, mask=at < width, other=0.0)
        given = given.to(tl.float32)[None, :]
        sums += tl.load(at_rows + at[None, :], mask=mask, other=0.0).to(tl.float32) * given
        if GATED:
            gated_sums += tl.load(at_gated + at[None, :], mask=mask, other=0.0).to(tl.float32) * given
    product = tl.sum(sums, axis=1)
    if HAS_BIAS:
        product += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    element = outputs.dtype.element_ty
    if GATED:
        up = tl.sum(gated_sums, axis=1)
        if HAS_BIAS:
            up += tl.load(bias + columns_out + rows, mask=inside, other=0.0).to(tl.float32)
        gate = product.to(element).to(tl.float32)
        product = (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32) * up.to(element).to(tl.float32)
    target = outputs + token * columns_out + rows
    if ADDS:
        product = product.to(element).to(tl.float32) + tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, product.to(element), mask=inside)


def _cut(width: int) -> tuple[int, int]:
    """Return output columns of a program and weights per step; of what was tried, the fastest at most shapes."""
    return (2, 512) if width <= 1024 else (1, 1024)


def _launch(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, outputs: torch.Tensor, *,
    adds: bool = False, gated: bool = False,
) -> None:  # fmt: skip
    tokens, columns_out = outputs.shape
    width = weight.shape[1]
    rows, block = _cut(width)
    _product[(triton.cdiv(columns_out, rows), tokens)](
        inputs, weight, weight if bias is None else bias, outputs, width, columns_out,
        TOKENS=tokens, ROWS=rows, BLOCK=block, WHOLE=width % block == 0, HAS_BIAS=bias is not None, ADDS=adds,
        GATED=gated, num_warps=2, num_stages=3,
    )  # fmt: skip


def product(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return inputs [tokens, in] times weight [out, in], plus bias [out]."""
    outputs = inputs.new_empty(inputs.shape[0], weight.shape[0])
    _launch(inputs.contiguous(), weight, bias, outputs)
    return outputs


def add_product(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sums: torch.Tensor) -> None:
    """Add the product to `sums` [tokens, out] in place."""
    _launch(inputs.contiguous(), weight, bias, sums, adds=True)


def gated_product(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return silu(gate) * up, where `weight` [2 out, in] holds the gate's rows, then those of up."""
    outputs = inputs.new_empty(inputs.shape[0], weight.shape[0] // 2)
    _launch(inputs.contiguous(), weight, bias, outputs, gated=True)
    return outputs

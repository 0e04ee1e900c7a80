"""Products with four-bit integers, which become numbers of the inputs' type without being converted.

Scales multiply the sums of a group's products instead of the weights, so that weights are not rounded.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from services.worker.engine.kernels.gpu.dependent_launch import follow
from services.worker.engine.kernels.gpu.product_launch import FOUR_EACH, TWO_EACH, Tile, put

# With more tokens, widening the weights for the library is faster.
MOST_TOKENS = 512
# Subtracted from all integers. A matrix without shifts has this zero point.
MIDDLE = tl.constexpr(8)
# Triton's interpreter has no assembler.
_HAS_ASSEMBLER = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "0")
# Unpacks four bytes ($4) with two integers each, into numbers of the lower halves of all bytes ($0, $1), and of the
# upper ones ($2, $3). An integer becomes the low bits of 128 (bfloat16) or 1,024 (float16), which {middle} subtracts
# together with MIDDLE; both are exact.
_UNPACK = """{{
    .reg .b32 low, high, middle;
    mov.b32 middle, {middle};
    and.b32 low, $4, 0x0F0F0F0F;
    shr.u32 high, $4, 4;
    and.b32 high, high, 0x0F0F0F0F;
    prmt.b32 $0, low, {exponent}, 0x4140;
    prmt.b32 $1, low, {exponent}, 0x4342;
    prmt.b32 $2, high, {exponent}, 0x4140;
    prmt.b32 $3, high, {exponent}, 0x4342;
    add.rn.{kind}x2 $0, $0, middle;
    add.rn.{kind}x2 $1, $1, middle;
    add.rn.{kind}x2 $2, $2, middle;
    add.rn.{kind}x2 $3, $3, middle;
}}"""
# -136 and -1032, twice.
_UNPACK_BFLOAT16 = tl.constexpr(_UNPACK.format(kind="bf16", exponent="0x43434343", middle="0xC308C308"))
_UNPACK_FLOAT16 = tl.constexpr(_UNPACK.format(kind="f16", exponent="0x64646464", middle="0xE408E408"))


@triton.jit
def _unpack(pairs, ELEMENT: tl.constexpr):
    """Return the integers in the lower and the upper half of bytes, minus MIDDLE."""
    if _HAS_ASSEMBLER and (tl.bfloat16 == ELEMENT):
        return tl.inline_asm_elementwise(
            _UNPACK_BFLOAT16, "=&r,=&r,=&r,=&r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    if _HAS_ASSEMBLER and (tl.float16 == ELEMENT):
        return tl.inline_asm_elementwise(
            _UNPACK_FLOAT16, "=&r,=&r,=&r,=&r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    wide = pairs.to(tl.int32)
    return ((wide & 15) - MIDDLE).to(ELEMENT), ((wide >> 4) - MIDDLE).to(ELEMENT)


@triton.jit
def _sums_of(weights, given, sums, SWAPPED: tl.constexpr):
    return tl.dot(weights, given, sums) if SWAPPED else tl.dot(given, weights, sums)


@triton.jit
def _scaled(part, given, scales, shifts, mask, HAS_SHIFTS: tl.constexpr, STEPS: tl.constexpr):
    """Return a part's sums times its scales, plus its shifts times the sums of its inputs, along the axis STEPS."""
    factors = tl.load(scales, mask=mask, other=0.0)
    scaled = part * factors
    if HAS_SHIFTS:
        offsets = tl.load(shifts, mask=mask, other=0.0) + MIDDLE * factors
        scaled += offsets * tl.expand_dims(given, STEPS)
    return scaled


@triton.jit(do_not_specialize=["tokens"])
def int4_product(
    inputs, pairs, scales, shifts, bias, outputs, partial_sums, tokens, columns, width,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PACK: tl.constexpr, GROUP: tl.constexpr,
    HAS_SHIFTS: tl.constexpr, SWAPPED: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Multiply inputs [tokens, width] with weights [columns, width].

    A byte of `pairs` [columns, width / 2] holds those of the same place in both halves of a PACK of inputs; a half has
    one scale. With SWAPPED, weights are the product's left factor, which matrix units of Hopper take from registers.
    """
    if OVERLAPS:
        follow()
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    half: tl.constexpr = PACK // 2
    steps = tl.arange(0, half)
    # Of outputs in the tile of weights, [COLUMNS, half] if swapped, and of steps in that of inputs, [half, ROWS].
    axis: tl.constexpr = 0 if SWAPPED else 1
    in_columns, in_rows = tl.expand_dims(at < columns, 1 - axis), tl.expand_dims(rows < tokens, axis)
    of_weights = tl.expand_dims(at, 1 - axis)
    at_pairs = pairs + of_weights.to(tl.int64) * (width // 2) + tl.expand_dims(steps, axis)
    at_inputs = inputs + tl.expand_dims(rows, axis).to(tl.int64) * width + tl.expand_dims(steps, 1 - axis)
    nothing = tl.zeros([COLUMNS, ROWS] if SWAPPED else [ROWS, COLUMNS], tl.float32)
    sums = nothing
    of_part = tl.cdiv(width // PACK, PARTS)
    first = tl.program_id(2) * of_part
    for block in range(first, tl.minimum(first + of_part, width // PACK)):
        packed = tl.load(at_pairs + block * half, mask=in_columns, other=0)
        lower, upper = _unpack(packed, inputs.dtype.element_ty)
        given = tl.load(at_inputs + block * PACK, mask=in_rows, other=0.0)
        given_upper = tl.load(at_inputs + block * PACK + half, mask=in_rows, other=0.0)
        total, total_upper = nothing, nothing
        if HAS_SHIFTS:
            total, total_upper = tl.sum(given.to(tl.float32), axis), tl.sum(given_upper.to(tl.float32), axis)
        at_scales = (block * PACK // GROUP) * columns + of_weights
        part = _sums_of(lower, given, nothing, SWAPPED=SWAPPED)
        if GROUP >= PACK:
            part = _sums_of(upper, given_upper, part, SWAPPED=SWAPPED)
            if HAS_SHIFTS:
                total += total_upper
            sums += _scaled(
                part, total, scales + at_scales, shifts + at_scales, in_columns, HAS_SHIFTS=HAS_SHIFTS, STEPS=axis
            )
        else:
            sums += _scaled(
                part, total, scales + at_scales, shifts + at_scales, in_columns, HAS_SHIFTS=HAS_SHIFTS, STEPS=axis
            )
            at_scales += columns
            part = _sums_of(upper, given_upper, nothing, SWAPPED=SWAPPED)
            sums += _scaled(
                part, total_upper, scales + at_scales, shifts + at_scales, in_columns,
                HAS_SHIFTS=HAS_SHIFTS, STEPS=axis,
            )  # fmt: skip
    if SWAPPED:
        sums = tl.trans(sums)
    part_number = tl.program_id(2)
    put(
        sums, bias, outputs, partial_sums, part_number, tokens, rows, at, columns,
        HAS_BIAS=HAS_BIAS, ADDS=ADDS, PARTS=PARTS,
    )  # fmt: skip


def int4_tile(tokens: int) -> Tile:
    """Choose the tile of a product of up to MOST_TOKENS tokens, as measured with the shapes of an 8B model."""
    if tokens <= 16:
        return Tile(16, 64, 4, 3, programs=FOUR_EACH, steps=8)
    if tokens <= 32:
        return Tile(32, 64, 4, 5, programs=FOUR_EACH, steps=8)
    if tokens <= 64:
        return Tile(64, 128, 8, 3, programs=TWO_EACH, steps=8, least_parts=3)
    return Tile(128, 64, 4, 3, programs=TWO_EACH, steps=8, least_parts=3)


def is_swapped(tile: Tile) -> bool:
    """Return whether weights are the left factor: of few tokens, smaller matrix units waste less."""
    return tile.rows > 16

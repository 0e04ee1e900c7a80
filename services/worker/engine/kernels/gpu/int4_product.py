"""Products with four-bit integers, which become weights in registers, in the order in which matrix units take them.

A weight is (integer - zero point) * scale, rounded to the inputs' type as dequantisation rounds it; integers and zero
points are exact. Sums are never scaled.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from services.worker.engine.kernels.gpu.dependent_launch import follow
from services.worker.engine.kernels.gpu.grouped_product import write_widened
from services.worker.engine.kernels.gpu.product_launch import (
    FOUR_EACH,
    MULTIPROCESSORS,
    TWO_EACH,
    ProductLaunch,
    Tile,
    put,
)
from services.worker.engine.quantization.grouped import Numbers, in_order

if TYPE_CHECKING:
    from services.worker.engine.quantization.grouped import GroupedMatrix

# With more tokens, widening the weights for the library is faster.
_MOST_TOKENS = 512
# Weights are stored in blocks of so many outputs and inputs.
_OUTPUTS, _INPUTS = 16, 64
_MIDDLE = tl.constexpr(8)
# The first compute capability that adds pairs of bfloat16.
_ADDS_BFLOAT16 = (9, 0)
# What else is needed besides integers and scales: nothing, zero points, or numbers that are added to scaled integers.
_SYMMETRIC, _ZERO_POINTS, _SHIFTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Triton's interpreter has no assembler.
_HAS_ASSEMBLER = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "0")


def _assembler(kind: str, offset: tl.constexpr) -> tl.constexpr:
    """Write what unpacks four bytes ($4) with two integers each, and returns weights of `kind`, two in a register.

    $0 and $1 are the weights of the lower halves of all bytes, $2 and $3 those of the upper halves. An integer becomes
    the low bits of 128 (bfloat16) or 1,024 (float16), which is subtracted together with the zero point; both are exact.
    From $5 on there are scales of both halves, two registers each, then their zero points or shifts.
    """
    exponent, middle = ("0x43434343", "0xC308C308") if kind == "bf16" else ("0x64646464", "0xE408E408")
    lines = [
        ".reg .b32 low, high, middle;",
        f"mov.b32 middle, {middle};",
        "and.b32 low, $4, 0x0F0F0F0F;",
        "shr.u32 high, $4, 4;",
        "and.b32 high, high, 0x0F0F0F0F;",
    ]
    for i, (half, chosen) in enumerate(itertools.product(("low", "high"), ("0x4140", "0x4342"))):
        zero = f"${9 + i}" if offset.value == _ZERO_POINTS.value else "middle"
        scaled = f"fma.rn.{kind}x2 ${i}, ${i}, ${5 + i}, ${9 + i};"
        lines += [
            f"prmt.b32 ${i}, {half}, {exponent}, {chosen};",
            f"add.rn.{kind}x2 ${i}, ${i}, {zero};",
            scaled if offset.value == _SHIFTS.value else f"mul.rn.{kind}x2 ${i}, ${i}, ${5 + i};",
        ]
    return tl.constexpr("{ " + "\n".join(lines) + " }")


_BFLOAT16 = _assembler("bf16", _SYMMETRIC)
_BFLOAT16_ZERO_POINTS = _assembler("bf16", _ZERO_POINTS)
_BFLOAT16_SHIFTS = _assembler("bf16", _SHIFTS)
_FLOAT16 = _assembler("f16", _SYMMETRIC)
_FLOAT16_ZERO_POINTS = _assembler("f16", _ZERO_POINTS)
_FLOAT16_SHIFTS = _assembler("f16", _SHIFTS)


@triton.jit
def _half(both, HALF: tl.constexpr, ELEMENT: tl.constexpr):
    """Return the number in one half of 32 bits."""
    return (both >> (16 * HALF)).to(tl.int16).to(ELEMENT, bitcast=True)


@triton.jit
def _assembled(pairs, scales, offsets, CODE: tl.constexpr, OFFSET: tl.constexpr, ELEMENT: tl.constexpr):
    """Unpack bytes by a program of the assembler."""
    low, high = _half(scales, HALF=0, ELEMENT=ELEMENT), _half(scales, HALF=1, ELEMENT=ELEMENT)
    if OFFSET == _SYMMETRIC:
        return tl.inline_asm_elementwise(
            CODE, "=&r,=&r,=&r,=&r,r,r,r,r,r", [pairs, low, high], dtype=(low.dtype, low.dtype), is_pure=True, pack=4
        )
    low_offsets, high_offsets = _half(offsets, HALF=0, ELEMENT=ELEMENT), _half(offsets, HALF=1, ELEMENT=ELEMENT)
    return tl.inline_asm_elementwise(
        CODE, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r", [pairs, low, high, low_offsets, high_offsets],
        dtype=(low.dtype, low.dtype), is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _interpreted(pairs, scales, offsets, HALF: tl.constexpr, OFFSET: tl.constexpr, ELEMENT: tl.constexpr):
    """Return the weights of one half of each byte."""
    integers = ((pairs.to(tl.int32) >> (4 * HALF)) & 15).to(tl.float32)
    factors = _half(scales, HALF=HALF, ELEMENT=ELEMENT).to(tl.float32)
    if OFFSET == _SYMMETRIC:
        return ((integers - _MIDDLE) * factors).to(ELEMENT)
    others = _half(offsets, HALF=HALF, ELEMENT=ELEMENT).to(tl.float32)
    if OFFSET == _SHIFTS:
        return ((integers - _MIDDLE) * factors + others).to(ELEMENT)
    base: tl.constexpr = 128.0 if tl.bfloat16 == ELEMENT else 1024.0
    return ((integers + base + others) * factors).to(ELEMENT)


@triton.jit
def _unpack(pairs, scales, offsets, OFFSET: tl.constexpr, ELEMENT: tl.constexpr):
    """Return the weights of the lower and the upper half of bytes."""
    if _HAS_ASSEMBLER and (tl.bfloat16 == ELEMENT):
        code: tl.constexpr = (
            _BFLOAT16 if OFFSET == _SYMMETRIC else _BFLOAT16_ZERO_POINTS if OFFSET == _ZERO_POINTS else _BFLOAT16_SHIFTS
        )
        return _assembled(pairs, scales, offsets, CODE=code, OFFSET=OFFSET, ELEMENT=ELEMENT)
    if _HAS_ASSEMBLER and (tl.float16 == ELEMENT):
        narrow_code: tl.constexpr = (
            _FLOAT16 if OFFSET == _SYMMETRIC else _FLOAT16_ZERO_POINTS if OFFSET == _ZERO_POINTS else _FLOAT16_SHIFTS
        )
        return _assembled(pairs, scales, offsets, CODE=narrow_code, OFFSET=OFFSET, ELEMENT=ELEMENT)
    return (
        _interpreted(pairs, scales, offsets, HALF=0, OFFSET=OFFSET, ELEMENT=ELEMENT),
        _interpreted(pairs, scales, offsets, HALF=1, OFFSET=OFFSET, ELEMENT=ELEMENT),
    )


@triton.jit
def _once_multiplied(pairs):
    """Return bytes once all products of Hopper's matrix units have ended, which may still have read their registers.

    Triton lets products of a step run on beside the next one. It does not see that they take weights from registers,
    which the next step fills: without this, some sums were wrong on an H200.
    """
    if _HAS_ASSEMBLER:
        return tl.inline_asm_elementwise(
            "wgmma.wait_group.sync.aligned 0; mov.b32 $0, $1;", "=r,r", [pairs], dtype=tl.uint8, is_pure=False, pack=4
        )
    return pairs


@triton.jit
def _of_steps(
    numbers, SLICES: tl.constexpr, BLOCKS: tl.constexpr, STEPS: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """Bring pairs of numbers [slices, blocks, 8, all groups] to the shape of bytes, or one that is broadcast to it."""
    steps: tl.constexpr = STEPS if GROUPS >= STEPS else GROUPS
    numbers = tl.reshape(numbers, [SLICES, BLOCKS, 8, steps, GROUPS // steps])
    return tl.permute(numbers, (0, 1, 3, 2, 4))[:, :, :, :, None, :, None]


@triton.jit
def _weights(
    pairs, scales, offsets, SLICES: tl.constexpr, BLOCKS: tl.constexpr, DEPTH: tl.constexpr, GROUPS: tl.constexpr,
    OFFSET: tl.constexpr, ELEMENT: tl.constexpr, ARE_MIXED: tl.constexpr,
):  # fmt: skip
    """Return weights [slices, 16 * blocks, DEPTH] of bytes [slices, blocks, 8 * DEPTH]; see `packed`.

    If ARE_MIXED, of each 64 inputs those are next to each other that one thread holds, as `_mixed` has them.
    """
    steps: tl.constexpr = DEPTH // 64
    of_step: tl.constexpr = GROUPS // steps if steps < GROUPS else 1
    pairs = tl.reshape(pairs, [SLICES, BLOCKS, steps, 8, 4, of_step, 16 // of_step])
    scales = _of_steps(scales, SLICES=SLICES, BLOCKS=BLOCKS, STEPS=steps, GROUPS=GROUPS)
    offsets = _of_steps(offsets, SLICES=SLICES, BLOCKS=BLOCKS, STEPS=steps, GROUPS=GROUPS)
    lower, upper = _unpack(pairs, scales, offsets, OFFSET=OFFSET, ELEMENT=ELEMENT)
    # [slices, blocks, step, output of 8, thread of 4, sixteen of 4, half of it, one of a pair, half of the outputs]
    both = tl.reshape(tl.join(lower, upper), [SLICES, BLOCKS, steps, 8, 4, 4, 2, 2, 2])
    both = tl.permute(both, (0, 1, 8, 3, 2, 6, 4, 5, 7) if ARE_MIXED else (0, 1, 8, 3, 2, 5, 6, 4, 7))
    return tl.reshape(both, [SLICES, BLOCKS * 16, DEPTH])


@triton.jit
def _mixed(given, SLICES: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """Return inputs [slices, rows, DEPTH] as [slices, DEPTH, rows], in the order of weights that are mixed."""
    given = tl.reshape(given, [SLICES, ROWS, DEPTH // 64, 4, 2, 4, 2])
    return tl.reshape(tl.permute(given, (0, 2, 4, 5, 3, 6, 1)), [SLICES, DEPTH, ROWS])


@triton.jit(do_not_specialize=["tokens"])
def int4_product(
    inputs, pairs, scales, offsets, bias, outputs, partial_sums, tokens, columns, width,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLICES: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, OFFSET: tl.constexpr, IS_RAGGED: tl.constexpr, IS_HOPPER: tl.constexpr,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Multiply inputs [tokens, width] with weights [columns, width], DEPTH inputs of each slice at a time.

    Weights are the product's left factor, which matrix units take from registers. With several SLICES each warp
    multiplies a slice of the inputs by itself, and their sums are added in the end. IS_RAGGED: slices do not divide the
    width.
    """
    if OVERLAPS:
        follow()
    all_blocks: tl.constexpr = COLUMNS // 16
    groups: tl.constexpr = DEPTH // GROUP if DEPTH > GROUP else 1
    blocks = tl.program_id(0) * all_blocks + tl.arange(0, all_blocks)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    slices = tl.arange(0, SLICES)
    stored = tl.cdiv(columns, 16)
    in_blocks, in_rows = (blocks < stored)[None, :, None], (rows < tokens)[None, :, None]
    at_pairs = pairs + blocks.to(tl.int64)[None, :, None] * (width * 8) + slices[:, None, None] * (DEPTH * 8)
    at_pairs += tl.arange(0, DEPTH * 8)[None, None, :]
    at_inputs = inputs + rows.to(tl.int64)[None, :, None] * width + slices[:, None, None] * DEPTH
    at_inputs += tl.arange(0, DEPTH)[None, None, :]
    of_outputs = blocks[None, :, None, None] * 8 + tl.arange(0, 8)[None, None, :, None]
    sums = tl.zeros([COLUMNS, ROWS] if SLICES == 1 else [SLICES, COLUMNS, ROWS], tl.float32)
    steps = width // DEPTH
    of_part = tl.cdiv(tl.cdiv(steps, PARTS), SLICES) * SLICES
    first = part * of_part
    for step in range(first, tl.minimum(first + of_part, steps), SLICES):
        here, given_here = in_blocks, in_rows
        if IS_RAGGED:
            inside = (step + slices < steps)[:, None, None]
            here, given_here = in_blocks & inside, in_rows & inside
        packed = tl.load(at_pairs + step * (DEPTH * 8), mask=here, other=0)
        group = ((step + slices) * DEPTH // GROUP)[:, None, None, None] + tl.arange(0, groups)[None, None, None, :]
        at_group = group * (stored * 8) + of_outputs
        factors = tl.load(scales + at_group, mask=here[:, :, :, None], other=0)
        others = factors
        if OFFSET != _SYMMETRIC:
            others = tl.load(offsets + at_group, mask=here[:, :, :, None], other=0)
        given = tl.load(at_inputs + step * DEPTH, mask=given_here, other=0.0)
        if IS_HOPPER and SLICES == 1:
            packed = _once_multiplied(packed)
        weights = _weights(
            packed, factors, others, SLICES=SLICES, BLOCKS=all_blocks, DEPTH=DEPTH, GROUPS=groups, OFFSET=OFFSET,
            ELEMENT=inputs.dtype.element_ty, ARE_MIXED=SLICES > 1,
        )  # fmt: skip
        if SLICES == 1:
            given = tl.trans(tl.reshape(given, [ROWS, DEPTH]))
            sums = tl.dot(tl.reshape(weights, [COLUMNS, DEPTH]), given, sums)
        else:
            sums = tl.dot(weights, _mixed(given, SLICES=SLICES, ROWS=ROWS, DEPTH=DEPTH), sums)
    if SLICES > 1:
        sums = tl.sum(sums, 0)
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    put(
        tl.trans(sums), bias, outputs, partial_sums, part, tokens, rows, at, columns,
        HAS_BIAS=HAS_BIAS, ADDS=ADDS, PARTS=PARTS,
    )  # fmt: skip


@triton.jit
def widen(
    pairs, scales, offsets, widened, first, last, columns, width,
    BLOCKS: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Write the weights of outputs `first` (a multiple of 16) to `last` to `widened` [last - first, width]."""
    groups: tl.constexpr = 64 // GROUP if GROUP < 64 else 1
    blocks = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    stored, step = tl.cdiv(columns, 16), tl.program_id(1)
    at = first // 16 + blocks
    here = (at < stored)[None, :, None]
    packed = tl.load(
        pairs + at.to(tl.int64)[None, :, None] * (width * 8) + step * 512 + tl.arange(0, 512)[None, None, :],
        mask=here, other=0,
    )  # fmt: skip
    group = step * 64 // GROUP + tl.arange(0, groups)[None, None, None, :]
    at_group = group * (stored * 8) + at[None, :, None, None] * 8 + tl.arange(0, 8)[None, None, :, None]
    factors = tl.load(scales + at_group, mask=here[:, :, :, None], other=0)
    others = factors
    if OFFSET != _SYMMETRIC:
        others = tl.load(offsets + at_group, mask=here[:, :, :, None], other=0)
    weights = _weights(
        packed, factors, others, SLICES=1, BLOCKS=BLOCKS, DEPTH=64, GROUPS=groups, OFFSET=OFFSET,
        ELEMENT=widened.dtype.element_ty, ARE_MIXED=False,
    )  # fmt: skip
    rows = tl.program_id(0) * BLOCKS * 16 + tl.arange(0, BLOCKS * 16)
    targets = widened + rows.to(tl.int64)[:, None] * width + step * 64 + tl.arange(0, 64)[None, :]
    tl.store(targets, tl.reshape(weights, [BLOCKS * 16, 64]), mask=(first + rows < last)[:, None])


@dataclass(frozen=True, slots=True)
class Int4Tile:
    """Division of a product: besides that of all products, slices of a program, and inputs of a slice in a step."""

    tile: Tile
    slices: int
    depth: int


def int4_tile(tokens: int, outputs: int, width: int, *, is_hopper: bool) -> Int4Tile:
    """Choose the division of a product of up to _MOST_TOKENS tokens, as measured on an H200 with shapes of an 8B model.

    In tiles of one slice, four warps multiply 64 outputs at once. Each tile reads the inputs of its tokens from the
    second-level cache, which bounds products of many, so those tiles are as large as Hopper's registers permit.
    """
    depth = 128 if width % 128 == 0 else 64
    if tokens <= 8:
        columns = 32 if outputs >= 32 * TWO_EACH else 16
        return Int4Tile(Tile(8, columns, 4, 4, programs=MULTIPROCESSORS, steps=2), slices=4, depth=depth)
    if tokens <= 16:
        return Int4Tile(Tile(16, 64, 4, 5, programs=2 * FOUR_EACH, steps=8), slices=1, depth=depth)
    if tokens <= 64:
        return Int4Tile(Tile(64, 64, 4, 5, programs=TWO_EACH, steps=8), slices=1, depth=64)
    if is_hopper:
        rows = 128 if tokens <= 128 else 256
        return Int4Tile(Tile(rows, 128, 8, 4, programs=MULTIPROCESSORS, steps=8), slices=1, depth=64)
    return Int4Tile(Tile(128, 64, 4, 4, programs=TWO_EACH, steps=16, least_parts=3), slices=1, depth=64)


class Int4Product:
    """Products with packed integers of four bits."""

    def __init__(self, matrix: GroupedMatrix, dtype: torch.dtype) -> None:
        """Pack a matrix that is on the device and fits, for inputs of `dtype`."""
        self.outputs, self._width = matrix.values.shape
        self._group, self._order, self._dtype = matrix.group, matrix.order, dtype
        device = matrix.values.device
        self._is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
        self._pairs = packed(matrix.values)
        self._scales = paired(matrix.scales.to(dtype))
        offset, offsets = _offsets(matrix, dtype)
        self._offset = offset.value
        self._offsets = self._scales if offsets is None else paired(offsets)

    def write(self, inputs: torch.Tensor, bias: torch.Tensor | None, outputs: torch.Tensor, *, adds: bool) -> None:
        """Write the product [tokens, out] to `outputs`, or add it."""
        inputs = in_order(inputs, self._order).contiguous()
        tokens = inputs.shape[0]
        if tokens > _MOST_TOKENS:
            write_widened(self.widened, inputs, bias, outputs, adds=adds)
            return
        division = int4_tile(tokens, self.outputs, self._width, is_hopper=self._is_hopper)
        steps = self._width // division.depth
        launch = ProductLaunch(division.tile, bias, outputs, adds, steps // division.slices)
        partial_sums = launch.partial_sums()
        int4_product[launch.grid](
            inputs, self._pairs, self._scales, self._offsets, inputs if bias is None else bias, outputs, partial_sums,
            tokens, self.outputs, self._width, SLICES=division.slices, DEPTH=division.depth, GROUP=self._group,
            OFFSET=self._offset, IS_RAGGED=steps % division.slices != 0, IS_HOPPER=self._is_hopper, **launch.constants,
        )  # fmt: skip
        launch.join(partial_sums)

    def widened(self, dtype: torch.dtype, part: slice | None = None) -> torch.Tensor:
        """Return the weights of some outputs [part, in]; the first is a multiple of 16."""
        assert dtype == self._dtype, "scales are rounded to the type of the inputs"
        part = part or slice(0, self.outputs)
        height, blocks = part.stop - part.start, 4
        weights = torch.empty(height, self._width, dtype=dtype, device=self._pairs.device)
        widen[(triton.cdiv(height, blocks * _OUTPUTS), self._width // _INPUTS)](
            self._pairs, self._scales, self._offsets, weights, part.start, part.stop, self.outputs, self._width,
            BLOCKS=blocks, GROUP=self._group, OFFSET=self._offset, num_warps=4,
        )  # fmt: skip
        return weights


def fits(matrix: GroupedMatrix, dtype: torch.dtype) -> bool:
    """Return whether a matrix has integers of four bits in whole blocks, and scales within the range of `dtype`."""
    if matrix.bits != 4 or matrix.numbers is not Numbers.INTEGERS or matrix.values.shape[1] % _INPUTS:
        return False
    if dtype != torch.float16 and not (dtype == torch.bfloat16 and _adds_bfloat16(matrix.values.device)):
        return False
    sizes = matrix.scales.float().abs()
    # Of numbers below the smallest normal one, and above the largest, bits are lost.
    limits = torch.finfo(dtype)
    return bool(((sizes == 0) | ((sizes >= limits.tiny) & (sizes <= limits.max / 16))).all())


def _adds_bfloat16(device: torch.device) -> bool:
    """Return whether a device adds pairs of bfloat16; where programs are interpreted, it does."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _ADDS_BFLOAT16


def packed(values: torch.Tensor) -> torch.Tensor:
    """Return integers [out, in] below 16 as bytes [blocks of 16 outputs, blocks of 64 inputs, 32 threads, 16].

    A thread of a warp multiplies outputs t // 4 and t // 4 + 8 of a block, in the lower and upper halves of its bytes,
    and of each sixteen inputs those at 2 (t % 4) and 2 (t % 4) + 8 and the ones after them (PTX ISA, mma.m16n8k16).
    """
    outputs, width = values.shape
    filled = torch.nn.functional.pad(values, (0, 0, 0, -outputs % _OUTPUTS))
    # [block, half, output of 8, step, sixteen of 4, half of it, thread of 4, one of a pair]
    parts = filled.view(-1, 2, 8, width // _INPUTS, 4, 2, 4, 2)
    # [block, half, step, output of 8, thread of 4, sixteen of 4, half of it, one of a pair]
    parts = parts.permute(0, 1, 3, 2, 6, 4, 5, 7)
    return (parts[:, 0] | (parts[:, 1] << 4)).reshape(-1, width // _INPUTS, 32, 16)


def paired(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers [out, groups] of 16 bits as int32 [groups, blocks of 16 outputs, 8]: those of t and t + 8."""
    outputs, groups = numbers.shape
    filled = torch.nn.functional.pad(numbers, (0, 0, 0, -outputs % _OUTPUTS))
    pairs = filled.view(-1, 2, 8, groups).permute(3, 0, 2, 1).contiguous()
    return pairs.view(torch.int32).view(groups, -1, 8)


def _offsets(matrix: GroupedMatrix, dtype: torch.dtype) -> tuple[tl.constexpr, torch.Tensor | None]:
    """Return which offsets a matrix has, and those [out, groups] as the assembler takes them."""
    if matrix.shifts is None:
        return _SYMMETRIC, None
    scales, shifts = matrix.scales.float(), matrix.shifts.float()
    zero_points = torch.where(scales == 0, _MIDDLE.value, -shifts / scales).round()
    if bool(((zero_points >= 0) & (zero_points <= 16) & (zero_points * scales == -shifts)).all()):
        base = 128 if dtype == torch.bfloat16 else 1024
        return _ZERO_POINTS, -(zero_points + base).to(dtype)
    return _SHIFTS, (shifts + _MIDDLE.value * scales).to(dtype)

"""Products with integers of a few bits, or FP4 numbers, which are unpacked and scaled in the product.

For many tokens they are widened, and multiplied by the library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from services.worker.engine.kernels.gpu.dependent_launch import follow
from services.worker.engine.kernels.gpu.product_launch import (
    FOUR_EACH,
    MULTIPROCESSORS,
    ProductLaunch,
    Tile,
    put,
    tile_for,
)
from services.worker.engine.quantization.grouped import Numbers, in_order

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.worker.engine.quantization.grouped import GroupedMatrix

# With more tokens, packed weights are widened, this many at once, and multiplied by the library.
_MOST_TOKENS = 64
_WIDENED_AT_ONCE = 1 << 24
# The library is three times slower where rows of its outputs are not aligned.
_ALIGNED_OUTPUTS = 256
_PACKS = (128, 64, 32)
_LARGEST_PACK = _PACKS[0]


@triton.jit
def _integers(
    low_bits, high_bits, outputs, width, block, places, mask,
    HALF: tl.constexpr, BITS: tl.constexpr, PACK: tl.constexpr, IS_E2M1: tl.constexpr,
):  # fmt: skip
    """Return integers, or FP4 numbers, of some outputs at `places` of one half of a pack of inputs, as float32.

    A byte of `low_bits` holds four bits of a place in the first half of a pack and of that in the second half; a byte
    of `high_bits` holds the fifth bit of eight, or the fifth and sixth of four, of a pack.
    """
    half_pack: tl.constexpr = PACK // 2
    if BITS == 8:
        return tl.load(low_bits + outputs * width + block * PACK + HALF * half_pack + places, mask=mask, other=0).to(
            tl.float32
        )
    low = tl.load(low_bits + outputs * (width // 2) + block * half_pack + places, mask=mask, other=0).to(tl.int32)
    integers = (low >> (4 * HALF)) & 15
    if IS_E2M1:
        # A sign, two bits of exponent, one of mantissa: at the places that float32 has for them, but for its bias.
        bits = ((integers << 28) & -0x80000000) | ((integers << 22) & 0x01C00000)
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    if BITS == 5:
        fifth: tl.constexpr = PACK // 8
        high = tl.load(high_bits + outputs * (width // 8) + block * fifth + places % fifth, mask=mask, other=0)
        integers |= ((high.to(tl.int32) >> (places // fifth + 4 * HALF)) & 1) << 4
    if BITS == 6:
        sixth: tl.constexpr = PACK // 4
        high = tl.load(high_bits + outputs * (width // 4) + block * sixth + places % sixth, mask=mask, other=0)
        integers |= ((high.to(tl.int32) >> (2 * (places // sixth) + 4 * HALF)) & 3) << 4
    # As the last bits of 2^23: faster than a conversion.
    return (integers | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def half_of_weights(
    low_bits, high_bits, scales, shifts, at, columns, width, block, in_columns,
    HALF: tl.constexpr, BITS: tl.constexpr, PACK: tl.constexpr, GROUP: tl.constexpr, HAS_SHIFTS: tl.constexpr,
    IS_E2M1: tl.constexpr,
):  # fmt: skip
    """Return the weights [PACK / 2, columns] of one half of a pack of inputs, as float32."""
    half_pack: tl.constexpr = PACK // 2
    places = tl.arange(0, half_pack)
    mask = in_columns[None, :]
    integers = _integers(
        low_bits, high_bits, at.to(tl.int64)[None, :], width, block, places[:, None], mask,
        HALF=HALF, BITS=BITS, PACK=PACK, IS_E2M1=IS_E2M1,
    )  # fmt: skip
    first = block * PACK + HALF * half_pack
    if half_pack <= GROUP:
        at_scales = (first // GROUP) * columns + at[None, :]
    else:
        at_scales = ((first + places) // GROUP)[:, None] * columns + at[None, :]
    if IS_E2M1:
        # Exponents of powers of two; that of 0 is the one number whose bits are others.
        exponents = tl.load(scales + at_scales, mask=mask, other=0).to(tl.int32)
        return integers * tl.where(exponents == 0, 0x00400000, exponents << 23).to(tl.float32, bitcast=True)
    factors = tl.load(scales + at_scales, mask=mask, other=0.0).to(tl.float32)
    if HAS_SHIFTS:
        return integers * factors + tl.load(shifts + at_scales, mask=mask, other=0.0).to(tl.float32)
    middle: tl.constexpr = 2 ** (BITS - 1)
    return (integers - middle) * factors


@triton.jit(do_not_specialize=["tokens"])
def _grouped_product(
    inputs, low_bits, high_bits, scales, shifts, bias, outputs, partial_sums, tokens, columns, width,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr, PACK: tl.constexpr,
    GROUP: tl.constexpr, HAS_SHIFTS: tl.constexpr, IS_E2M1: tl.constexpr, HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Multiply inputs [tokens, width] with packed weights [columns, width]; PACK divides the width."""
    if OVERLAPS:
        follow()
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_rows, in_columns = rows < tokens, at < columns
    half_pack: tl.constexpr = PACK // 2
    at_inputs = inputs + rows.to(tl.int64)[:, None] * width + tl.arange(0, half_pack)[None, :]
    element = inputs.dtype.element_ty
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    of_part = tl.cdiv(width // PACK, PARTS)
    first = tl.program_id(2) * of_part
    for block in range(first, tl.minimum(first + of_part, width // PACK)):
        for half in tl.static_range(2):
            given = tl.load(at_inputs + block * PACK + half * half_pack, mask=in_rows[:, None], other=0.0)
            factors = half_of_weights(
                low_bits, high_bits, scales, shifts, at, columns, width, block, in_columns,
                HALF=half, BITS=BITS, PACK=PACK, GROUP=GROUP, HAS_SHIFTS=HAS_SHIFTS, IS_E2M1=IS_E2M1,
            )  # fmt: skip
            sums += tl.dot(given, factors.to(element))
    part = tl.program_id(2)
    put(sums, bias, outputs, partial_sums, part, tokens, rows, at, columns, HAS_BIAS=HAS_BIAS, ADDS=ADDS, PARTS=PARTS)


@triton.jit
def widen(
    low_bits, high_bits, scales, shifts, widened, first, columns, last, width,
    stride_low, stride_high, stride_scales, stride_widened,
    COLUMNS: tl.constexpr, BITS: tl.constexpr, PACK: tl.constexpr, GROUP: tl.constexpr, HAS_SHIFTS: tl.constexpr,
    IS_E2M1: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write the weights of outputs `first` to `last` of one pack of inputs to `widened` [last - first, width].

    Of several matrices, one for each number of the third dimension.
    """
    if OVERLAPS:
        follow()
    matrix = tl.program_id(2).to(tl.int64)
    low_bits += matrix * stride_low
    high_bits += matrix * stride_high
    scales += matrix * stride_scales
    shifts += matrix * stride_scales
    widened += matrix * stride_widened
    at = first + tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    block = tl.program_id(1)
    in_columns = at < last
    half_pack: tl.constexpr = PACK // 2
    places = tl.arange(0, half_pack)
    for half in tl.static_range(2):
        factors = half_of_weights(
            low_bits, high_bits, scales, shifts, at, columns, width, block, in_columns,
            HALF=half, BITS=BITS, PACK=PACK, GROUP=GROUP, HAS_SHIFTS=HAS_SHIFTS, IS_E2M1=IS_E2M1,
        )  # fmt: skip
        targets = widened + (at - first).to(tl.int64)[None, :] * width + block * PACK + half * half_pack
        tl.store(targets + places[:, None], factors.to(widened.dtype.element_ty), mask=in_columns[None, :])


class GroupedProduct:
    """Products with packed integers, unpacked while they are multiplied."""

    def __init__(self, matrix: GroupedMatrix) -> None:
        """Pack a matrix that is on the device."""
        self.outputs, self._width = matrix.values.shape
        self._bits, self._group, self._order = matrix.bits, matrix.group, matrix.order
        self._is_e2m1 = matrix.numbers is Numbers.E2M1
        self._pack = pack_of(self._width, self._group)
        self._low, self._high = packed(matrix.values, matrix.bits, self._pack)
        # [groups, out], as programs read them.
        self._scales = scales_on_device(matrix).t().contiguous()
        self._shifts = None if matrix.shifts is None else matrix.shifts.float().t().contiguous()

    def write(self, inputs: torch.Tensor, bias: torch.Tensor | None, outputs: torch.Tensor, *, adds: bool) -> None:
        """Write the product [tokens, out] to `outputs`, or add it."""
        inputs = in_order(inputs, self._order).contiguous()
        tokens = inputs.shape[0]
        if tokens > _MOST_TOKENS:
            write_widened(self.widened, inputs, bias, outputs, adds=adds)
            return
        tile = tile_for(tokens, self.outputs)
        if tile.rows == tile.columns == 64 and self.outputs < 64 * MULTIPROCESSORS:
            tile = Tile(64, 32, 4, 4, FOUR_EACH)
        launch = ProductLaunch(tile, bias, outputs, adds, self._width // self._pack)
        partial_sums = launch.partial_sums()
        _grouped_product[launch.grid](
            inputs, *self._weights, inputs if bias is None else bias, outputs, partial_sums,
            tokens, self.outputs, self._width, **self._constants, **launch.constants,
        )  # fmt: skip
        launch.join(partial_sums)

    def widened(self, dtype: torch.dtype, part: slice | None = None) -> torch.Tensor:
        """Return the weights of some outputs [part, in]."""
        part = part or slice(0, self.outputs)
        height, columns = part.stop - part.start, 32
        weights = torch.empty(height, self._width, dtype=dtype, device=self._low.device)
        widen[(triton.cdiv(height, columns), self._width // self._pack)](
            *self._weights, weights, part.start, self.outputs, part.stop, self._width, 0, 0, 0, 0,
            COLUMNS=columns, num_warps=4, **self._constants, OVERLAPS=False,
        )  # fmt: skip
        return weights

    @property
    def _weights(self) -> tuple[torch.Tensor, ...]:
        return self._low, self._high, self._scales, self._scales if self._shifts is None else self._shifts

    @property
    def _constants(self) -> dict[str, int | bool]:
        return {
            "BITS": self._bits, "PACK": self._pack, "GROUP": self._group, "HAS_SHIFTS": self._shifts is not None,
            "IS_E2M1": self._is_e2m1,
        }  # fmt: skip


def write_widened(
    widened: Callable[[torch.dtype, slice], torch.Tensor], inputs: torch.Tensor, bias: torch.Tensor | None,
    outputs: torch.Tensor, *, adds: bool,
) -> None:  # fmt: skip
    """Write the product [tokens, out] to `outputs`, or add it; `widened` returns the weights of some outputs."""
    width, columns = inputs.shape[1], outputs.shape[1]
    height = max(1, _WIDENED_AT_ONCE // width // _ALIGNED_OUTPUTS) * _ALIGNED_OUTPUTS
    for start in range(0, columns, height):
        part = slice(start, min(columns, start + height))
        product = inputs @ widened(inputs.dtype, part).t()
        if bias is not None:
            product += bias[part]
        if adds:
            outputs[:, part] += product
        else:
            outputs[:, part] = product


def scales_on_device(matrix: GroupedMatrix) -> torch.Tensor:
    """Return scales [out, groups] as programs take them: float32, or exponents of FP4's, e8m0 as uint8.

    Narrower floats cannot be copied while a program computes, which takes half as long again.
    """
    if matrix.numbers is Numbers.E2M1:
        # frexp's exponents are those of numbers below 1.
        return (torch.frexp(matrix.scales.float()).exponent + 126).to(torch.uint8)
    return matrix.scales.float()


def pack_of(width: int, group: int) -> int:
    """Count the inputs that are packed together: half of them belong to one group where that is possible."""
    largest = min(_LARGEST_PACK, max(2 * group, _LARGEST_PACK // 2))
    return next(pack for pack in _PACKS if pack <= largest and width % pack == 0)


def can_pack(matrix: GroupedMatrix) -> bool:
    """Return whether the matrix's inputs fill packs; else its weights have to be widened."""
    return matrix.values.shape[1] % _PACKS[-1] == 0


def packed(values: torch.Tensor, bits: int, pack: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integers [out, in] as `_integers` reads them: the lower four bits of each and the others, or all eight."""
    if bits == 8:
        return values, values
    outputs = values.shape[0]
    # [out, packs, half, place]
    halves = values.view(outputs, -1, 2, pack // 2)
    low = (halves & 15)[:, :, 0] | ((halves & 15)[:, :, 1] << 4)
    if bits == 4:
        return low.reshape(outputs, -1), low
    extra = bits - 4
    # Places that are a byte's width of `high` apart share a byte: [out, packs, half and multiple, place in it]
    parts = (halves >> 4).reshape(outputs, halves.shape[1], 8 // extra, -1)
    high = torch.zeros_like(parts[:, :, 0])
    for i in range(8 // extra):
        high |= parts[:, :, i] << (extra * i)
    return low.reshape(outputs, -1), high.reshape(outputs, -1)

"""Products with matrices in FP8 blocks, INT8, or integers of a few bits, which are unpacked and scaled in the product.

A program multiplies a tile of tokens and outputs on matrix units; sums have a fixed order. Packed weights are widened
for many tokens, which the library multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad

from services.worker.engine.kernels.gpu import elementwise
from services.worker.engine.kernels.gpu.dependent_launch import follow, launch_options
from services.worker.engine.kernels.gpu.fp8_linear import quantise_rows
from services.worker.engine.quantization import int8
from services.worker.engine.quantization.formats import FP8_BLOCK
from services.worker.engine.quantization.fp8 import Fp8BlockMatrix, in_blocks
from services.worker.engine.quantization.grouped import GroupedMatrix, Numbers, in_order
from services.worker.engine.quantization.int8 import Int8Matrix

if TYPE_CHECKING:
    from services.worker.engine.model.config import Activation

# With more tokens, packed weights are widened, this many at once, and multiplied by the library.
_MOST_TOKENS = 64
_WIDENED_AT_ONCE = 1 << 24
# The library is three times slower where rows of its outputs are not aligned.
_ALIGNED_OUTPUTS = 256
_PACKS = (128, 64, 32)
_LARGEST_PACK = _PACKS[0]
# cuBLAS multiplies FP8 in blocks for multiples of so many tokens.
_LIBRARY_TOKENS = 8
_MULTIPROCESSORS = 132  # of Hopper
# Products are cut into parts of their inputs up to so many programs, each of at least so many steps.
_PROGRAMS = 4 * _MULTIPROCESSORS
_MOST_PARTS = 8
_LEAST_STEPS = 4
_JOINED = 1024


@triton.jit
def _store(
    sums, bias, outputs, rows, at, in_rows, in_columns, columns, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr
):  # fmt: skip
    """Write sums [rows, columns], plus bias, to `outputs`, or add them."""
    element = outputs.dtype.element_ty
    if HAS_BIAS:
        sums += tl.load(bias + at, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    targets = outputs + rows.to(tl.int64)[:, None] * columns + at[None, :]
    mask = in_rows[:, None] & in_columns[None, :]
    if ADDS:
        sums = sums.to(element).to(tl.float32) + tl.load(targets, mask=mask, other=0.0).to(tl.float32)
    tl.store(targets, sums.to(element), mask=mask)


@triton.jit
def _put(
    sums, bias, outputs, partial_sums, part, tokens, rows, at, columns,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Do the same, or write the sums of a `part` of PARTS of the inputs to `partial_sums` [PARTS, tokens, columns]."""
    in_rows, in_columns = rows < tokens, at < columns
    if PARTS == 1:
        _store(sums, bias, outputs, rows, at, in_rows, in_columns, columns, HAS_BIAS=HAS_BIAS, ADDS=ADDS)
    else:
        places = (part * tokens + rows).to(tl.int64)[:, None] * columns + at[None, :]
        tl.store(partial_sums + places, sums, mask=in_rows[:, None] & in_columns[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _join(
    partial_sums, bias, outputs, tokens, columns,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write the sums of all parts, plus bias, to `outputs` [tokens, columns], or add them."""
    if OVERLAPS:
        follow()
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.program_id(1) + tl.arange(0, 1)
    in_columns = at < columns
    sums = tl.zeros([1, COLUMNS], tl.float32)
    for part in tl.static_range(PARTS):
        places = (part * tokens + rows).to(tl.int64)[:, None] * columns + at[None, :]
        sums += tl.load(partial_sums + places, mask=in_columns[None, :], other=0.0)
    _store(sums, bias, outputs, rows, at, rows < tokens, in_columns, columns, HAS_BIAS=HAS_BIAS, ADDS=ADDS)


@triton.jit(do_not_specialize=["tokens"])
def _fp8_block_product(
    inputs, weight, input_scales, weight_scales, bias, outputs, partial_sums, tokens, columns, width, blocks,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Multiply inputs [tokens, width] with weight [columns, width], DEPTH inputs of a scale on each side at a time."""
    if OVERLAPS:
        follow()
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    steps = tl.arange(0, DEPTH)
    in_rows, in_columns = rows < tokens, at < columns
    at_inputs = inputs + rows.to(tl.int64)[:, None] * width + steps[None, :]
    at_weight = weight + at.to(tl.int64)[None, :] * width + steps[:, None]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    of_part = tl.cdiv(blocks, PARTS)
    first = tl.program_id(2) * of_part
    for block in range(first, tl.minimum(first + of_part, blocks)):
        given = tl.load(at_inputs + block * DEPTH, mask=in_rows[:, None], other=0.0)
        factors = tl.load(at_weight + block * DEPTH, mask=in_columns[None, :], other=0.0)
        of_inputs = tl.load(input_scales + rows * blocks + block, mask=in_rows, other=0.0)
        of_weight = tl.load(weight_scales + block * columns + at, mask=in_columns, other=0.0)
        # Hopper's own sums of FP8 have 14 bits: after so many they are added to float32.
        part = tl.dot(given, factors, max_num_imprecise_acc=DEPTH)
        sums += part * of_inputs[:, None] * of_weight[None, :]
    part = tl.program_id(2)
    _put(sums, bias, outputs, partial_sums, part, tokens, rows, at, columns, HAS_BIAS=HAS_BIAS, ADDS=ADDS, PARTS=PARTS)


@triton.jit(do_not_specialize=["tokens"])
def _int8_product(
    inputs, weight, input_scales, weight_scales, bias, outputs, partial_sums, tokens, columns, width,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Multiply inputs [tokens, width] with weight [columns, width], exactly, and scale the sums."""
    if OVERLAPS:
        follow()
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    steps = tl.arange(0, DEPTH)
    in_rows, in_columns = rows < tokens, at < columns
    at_inputs = inputs + rows.to(tl.int64)[:, None] * width + steps[None, :]
    at_weight = weight + at.to(tl.int64)[None, :] * width + steps[:, None]
    sums = tl.zeros([ROWS, COLUMNS], tl.int32)
    of_part = tl.cdiv(tl.cdiv(width, DEPTH), PARTS) * DEPTH
    first = tl.program_id(2) * of_part
    for start in range(first, tl.minimum(first + of_part, width), DEPTH):
        in_width = start + steps < width
        given = tl.load(at_inputs + start, mask=in_rows[:, None] & in_width[None, :], other=0)
        factors = tl.load(at_weight + start, mask=in_columns[None, :] & in_width[:, None], other=0)
        sums += tl.dot(given, factors, out_dtype=tl.int32)
    of_inputs = tl.load(input_scales + rows, mask=in_rows, other=0.0)
    of_weight = tl.load(weight_scales + at, mask=in_columns, other=0.0)
    scaled = sums.to(tl.float32) * of_inputs[:, None] * of_weight[None, :]
    part = tl.program_id(2)
    _put(
        scaled, bias, outputs, partial_sums, part, tokens, rows, at, columns, HAS_BIAS=HAS_BIAS, ADDS=ADDS, PARTS=PARTS
    )


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
    _put(sums, bias, outputs, partial_sums, part, tokens, rows, at, columns, HAS_BIAS=HAS_BIAS, ADDS=ADDS, PARTS=PARTS)


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


@triton.jit
def _quantise_rows_to_int8(
    inputs, values, scales, width,
    BLOCK: tl.constexpr, HALF_RANGE: tl.constexpr, SMALLEST: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        follow()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    wide = tl.load(inputs + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(wide), axis=0)
    scale = tl.div_rn(tl.where(largest < SMALLEST, SMALLEST, largest), tl.full([], HALF_RANGE, tl.float32))
    # Not a number spoils its row: its scale is no number, whatever its values are.
    tl.store(scales + row, tl.where(tl.sum(tl.where(wide == wide, 0, 1), axis=0) > 0, float("nan"), scale))
    quotients = tl.div_rn(wide, tl.zeros([BLOCK], tl.float32) + scale)
    # Adding 1.5 * 2^23 rounds to the nearest even integer.
    rounded = (quotients + 12582912.0) - 12582912.0
    kept = tl.minimum(tl.maximum(rounded, -128.0), 127.0)
    tl.store(values + row * width + columns, kept.to(tl.int8), mask=inside)


def quantise_rows_to_int8(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [tokens, width] in INT8 and their scales, [tokens, 1] float32; nothing waits for the device."""
    inputs = inputs.contiguous()
    tokens, width = inputs.shape
    values = inputs.new_empty(tokens, width, dtype=torch.int8)
    scales = inputs.new_empty(tokens, 1, dtype=torch.float32)
    if tokens:
        block = triton.next_power_of_2(width)
        _quantise_rows_to_int8[(tokens,)](
            inputs, values, scales, width, BLOCK=block, HALF_RANGE=int8.HALF_RANGE, SMALLEST=int8.SMALLEST,
            num_warps=min(max(block // 1024, 1), 16), **launch_options(tokens),
        )  # fmt: skip
    return values, scales


def quantise_groups(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [tokens, width] in FP8, filled up with zeros, and scales of each 128, [tokens, groups] float32."""
    padded = in_blocks(inputs).contiguous()
    values, scales = quantise_rows(padded.view(-1, FP8_BLOCK))
    return values.view(padded.shape), scales.view(padded.shape[0], -1)


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut: tokens and outputs of a program, its warps and pipeline stages."""

    rows: int
    columns: int
    warps: int
    stages: int


def tile_for(tokens: int, outputs: int) -> Tile:
    """Choose the tile of a product: of few tokens it is bound by reading weights, of many by multiplying.

    Large tiles read less, and small ones leave fewer multiprocessors idle.
    """
    if tokens <= 16:
        return Tile(16, 32, 4, 4)
    if tokens <= 32:
        return Tile(32, 64, 4, 4)
    if tokens <= 64:
        return Tile(64, 64, 4, 3)
    has_many = triton.cdiv(tokens, 128) * triton.cdiv(outputs, 128) >= _MULTIPROCESSORS
    return Tile(128, 128, 8, 3) if has_many else Tile(64, 128, 4, 4)


@dataclass(frozen=True, slots=True)
class ProductLaunch:
    """The programs of one product: a grid of outputs, tokens and parts of the inputs, whose sums are joined at last.

    Few programs that each read much would leave multiprocessors waiting for memory.
    """

    tile: Tile
    bias: torch.Tensor | None
    outputs: torch.Tensor
    adds: bool
    depth: int
    """Steps of the whole product, one after another without parts."""

    @property
    def parts(self) -> int:
        programs = self._columns * self._rows
        wanted = _PROGRAMS // programs if self.outputs.shape[0] <= _MOST_TOKENS else 1
        return max(1, min(wanted, _MOST_PARTS, self.depth // _LEAST_STEPS))

    @property
    def grid(self) -> tuple[int, int, int]:
        return self._columns, self._rows, self.parts

    @property
    def constants(self) -> dict[str, int | bool]:
        """Constants that all products are compiled and launched with."""
        tile = self.tile
        return {
            "PARTS": self.parts, "ROWS": tile.rows, "COLUMNS": tile.columns, "HAS_BIAS": self.bias is not None,
            "ADDS": self.adds, "num_warps": tile.warps, "num_stages": tile.stages,
            **launch_options(self.outputs.shape[0]),
        }  # fmt: skip

    def partial_sums(self) -> torch.Tensor:
        """Return memory for the sums of parts, if there are several."""
        parts = self.parts
        return self.outputs if parts == 1 else self.outputs.new_empty(parts, *self.outputs.shape, dtype=torch.float32)

    def join(self, partial_sums: torch.Tensor) -> None:
        """Add up the parts, if there are several."""
        parts, (tokens, columns) = self.parts, self.outputs.shape
        if parts > 1:
            _join[(triton.cdiv(columns, _JOINED), tokens)](
                partial_sums, self.outputs if self.bias is None else self.bias, self.outputs, tokens, columns,
                COLUMNS=_JOINED, PARTS=parts, HAS_BIAS=self.bias is not None, ADDS=self.adds, num_warps=4,
                **launch_options(tokens),
            )  # fmt: skip

    @property
    def _columns(self) -> int:
        return -(-self.outputs.shape[1] // self.tile.columns)

    @property
    def _rows(self) -> int:
        return -(-self.outputs.shape[0] // self.tile.rows)


class BlockProduct:
    """Products with FP8 in blocks."""

    def __init__(self, matrix: Fp8BlockMatrix) -> None:
        """Keep a matrix that is on the device."""
        self.outputs = matrix.shape[0]
        self._values = matrix.values
        self._scales = matrix.scales.t().contiguous()  # [blocks, out], as programs read them
        self._library_scales = library_scales(matrix)

    def write(self, inputs: torch.Tensor, bias: torch.Tensor | None, outputs: torch.Tensor, *, adds: bool) -> None:
        """Write the product [tokens, out] to `outputs`, or add it."""
        tokens = inputs.shape[0]
        if tokens > _MOST_TOKENS and self._library_scales is not None:
            self._write_by_library(inputs, self._library_scales, bias, outputs, adds=adds)
            return
        values, scales = quantise_groups(inputs)
        launch = ProductLaunch(tile_for(tokens, self.outputs), bias, outputs, adds, scales.shape[1])
        partial_sums = launch.partial_sums()
        _fp8_block_product[launch.grid](
            values, self._values, scales, self._scales, scales if bias is None else bias, outputs, partial_sums,
            tokens, self.outputs, values.shape[1], scales.shape[1], DEPTH=FP8_BLOCK, **launch.constants,
        )  # fmt: skip
        launch.join(partial_sums)

    def _write_by_library(
        self, inputs: torch.Tensor, weight_scales: torch.Tensor, bias: torch.Tensor | None, outputs: torch.Tensor,
        *, adds: bool,
    ) -> None:  # fmt: skip
        tokens = inputs.shape[0]
        missing = -tokens % _LIBRARY_TOKENS
        padded = pad(inputs, (0, 0, 0, missing)) if missing else inputs
        values, scales = quantise_groups(padded)
        # Scales of one group after those of another, as cuBLAS reads them.
        is_direct = not (adds or missing)
        product: torch.Tensor = torch._scaled_mm(
            values, self._values.t(), scale_a=scales.t().contiguous().t(), scale_b=weight_scales.t(),
            out_dtype=inputs.dtype, out=outputs if is_direct else None,
        )[:tokens]  # fmt: skip
        if bias is not None:
            product += bias
        if adds:
            outputs += product
        elif not is_direct:
            outputs.copy_(product)


def library_scales(matrix: Fp8BlockMatrix) -> torch.Tensor | None:
    """Return scales [blocks of outputs, blocks of inputs] as cuBLAS multiplies by them; None: it does not.

    It does on Hopper, by whole blocks of 128 x 128, of which there are multiples of four in a row.
    """
    outputs, blocks = matrix.scales.shape
    is_hopper = matrix.values.is_cuda and torch.cuda.get_device_capability(matrix.values.device) == (9, 0)
    if not is_hopper or outputs % FP8_BLOCK or blocks % 4:
        return None
    of_blocks = matrix.scales.view(-1, FP8_BLOCK, blocks)
    # Matrices that were cut within blocks are stacked: a block of the whole has scales of several.
    return of_blocks[:, 0].contiguous() if bool((of_blocks == of_blocks[:, :1]).all()) else None


class Int8Product:
    """Products with INT8."""

    _DEPTH = 128

    def __init__(self, matrix: Int8Matrix) -> None:
        """Keep a matrix that is on the device."""
        self.outputs = matrix.shape[0]
        self._matrix = matrix

    def write(self, inputs: torch.Tensor, bias: torch.Tensor | None, outputs: torch.Tensor, *, adds: bool) -> None:
        """Write the product [tokens, out] to `outputs`, or add it."""
        tokens, width = inputs.shape
        values, scales = quantise_rows_to_int8(inputs)
        tile = tile_for(tokens, self.outputs)
        if tile.rows == tile.columns == 64:
            tile = replace(tile, stages=5)
        launch = ProductLaunch(tile, bias, outputs, adds, width // self._DEPTH)
        partial_sums = launch.partial_sums()
        _int8_product[launch.grid](
            values, self._matrix.values, scales, self._matrix.scales, scales if bias is None else bias, outputs,
            partial_sums, tokens, self.outputs, width, DEPTH=self._DEPTH, **launch.constants,
        )  # fmt: skip
        launch.join(partial_sums)


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
            self._write_widened(inputs, bias, outputs, adds=adds)
            return
        tile = tile_for(tokens, self.outputs)
        if tile.rows == tile.columns == 64 and self.outputs < 64 * _MULTIPROCESSORS:
            tile = Tile(64, 32, 4, 4)
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

    def _write_widened(
        self, inputs: torch.Tensor, bias: torch.Tensor | None, outputs: torch.Tensor, *, adds: bool
    ) -> None:
        height = max(1, _WIDENED_AT_ONCE // self._width // _ALIGNED_OUTPUTS) * _ALIGNED_OUTPUTS
        for start in range(0, self.outputs, height):
            part = slice(start, min(self.outputs, start + height))
            product = inputs @ self.widened(inputs.dtype, part).t()
            if bias is not None:
                product += bias[part]
            if adds:
                outputs[:, part] += product
            else:
                outputs[:, part] = product

    @property
    def _weights(self) -> tuple[torch.Tensor, ...]:
        return self._low, self._high, self._scales, self._scales if self._shifts is None else self._shifts

    @property
    def _constants(self) -> dict[str, int | bool]:
        return {
            "BITS": self._bits, "PACK": self._pack, "GROUP": self._group, "HAS_SHIFTS": self._shifts is not None,
            "IS_E2M1": self._is_e2m1,
        }  # fmt: skip


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


class GpuQuantisedLinear:
    """One matrix."""

    def __init__(self, product: BlockProduct | Int8Product | GroupedProduct, bias: torch.Tensor | None) -> None:
        """Multiply by `product`; keep bias [out]."""
        self._product = product
        self._bias = bias

    def __call__(self, inputs: torch.Tensor, outputs: torch.Tensor | None = None) -> torch.Tensor:
        if outputs is None:
            outputs = inputs.new_empty(inputs.shape[0], self._product.outputs)
        if inputs.shape[0]:
            self._product.write(inputs, self._bias, outputs, adds=False)
        return outputs

    def add_to(self, inputs: torch.Tensor, sums: torch.Tensor) -> None:
        if not sums.is_contiguous():
            sums += self(inputs)
        elif inputs.shape[0]:
            self._product.write(inputs, self._bias, sums, adds=True)


class GpuQuantisedGatedLinear:
    """Gate and up projection as one product."""

    def __init__(self, both: GpuQuantisedLinear, activation: Activation) -> None:
        """Split the output of `both`, gate above up."""
        self._both = both
        self._activation = activation

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the gated product; see `Activation`."""
        return elementwise.gate(self.halves(inputs), self._activation)

    def halves(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return both products; see `GatedLinear.halves`."""
        return self._both(inputs)


def product_of(
    matrix: Fp8BlockMatrix | Int8Matrix | GroupedMatrix,
) -> BlockProduct | Int8Product | GroupedProduct:
    """Return the product with a matrix that is on the device."""
    match matrix:
        case Fp8BlockMatrix():
            return BlockProduct(matrix)
        case Int8Matrix():
            return Int8Product(matrix)
        case GroupedMatrix():
            return GroupedProduct(matrix)

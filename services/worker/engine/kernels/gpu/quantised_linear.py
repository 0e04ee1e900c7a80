"""Linear layers with quantised matrices; products with FP8 in blocks and INT8, whose inputs are quantised too."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad

from services.worker.engine.kernels.gpu import elementwise
from services.worker.engine.kernels.gpu.dependent_launch import follow, launch_options
from services.worker.engine.kernels.gpu.fp8_rows import quantise_rows
from services.worker.engine.kernels.gpu.grouped_product import GroupedProduct
from services.worker.engine.kernels.gpu.int4_product import Int4Product, fits
from services.worker.engine.kernels.gpu.product_launch import ProductLaunch, put, tile_for
from services.worker.engine.quantization import int8
from services.worker.engine.quantization.formats import FP8_BLOCK
from services.worker.engine.quantization.fp8 import Fp8BlockMatrix, in_blocks
from services.worker.engine.quantization.grouped import GroupedMatrix
from services.worker.engine.quantization.int8 import Int8Matrix

if TYPE_CHECKING:
    from services.worker.engine.kernels.gpu.flashinfer_products import FlashInferProducts
    from services.worker.engine.model.config import Activation

# cuBLAS multiplies FP8 in blocks of more tokens than these, by multiples of so many.
_MOST_TOKENS = 64
_LIBRARY_TOKENS = 8


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
    put(sums, bias, outputs, partial_sums, part, tokens, rows, at, columns, HAS_BIAS=HAS_BIAS, ADDS=ADDS, PARTS=PARTS)


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
    put(scaled, bias, outputs, partial_sums, part, tokens, rows, at, columns, HAS_BIAS=HAS_BIAS, ADDS=ADDS, PARTS=PARTS)


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


class BlockProduct:
    """Products with FP8 in blocks."""

    def __init__(self, matrix: Fp8BlockMatrix, flashinfer: FlashInferProducts | None = None) -> None:
        """Keep a matrix that is on the device, and multiply by FlashInfer's kernels, if given, where they serve it."""
        self.outputs = matrix.shape[0]
        self._values = matrix.values
        self._scales = matrix.scales.t().contiguous()  # [blocks, out], as programs read them
        # None: the matrix has parts of blocks.
        self._block_scales = block_scales(matrix)
        self._library_scales = library_scales(matrix, self._block_scales)
        self._flashinfer = flashinfer
        if flashinfer is not None and self._block_scales is not None:
            flashinfer.add(self._values.shape)

    def write(self, inputs: torch.Tensor, bias: torch.Tensor | None, outputs: torch.Tensor, *, adds: bool) -> None:
        """Write the product [tokens, out] to `outputs`, or add it."""
        tokens, is_plain = inputs.shape[0], bias is None and not adds
        if self._is_by_flashinfer(tokens, is_plain=is_plain):
            assert self._flashinfer is not None, "it serves this matrix"
            assert self._block_scales is not None, "it serves this matrix"
            product = torch.empty_like(outputs) if adds else outputs
            self._flashinfer.multiply(in_blocks(inputs), self._values, self._block_scales, product)
            if bias is not None:
                product += bias
            if adds:
                outputs += product
            return
        if self._is_by_cublas(tokens):
            assert self._library_scales is not None, "it takes this matrix"
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

    def adds_within(self, tokens: int) -> bool:
        """Whether products are added to others by the engine's own program, not by one after a library's."""
        return not self._is_by_flashinfer(tokens, is_plain=False) and not self._is_by_cublas(tokens)

    def _is_by_flashinfer(self, tokens: int, *, is_plain: bool) -> bool:
        return (
            self._flashinfer is not None
            and self._block_scales is not None
            and self._flashinfer.serves(self._values.shape, tokens, is_plain=is_plain)
        )

    def _is_by_cublas(self, tokens: int) -> bool:
        return tokens > _MOST_TOKENS and self._library_scales is not None

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


def library_scales(matrix: Fp8BlockMatrix, scales: torch.Tensor | None) -> torch.Tensor | None:
    """Return `scales`, see `block_scales`, if cuBLAS multiplies by them; None: it does not.

    It does on Hopper, by whole blocks, of which there are multiples of four in a row.
    """
    is_hopper = matrix.values.is_cuda and torch.cuda.get_device_capability(matrix.values.device) == (9, 0)
    return scales if is_hopper and matrix.scales.shape[1] % 4 == 0 else None


def block_scales(matrix: Fp8BlockMatrix) -> torch.Tensor | None:
    """Return scales [out / 128, in / 128] of whole blocks of 128 x 128; None: the matrix has parts of blocks."""
    outputs, blocks = matrix.scales.shape
    if outputs % FP8_BLOCK:
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


Product = BlockProduct | Int8Product | Int4Product | GroupedProduct


class GpuQuantisedLinear:
    """One matrix."""

    def __init__(self, product: Product, bias: torch.Tensor | None) -> None:
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

    def adds_within(self, tokens: int) -> bool:
        return not isinstance(self._product, BlockProduct) or self._product.adds_within(tokens)


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
    matrix: Fp8BlockMatrix | Int8Matrix | GroupedMatrix, dtype: torch.dtype, flashinfer: FlashInferProducts | None
) -> Product:
    """Return the product of inputs of `dtype` with a matrix that is on the device; FlashInfer's, if given, may help."""
    match matrix:
        case Fp8BlockMatrix():
            return BlockProduct(matrix, flashinfer)
        case Int8Matrix():
            return Int8Product(matrix)
        case GroupedMatrix():
            return Int4Product(matrix, dtype) if fits(matrix, dtype) else GroupedProduct(matrix)

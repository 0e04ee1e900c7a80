"""Launches of products with quantised matrices: cut into programs, whose partial sums are then joined.

A program multiplies a tile of tokens and outputs on matrix units; sums have a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from services.worker.engine.kernels.gpu.dependent_launch import follow, launch_options

MULTIPROCESSORS = 132  # of Hopper
# Programs of a product, so that each multiprocessor has two or four.
TWO_EACH, FOUR_EACH = 2 * MULTIPROCESSORS, 4 * MULTIPROCESSORS
_MOST_PARTS = 8
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
def put(
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


@dataclass(frozen=True, slots=True)
class Tile:
    """Division of a product: tokens and outputs of a program, its warps and pipeline stages.

    It is also cut into parts of its inputs, for up to `programs` programs of at least `steps` steps each, unless that
    gives fewer than `least_parts`, which would not make up for joining them.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    programs: int = 0
    steps: int = 4
    least_parts: int = 2


def tile_for(tokens: int, outputs: int) -> Tile:
    """Choose the tile of a product: of few tokens it is bound by reading weights, of many by multiplying.

    Large tiles read less, and small ones leave fewer multiprocessors idle.
    """
    if tokens <= 16:
        return Tile(16, 32, 4, 4, FOUR_EACH)
    if tokens <= 32:
        return Tile(32, 64, 4, 4, FOUR_EACH)
    if tokens <= 64:
        return Tile(64, 64, 4, 3, FOUR_EACH)
    has_many = triton.cdiv(tokens, 128) * triton.cdiv(outputs, 128) >= MULTIPROCESSORS
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
        tile = self.tile
        parts = min(tile.programs // (self._columns * self._rows), _MOST_PARTS, self.depth // tile.steps)
        return parts if parts >= tile.least_parts else 1

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

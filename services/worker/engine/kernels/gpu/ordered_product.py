"""Matrix products whose sums have one order, whatever the number of tokens.

Each output is a chain of the same matrix instructions over all inputs, from first to last: warpgroups multiply 64
tokens with 16 inputs at a time (wgmma), and nothing is divided over the inputs. How many tokens and outputs a program
takes, how many inputs it has on their way, and in which order programs run, changes no bit of any output; so tiles are
chosen for speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from common.errors import ConfigurationError
from services.worker.engine.kernels.gpu.dependent_launch import follow, launch_options
from services.worker.engine.kernels.gpu.product_launch import MULTIPROCESSORS

if TYPE_CHECKING:
    import torch

# Rows of memory that are copied by descriptors begin at multiples of so many bytes.
_ALIGNMENT = 16
# Blocks of tokens that follow each other with the same outputs: their weights are read from memory once.
_GROUP = 8


@triton.jit(do_not_specialize=["tokens"])
def _product(
    inputs, weight, bias, outputs, tokens, columns, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Multiply inputs [tokens, width] with weight [columns, width]; both are descriptors, which fill up with zeros."""
    if OVERLAPS:
        follow()
    program = tl.program_id(0)
    row_blocks = tl.cdiv(tokens, ROWS)
    of_group = GROUP * tl.cdiv(columns, COLUMNS)
    first = program // of_group * GROUP
    height = tl.minimum(row_blocks - first, GROUP)
    row = (first + program % of_group % height) * ROWS
    column = program % of_group // height * COLUMNS
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, width, DEPTH):
        given = inputs.load([row, start])
        factors = weight.load([column, start])
        sums = tl.dot(given, factors.T, sums)
    rows = row + tl.arange(0, ROWS)
    at = column + tl.arange(0, COLUMNS)
    element = outputs.dtype.element_ty
    if HAS_BIAS:
        sums += tl.load(bias + at, mask=at < columns, other=0.0).to(tl.float32)[None, :]
    targets = outputs + rows.to(tl.int64)[:, None] * columns + at[None, :]
    mask = (rows < tokens)[:, None] & (at < columns)[None, :]
    if ADDS:
        sums = sums.to(element).to(tl.float32) + tl.load(targets, mask=mask, other=0.0).to(tl.float32)
    tl.store(targets, sums.to(element), mask=mask)


@dataclass(frozen=True, slots=True)
class OrderedTile:
    """Tokens and outputs of a program, inputs per step, warps, and pipeline stages.

    Tokens are multiples of 64, and warps of 4, so that all tiles use the same matrix instruction.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# For up to 64 tokens, by the outputs of a program; and for more, from small to large.
_FEW = (
    OrderedTile(64, 32, 128, 4, 6), OrderedTile(64, 64, 128, 4, 4), OrderedTile(64, 128, 128, 4, 3),
    OrderedTile(64, 256, 64, 4, 4),
)  # fmt: skip
_SMALL, _NARROW, _SQUARE, _LARGE = (
    OrderedTile(64, 64, 64, 4, 6), OrderedTile(64, 128, 64, 4, 4), OrderedTile(128, 128, 64, 4, 3),
    OrderedTile(256, 128, 64, 8, 3),
)  # fmt: skip
# All that `ordered_tile` may choose.
TILES = (*_FEW, _SMALL, _NARROW, _SQUARE, _LARGE)
# Up to so many tokens, programs for half of the multiprocessors are enough.
_VERY_FEW_TOKENS = 16
# Programs from which on a tile is used, the largest first.
_ENOUGH = ((_LARGE, 1000), (_SQUARE, 256), (_NARROW, 192))


def ordered_tile(tokens: int, outputs: int) -> OrderedTile:
    """Choose the tile of a product, as measured on an H200 with the shapes of an 8B model.

    Few tokens are bound by reading the weights, many by multiplying.
    """
    if tokens <= _FEW[0].rows:
        most = MULTIPROCESSORS // 2 if tokens <= _VERY_FEW_TOKENS else MULTIPROCESSORS
        return next((tile for tile in _FEW if triton.cdiv(outputs, tile.columns) <= most), _FEW[-1])
    for tile, programs in _ENOUGH:
        if triton.cdiv(tokens, tile.rows) * triton.cdiv(outputs, tile.columns) >= programs:
            return tile
    return _SMALL


class OrderedMatrix:
    """A matrix [out, in] on the device, as programs read it."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Keep a contiguous matrix.

        Raises:
            ConfigurationError: its rows cannot be copied by descriptors.
        """
        self.outputs, self.width = weight.shape
        if self.width * weight.element_size() % _ALIGNMENT:
            raise ConfigurationError(
                f"model.deterministic is not available with matrices of {self.width} inputs, which are no multiple of "
                f"{_ALIGNMENT // weight.element_size()}"
            )
        self._weight = weight
        self._descriptors: dict[tuple[int, int], TensorDescriptor] = {}

    def write(
        self, inputs: torch.Tensor, bias: torch.Tensor | None, outputs: torch.Tensor, *, adds: bool = False,
        tile: OrderedTile | None = None,
    ) -> None:  # fmt: skip
        """Write inputs [tokens, in] times the matrix, plus bias [out], to `outputs` [tokens, out], or add it.

        `outputs` are contiguous, of the inputs' type or float32.
        """
        tokens = outputs.shape[0]
        if tokens == 0:
            return
        tile = tile or ordered_tile(tokens, self.outputs)
        given = TensorDescriptor.from_tensor(inputs.contiguous(), [tile.rows, tile.depth])
        programs = triton.cdiv(tokens, tile.rows) * triton.cdiv(self.outputs, tile.columns)
        _product[(programs,)](
            given, self._described(tile), outputs if bias is None else bias, outputs, tokens, self.outputs, self.width,
            ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, GROUP=_GROUP, HAS_BIAS=bias is not None, ADDS=adds,
            num_warps=tile.warps, num_stages=tile.stages, **launch_options(tokens),
        )  # fmt: skip

    def _described(self, tile: OrderedTile) -> TensorDescriptor:
        block = tile.columns, tile.depth
        if block not in self._descriptors:
            self._descriptors[block] = TensorDescriptor.from_tensor(self._weight, list(block))
        return self._descriptors[block]

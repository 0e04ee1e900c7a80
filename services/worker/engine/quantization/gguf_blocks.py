"""The blocks of GGUF files (llama.cpp's ggml-quants) as matrices of packed integers.

Each block of a row holds integers and what scales them. Blocks of 256, the k-quants, scale groups of 16 or 32 by small
integers times a scale of the block; these products are rounded to float16, by at most one part in 2,048. Integers of
two and three bits take four.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from services.worker.engine.quantization.grouped import GroupedMatrix
from services.worker.engine.quantization.mxfp4 import mxfp4_matrix

if TYPE_CHECKING:
    from collections.abc import Callable

    # Integers [rows, in], bits, scales and shifts [rows, groups].
    Parts = tuple[torch.Tensor, int, torch.Tensor, torch.Tensor | None]


_MXFP4 = "MXFP4"


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Rows of a matrix as the file stores them, which are widened one by one."""

    data: torch.Tensor  # [rows, bytes] uint8, on the CPU
    kind: GGMLQuantizationType

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and weights of a row."""
        elements, size = GGML_QUANT_SIZES[self.kind]
        return self.data.shape[0], self.data.shape[1] // size * elements

    def widened(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [n] int64 as the library dequantises them, [n, width] float32."""
        if not len(rows):
            return torch.empty(0, self.shape[1])
        return torch.from_numpy(dequantize(self.data[rows].numpy(), self.kind))


def grouped_blocks(kind: str, blocks: torch.Tensor) -> GroupedMatrix:
    """Return the matrix in `blocks` [rows, blocks, bytes of a block] uint8, of a `kind` in `KINDS`."""
    rows = blocks.shape[0]
    if kind == _MXFP4:
        return mxfp4_matrix(_nibbles(blocks[..., 1:17]).reshape(rows, -1), blocks[..., 0])
    values, bits, scales, shifts = _READERS[kind](blocks)
    return GroupedMatrix(
        values.reshape(rows, -1).contiguous(),
        bits,
        scales.reshape(rows, -1).half().contiguous(),
        None if shifts is None else shifts.reshape(rows, -1).half().contiguous(),
    )


def _q4_0(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[..., 2:18]), 4, _half(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[..., 4:20]), 4, _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[..., 6:22]) | _fifth_bits(blocks[..., 2:6]), 5, _half(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[..., 8:24]) | _fifth_bits(blocks[..., 4:8]), 5, _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> Parts:
    # Signed bytes, moved into the range from 0 on.
    return blocks[..., 2:34] ^ 0x80, 8, _half(blocks, 0), None


def _q2_k(blocks: torch.Tensor) -> Parts:
    scales = (blocks[..., 0:16] & 15).float() * _half(blocks, 80)
    shifts = (blocks[..., 0:16] >> 4).float() * -_half(blocks, 82)
    return _pairs_of_bits(blocks[..., 16:80]), 4, scales, shifts


def _q3_k(blocks: torch.Tensor) -> Parts:
    # -4 to 3, which are 4 to 11 where 8 stands for 0.
    values = _pairs_of_bits(blocks[..., 32:96]) | (_bits_of_32(blocks[..., 0:32]) << 2)
    # Six bits each: the lower four of all sixteen scales, then the upper two.
    upper = (_parts(blocks[..., 104:108], 1, 4) >> _steps(4, 2)[:, None] & 3).flatten(-2)
    scales = (_nibbles(blocks[..., 96:104]) | (upper << 4)).float() - 32
    return values + 4, 4, scales * _half(blocks, 108), None


def _q4_k(blocks: torch.Tensor) -> Parts:
    scales, shifts = _scales_and_shifts(blocks)
    return _halves_of_32(blocks[..., 16:144]), 4, scales, shifts


def _q5_k(blocks: torch.Tensor) -> Parts:
    scales, shifts = _scales_and_shifts(blocks)
    return _halves_of_32(blocks[..., 48:176]) | (_bits_of_32(blocks[..., 16:48]) << 4), 5, scales, shifts


def _q6_k(blocks: torch.Tensor) -> Parts:
    # Two halves of 128 elements; bytes hold four bits of elements 64 apart.
    lower = _parts(blocks[..., 0:128], 2, 1, 64) >> _steps(2, 4)[:, None] & 15
    values = lower.flatten(-3) | (_pairs_of_bits(blocks[..., 128:192]) << 4)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    return values, 6, scales, None


_READERS: dict[str, Callable[[torch.Tensor], Parts]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
KINDS = frozenset((*_READERS, _MXFP4))


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 of each block as float32, [..., 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return integers: the lower four bits of all bytes, then the upper ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Return the bits of four bytes, from the lowest one on, each as a fifth bit."""
    return ((packed[..., None] >> _steps(8, 1) & 1) << 4).flatten(-2)


def _halves_of_32(packed: torch.Tensor) -> torch.Tensor:
    """Return integers of 32 bytes at a time: the lower four bits of all of them, then the upper ones."""
    return _nibbles(_parts(packed, -1, 32)).flatten(-2)


def _bits_of_32(packed: torch.Tensor) -> torch.Tensor:
    """Return the lowest bits of 32 bytes, then the next ones, up to the highest."""
    return (packed[..., None, :] >> _steps(8, 1)[:, None] & 1).flatten(-2)


def _pairs_of_bits(packed: torch.Tensor) -> torch.Tensor:
    """Return integers of 32 bytes at a time: the lowest two bits of all of them, then the next ones."""
    return (_parts(packed, -1, 1, 32) >> _steps(4, 2)[:, None] & 3).flatten(-3)


def _scales_and_shifts(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return those of the eight groups of a block with two scales in float16 and twelve bytes of 6-bit integers."""
    first, second, third = _parts(blocks[..., 4:16], 3, 4).unbind(-2)
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], dim=-1)
    minima = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], dim=-1)
    return scales.float() * _half(blocks, 0), minima.float() * -_half(blocks, 2)


def _parts(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return a tensor whose last dimension becomes several."""
    return tensor.reshape(*tensor.shape[:-1], *shape)


def _steps(count: int, size: int) -> torch.Tensor:
    return torch.arange(0, count * size, size, dtype=torch.uint8)

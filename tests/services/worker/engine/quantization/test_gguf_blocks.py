"""Blocks of GGUF files as packed matrices, against the dequantisation of the library gguf."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from services.worker.engine.quantization.gguf_blocks import KINDS, RowBlocks, grouped_blocks
from services.worker.engine.quantization.matrices import above
from tests.services.worker.engine.quantization.random_blocks import random_blocks

# Their products of two scales are rounded to float16.
ROUNDED = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def expected_of(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    data = blocks.flatten(1).numpy()
    return torch.from_numpy(np.ascontiguousarray(dequantize(data, GGMLQuantizationType[kind])))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_weights_are_those_that_the_library_dequantises(kind: str) -> None:
    blocks = random_blocks(kind, 5, 3)
    matrix, expected = grouped_blocks(kind, blocks), expected_of(kind, blocks)
    assert matrix.scales.dtype == torch.float16
    assert int(matrix.values.max()) < 2**matrix.bits
    if kind in ROUNDED:
        scales, shifts = (
            each.float().abs().repeat_interleave(matrix.group, dim=1)
            for each in (matrix.scales, matrix.explicit_shifts())
        )
        assert bool(((matrix.widened(torch.float32) - expected).abs() <= (scales * 63 + shifts) * 2**-11).all())
    else:
        torch.testing.assert_close(matrix.widened(torch.float32), expected, atol=1e-9, rtol=1e-6)


def test_columns_are_those_of_the_whole_matrix() -> None:
    for kind in ("Q2_K", "Q3_K", "Q4_K", "Q6_K", "Q8_0"):
        matrix = grouped_blocks(kind, random_blocks(kind, 4, 2 if kind != "Q8_0" else 8))
        part = slice(48, 208)
        assert torch.equal(matrix.columns(part).widened(torch.float32), matrix.widened(torch.float32)[:, part])


def test_matrices_of_different_kinds_are_stacked() -> None:
    fours, sixes = (grouped_blocks(kind, random_blocks(kind, 4, 2)) for kind in ("Q4_K", "Q6_K"))
    both = above(fours, sixes, fours)
    assert not isinstance(both, torch.Tensor)
    widened = [each.widened(torch.float32) for each in (fours, sixes, fours)]
    assert (both.bits, both.group) == (6, 16)  # type: ignore[union-attr]  # as both are
    torch.testing.assert_close(both.widened(torch.float32), torch.cat(widened))  # type: ignore[union-attr]  # as both are


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_rows_are_widened_one_by_one(kind: str) -> None:
    data = random_blocks(kind, 5, 3)
    blocks, expected = RowBlocks(data.flatten(1), GGMLQuantizationType[kind]), expected_of(kind, data)
    assert blocks.shape == tuple(expected.shape)
    chosen = torch.tensor([4, 0, 4])
    assert torch.equal(blocks.widened(chosen), expected[chosen])
    assert blocks.widened(chosen[:0]).shape == (0, expected.shape[1])

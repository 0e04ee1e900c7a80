"""The matrices that kernels lay out: as wide as activations, or quantised in one of several ways."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch

from services.worker.engine.quantization import fp8, grouped
from services.worker.engine.quantization.fp8 import Fp8BlockMatrix, Fp8Matrix
from services.worker.engine.quantization.grouped import GroupedMatrix
from services.worker.engine.quantization.int8 import Int8Matrix

if TYPE_CHECKING:
    from collections.abc import Sequence

_M = TypeVar("_M")

QuantisedMatrix: TypeAlias = Fp8Matrix | Fp8BlockMatrix | Int8Matrix | GroupedMatrix
Matrix: TypeAlias = torch.Tensor | QuantisedMatrix


def above(*matrices: Matrix) -> Matrix:
    """Return matrices of the same inputs, all of one kind, as one: the first lies above the others."""
    kinds = {type(matrix) for matrix in matrices}
    assert are_alike(matrices), f"matrices of one product are held alike, not as {kinds}"
    match matrices[0]:
        case Fp8Matrix():
            return fp8.stacked(_all(Fp8Matrix, matrices))
        case Fp8BlockMatrix():
            return fp8.stacked_blocks(_all(Fp8BlockMatrix, matrices))
        case Int8Matrix():
            given = _all(Int8Matrix, matrices)
            return Int8Matrix(torch.cat([each.values for each in given]), torch.cat([each.scales for each in given]))
        case GroupedMatrix():
            return grouped.stacked(_all(GroupedMatrix, matrices))
        case _:
            return torch.cat(_all(torch.Tensor, matrices))


def reordered(matrix: Matrix, order: torch.Tensor) -> Matrix:
    """Return a matrix with its outputs in another order: first output `order[0]`, and so on."""
    match matrix:
        case Fp8Matrix() | Fp8BlockMatrix():
            # Not every device indexes FP8.
            values = matrix.values.view(torch.uint8)[order].view(matrix.values.dtype)
            return replace(matrix, values=values, scales=matrix.scales[order])
        case Int8Matrix():
            return Int8Matrix(matrix.values[order], matrix.scales[order])
        case GroupedMatrix():
            return matrix.rows(order)
        case _:
            return matrix[order]


def dequantised(matrix: Matrix) -> torch.Tensor:
    """Return the weights [out, in], computed in float32 where they were quantised."""
    match matrix:
        case Fp8Matrix() | Int8Matrix():
            return matrix.values.float() * matrix.scales[:, None]
        case Fp8BlockMatrix():
            return matrix.widened(torch.float32)[:, : matrix.inputs]
        case GroupedMatrix():
            return matrix.plain(torch.float32)
        case _:
            return matrix


def are_alike(matrices: Sequence[Matrix]) -> bool:
    """Return whether matrices of the same inputs can be one."""
    # Parameters are tensors, too.
    kinds = {torch.Tensor if isinstance(matrix, torch.Tensor) else type(matrix) for matrix in matrices}
    if len(kinds) > 1:
        return False
    ordered = [matrix for matrix in matrices if isinstance(matrix, GroupedMatrix)]
    return not ordered or (grouped.same_order(ordered) and grouped.same_numbers(ordered))


def _all(kind: type[_M], matrices: Sequence[object]) -> list[_M]:
    return [matrix for matrix in matrices if isinstance(matrix, kind)]

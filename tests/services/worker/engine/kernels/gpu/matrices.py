"""Quantised matrices, their exact products in float64, and what the products of programs may be off."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from services.worker.engine.kernels.composed import round_in_groups
from services.worker.engine.quantization import fp8, int8, mxfp4
from services.worker.engine.quantization.grouped import GroupedMatrix, Numbers

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.worker.engine.kernels.interface import Linear
    from services.worker.engine.quantization.matrices import QuantisedMatrix

HAS_GPU = torch.cuda.is_available()
# The interpreter multiplies no bfloat16.
DTYPE = torch.bfloat16 if HAS_GPU else torch.float16
EPSILON = torch.finfo(DTYPE).eps


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


def integers(outputs: int, width: int, bits: int, group: int, *, shifted: bool, narrow: bool = True) -> GroupedMatrix:
    """Return a matrix of random integers whose weights are about as large as 1 / sqrt(width)."""
    generator = torch.Generator().manual_seed(bits + group)
    values = torch.randint(2**bits, (outputs, width), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(outputs, width // group, generator=generator) + 0.5) * (2.0**-bits / width**0.5)
    shifts = -scales * torch.randint(2**bits, scales.shape, generator=generator)
    dtype = torch.float16 if narrow else torch.float32
    return GroupedMatrix(values, bits, scales.to(dtype), shifts.to(dtype) if shifted else None)


def weights_of(matrix: QuantisedMatrix) -> torch.Tensor:
    """Return the weights in float64, [out, in]."""
    match matrix:
        case GroupedMatrix() if matrix.numbers is Numbers.E2M1:
            return matrix.widened(torch.float32).double()
        case GroupedMatrix():
            scales, shifts = (
                each.double().repeat_interleave(matrix.group, dim=1)
                for each in (matrix.scales, matrix.explicit_shifts())
            )
            return matrix.values.double() * scales + shifts
        case fp8.Fp8BlockMatrix():
            spread = matrix.scales.double().repeat_interleave(128, dim=1)
            return (matrix.values.double() * spread)[:, : matrix.inputs]
        case _:
            return matrix.values.double() * matrix.scales.double()[:, None]


def exact(inputs: torch.Tensor, matrix: QuantisedMatrix) -> torch.Tensor:
    """Return the product in float64 with inputs as the format rounds them."""
    match matrix:
        case GroupedMatrix():
            seen = matrix.ordered_inputs(inputs).double()
        case fp8.Fp8BlockMatrix():
            seen = round_in_groups(inputs.float())[:, : matrix.inputs].double()
        case int8.Int8Matrix():
            values, scales = int8.quantise_rows(inputs)
            seen = values.double() * scales
        case _:
            assert matrix.input_scale is not None
            values, scales = fp8.quantise_with(inputs, matrix.input_scale)
            seen = values.double() * scales
    return seen @ weights_of(matrix).t()


def tolerance(inputs: torch.Tensor, matrix: QuantisedMatrix) -> float:
    """Return the largest error allowed in an output: weights are rounded to the inputs' type, sums once or twice."""
    largest = float((inputs.double().abs() @ weights_of(matrix)[:, : inputs.shape[1]].abs().t()).max())
    if isinstance(matrix, GroupedMatrix):
        largest = float((matrix.ordered_inputs(inputs).double().abs() @ weights_of(matrix).abs().t()).max())
    return 2 * EPSILON * largest


MATRICES: dict[str, Callable[[int, int], QuantisedMatrix]] = {
    "fp8 blocks": lambda outputs, width: fp8.quantise_blocks(random(outputs, width, seed=1).float() / width**0.5),
    "int8": lambda outputs, width: int8.quantise(random(outputs, width, seed=1).float() / width**0.5),
    "static fp8": lambda outputs, width: replace(
        fp8.quantise(random(outputs, width, seed=1).float() / width**0.5), input_scale=torch.tensor([0.01])
    ),
    "4 bits": lambda outputs, width: integers(outputs, width, 4, 64, shifted=False),
    "4 bits in large groups": lambda outputs, width: integers(outputs, width, 4, 128 if HAS_GPU else 64, shifted=True),
    "4 bits in small groups": lambda outputs, width: integers(outputs, width, 4, 16, shifted=True),
    "4 bits shifted": lambda outputs, width: integers(outputs, width, 4, 32, shifted=True, narrow=False),
    "mxfp4": lambda outputs, width: mxfp4.quantise(random(outputs, width, seed=1).float() / width**0.5),
    "5 bits": lambda outputs, width: integers(outputs, width, 5, 32, shifted=True),
    "6 bits": lambda outputs, width: integers(outputs, width, 6, 16, shifted=False),
    "8 bits": lambda outputs, width: integers(outputs, width, 8, 32, shifted=True),
}


def check(linear: Linear, inputs: torch.Tensor, expected: torch.Tensor, allowed: float, device: torch.device) -> None:
    got = linear(inputs.to(device))
    assert got.dtype == DTYPE
    assert float((got.cpu().double() - expected).abs().max()) <= allowed
    outputs = torch.full_like(got, float("nan"))
    assert linear(inputs.to(device), outputs) is outputs
    assert torch.equal(outputs, got)
    sums = random(*expected.shape, seed=5)
    added = sums.to(device, copy=True)
    linear.add_to(inputs.to(device), added)
    wanted = sums.double() + expected
    assert float((added.cpu().double() - wanted).abs().max()) <= allowed + EPSILON * float(wanted.abs().max())

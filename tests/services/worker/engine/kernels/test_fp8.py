"""FP8 matrices, and their products on CPUs, against sums in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.kernels.cpu.kernels import CpuKernels
from services.worker.engine.kernels.torch.kernels import TorchKernels, gated
from services.worker.engine.model.config import Activation
from services.worker.engine.quantization.fp8 import FP8, LARGEST, Fp8Matrix, quantise, quantise_rows
from services.worker.engine.quantization.matrices import above
from tests.services.worker.engine.quantization.fp8_bounds import exact_product, rounding_bound, widened, within

if TYPE_CHECKING:
    from services.worker.engine.kernels.cpu.library import CpuLibrary
    from services.worker.engine.kernels.interface import Kernels

CPU = torch.device("cpu")
BACKENDS = ("torch", "compiled")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernels_of(backend: str, dtype: torch.dtype, library: CpuLibrary, threads: int = 2) -> Kernels:
    return TorchKernels(dtype, CPU) if backend == "torch" else CpuKernels(library, dtype, threads)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 9), st.integers(1, 80), st.integers(-30, 30), st.integers(0, 2**32))
def test_quantised_values_are_off_by_half_a_step_at_most(rows: int, width: int, exponent: int, seed: int) -> None:
    exact = random(rows, width, seed=seed) * 2.0**exponent
    values, scales = quantise_rows(exact)
    assert values.dtype == FP8
    assert values.float().abs().amax(dim=-1).eq(LARGEST).all()
    error = (values.double() * scales - exact).abs()
    assert within(error, rounding_bound(exact, scales))


def test_rows_of_zeros_stay_zeros_and_a_nan_stays_in_its_row() -> None:
    rows = torch.tensor([[0.0, 0.0], [1.0, float("nan")], [3.0, -1.5], [1e-30, 0.0]])
    values, scales = quantise_rows(rows)
    assert (values.float() * scales)[0].tolist() == [0.0, 0.0]
    assert (values.float() * scales)[1].sum().isnan()
    assert (values.float() * scales)[2].tolist() == [3.0, -1.5]
    assert (values.float() * scales)[3].isfinite().all()


def test_a_matrix_is_quantised_row_by_row_however_it_is_cut() -> None:
    weight = random(5000, 32) * torch.logspace(-3, 3, 5000)[:, None]
    matrix = quantise(weight)
    parts = above(quantise(weight[:130]), quantise(weight[130:]))
    assert isinstance(parts, Fp8Matrix)
    assert torch.equal(parts.values.float(), matrix.values.float())
    assert torch.equal(parts.scales, matrix.scales)
    part = matrix.columns(slice(8, 24))
    assert torch.equal(widened(part), widened(matrix)[:, 8:24])
    assert part.shape == (5000, 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_quantised_values(
    backend: str, dtype: torch.dtype, has_bias: bool, library: CpuLibrary
) -> None:
    kernels = kernels_of(backend, dtype, library)
    weight, inputs = random(80, 160), random(11, 160, seed=1).to(kernels.activation_dtype)
    bias = random(80, seed=2) if has_bias else None
    matrix = quantise(weight)
    linear = kernels.linear(matrix, bias)
    exact, bound = exact_product(inputs, matrix, bias, kernels.activation_dtype)
    got = linear(inputs)
    assert got.dtype == inputs.dtype
    assert within((got.double() - exact).abs(), bound)
    sums = random(11, 80, seed=3).to(inputs.dtype)
    added = sums.clone()
    linear.add_to(inputs, added)
    torch.testing.assert_close(added, sums + got)
    # What FP8 costs: each factor is off by a sixteenth at most, or by what small values lose.
    values, scales = quantise_rows(inputs)
    off_inputs, off_weight = rounding_bound(inputs, scales), rounding_bound(weight, matrix.scales[:, None])
    seen = values.double() * scales
    cost = off_inputs @ weight.double().abs().t() + seen.abs() @ off_weight.t()
    wide = inputs.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert within((got.double() - wide).abs(), cost + bound)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", Activation)
def test_gated_products_are_those_of_quantised_values(
    backend: str, activation: Activation, library: CpuLibrary
) -> None:
    kernels = kernels_of(backend, torch.float32, library)
    gate, up, inputs = random(48, 96) / 8, random(48, 96, seed=1), random(5, 96, seed=2)
    biases = random(48, seed=3), random(48, seed=4)
    matrices = quantise(gate), quantise(up)
    got = kernels.gated_linear(*matrices, biases, activation)(inputs)
    wide = [exact_product(inputs, *each, torch.float32)[0] for each in zip(matrices, biases, strict=True)]
    torch.testing.assert_close(got.double(), gated(wide[0], wide[1], activation), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_token_gets_the_same_bits_in_every_batch(library: CpuLibrary, threads: int) -> None:
    linear = CpuKernels(library, torch.bfloat16, threads).linear(quantise(random(130, 96)), random(130))
    inputs = random(41, 96, seed=1) * torch.logspace(-4, 4, 41)[:, None]
    together = linear(inputs)
    for count in (1, 2, 7, 8, 9, 16, 40):
        assert torch.equal(linear(inputs[-count:].contiguous()), together[-count:])

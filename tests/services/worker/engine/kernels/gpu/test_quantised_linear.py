"""Products with quantised matrices on the GPU against sums in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from services.worker.engine.kernels.torch.kernels import gated
from services.worker.engine.model.config import Activation
from services.worker.engine.quantization import fp8, int8

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from services.worker.engine.kernels.gpu import product_launch, quantised_linear
from services.worker.engine.kernels.gpu.kernels import GpuKernels
from tests.services.worker.engine.kernels.gpu.matrices import (
    DTYPE,
    EPSILON,
    HAS_GPU,
    MATRICES,
    check,
    exact,
    integers,
    random,
    tolerance,
)

if TYPE_CHECKING:
    from services.worker.engine.quantization.matrices import QuantisedMatrix

# One token, few, a tile that is not full, several tiles, and widened weights.
TOKENS = (1, 3, 17, 33, 64, 130, 520) if HAS_GPU else (1, 17)


@pytest.fixture(autouse=True)
def can_multiply(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("this GPU does not multiply FP8")


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_stored_weights(device: torch.device, kind: str, tokens: int, has_bias: bool) -> None:
    width, outputs = (4352, 272) if HAS_GPU else (192, 48)
    matrix, inputs = MATRICES[kind](outputs, width), random(tokens, width)
    bias = random(outputs, seed=3) if has_bias else None
    linear = GpuKernels(DTYPE, device).linear(matrix, bias)
    expected = exact(inputs, matrix) + (0 if bias is None else bias.double())
    check(linear, inputs, expected, tolerance(inputs, matrix), device)


@pytest.mark.parametrize("kind", ["fp8 blocks", "4 bits", "5 bits", "6 bits", "int8"])
def test_widths_that_fill_no_pack_or_block_are_right(device: torch.device, kind: str) -> None:
    # 576 is SmolLM2's width: four and a half blocks; 96 is packed by 32.
    for width in (576, 96) if kind == "int8" or kind == "fp8 blocks" else (576,):
        matrix, inputs = MATRICES[kind](48, width), random(5, width)
        linear = GpuKernels(DTYPE, device).linear(matrix, None)
        check(linear, inputs, exact(inputs, matrix), tolerance(inputs, matrix), device)


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("activation", Activation)
def test_gated_products_are_those_of_stored_weights(device: torch.device, kind: str, activation: Activation) -> None:
    inputs, matrices = random(5, 192), (MATRICES[kind](32, 192), MATRICES[kind](32, 192))
    biases = random(32, seed=3), random(32, seed=4)
    got = GpuKernels(DTYPE, device).gated_linear(*matrices, biases, activation)(inputs.to(device))
    gate, up = (exact(inputs, matrix) + bias.double() for matrix, bias in zip(matrices, biases, strict=True))
    torch.testing.assert_close(got.cpu().double(), gated(gate, up, activation), atol=3e-2, rtol=3e-2)


def test_rows_are_quantised_to_int8_as_the_reference_does(device: torch.device) -> None:
    rows = random(9, 200) * torch.logspace(-3, 3, 9).to(DTYPE)[:, None]
    rows[3] = 0
    values, scales = quantised_linear.quantise_rows_to_int8(rows.to(device))
    expected_values, expected_scales = int8.quantise_rows(rows)
    torch.testing.assert_close(scales.cpu(), expected_scales, atol=0, rtol=1e-6)
    # A division that is off in its last bit may round the other way, where it is half way between two values.
    assert int((values.cpu().int() - expected_values.int()).abs().max()) <= 1
    assert (values.cpu() == expected_values).double().mean() > 0.99
    rows[2, 5] = float("nan")
    _, scales = quantised_linear.quantise_rows_to_int8(rows.to(device))
    assert scales.isnan().flatten().tolist() == [i == 2 for i in range(9)]
    assert quantised_linear.quantise_rows_to_int8(rows[:0].to(device))[0].shape == (0, 200)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("tokens", [1, 8, 64, 520])
def test_captured_products_are_the_same(device: torch.device, kind: str, tokens: int) -> None:
    matrix = MATRICES[kind](512, 1024)
    linear = GpuKernels(DTYPE, device).linear(matrix, None)
    inputs = random(tokens, 1024).to(device)
    linear(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = linear(inputs)
    for seed in (7, 8):
        inputs.copy_(random(tokens, 1024, seed=seed))
        graph.replay()
        assert torch.equal(captured, linear(inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [65, 72, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_library_multiplies_fp8_in_blocks_as_our_program_does(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, tokens: int, has_bias: bool
) -> None:
    matrix = fp8.quantise_blocks(random(768, 1024).float() * 1024**-0.5).to(device)
    inputs = random(tokens, 1024, seed=1).to(device)
    bias = random(768, seed=2).to(device) if has_bias else None
    by_library = GpuKernels(DTYPE, device).linear(matrix, bias)
    monkeypatch.setattr(quantised_linear, "library_scales", lambda _matrix, _scales: None)
    by_program = GpuKernels(DTYPE, device).linear(matrix, bias)
    sums = random(tokens, 768, seed=3).to(device)
    placed, added, expected = torch.empty_like(sums), sums.clone(), sums.clone()
    by_library.add_to(inputs, added)
    by_program.add_to(inputs, expected)
    by_library(inputs, placed)
    wanted = by_program(inputs)
    for got, like in ((by_library(inputs), wanted), (placed, wanted), (added, expected)):
        assert float((got.float() - like.float()).norm() / like.float().norm()) < EPSILON


def test_matrices_whose_blocks_are_cut_are_not_multiplied_by_the_library(device: torch.device) -> None:
    whole = fp8.quantise_blocks(random(256, 512).float())
    assert library_rows(whole.to(device)) == (2 if HAS_GPU else None)
    upper = fp8.Fp8BlockMatrix(whole.values[:192], whole.scales[:192], whole.inputs)
    shifted = fp8.stacked_blocks([upper, fp8.quantise_blocks(random(192, 512, seed=1).float())])
    assert library_rows(shifted.to(device)) is None


def library_rows(matrix: fp8.Fp8BlockMatrix) -> int | None:
    scales = quantised_linear.library_scales(matrix, quantised_linear.block_scales(matrix))
    return None if scales is None else scales.shape[0]


@pytest.mark.parametrize("kind", ["fp8 blocks", "int8", "4 bits"])
@pytest.mark.parametrize("tokens", [1, 17])
def test_products_in_parts_are_joined(device: torch.device, kind: str, tokens: int) -> None:
    width, outputs = 2100 if kind == "int8" else 2048, 80
    weight = random(outputs, width).float() * width**-0.5
    matrix: QuantisedMatrix
    match kind:
        case "fp8 blocks":
            matrix = fp8.quantise_blocks(weight)
        case "int8":
            matrix = int8.quantise(weight)
        case _:
            matrix = integers(outputs, width, 4, 128, shifted=True)
    inputs, bias, sums = random(tokens, width, seed=1), random(outputs, seed=2), random(tokens, outputs, seed=3)
    tile = product_launch.tile_for(tokens, outputs)
    assert product_launch.ProductLaunch(tile, None, sums, adds=False, depth=16).parts == 4
    product = GpuKernels(DTYPE, device).linear(matrix.to(device), bias.to(device))
    wanted = exact(inputs, matrix) + bias.double()
    added = sums.clone().to(device)
    product.add_to(inputs.to(device), added)
    for got, like in ((product(inputs.to(device)), wanted), (added, wanted + sums.double())):
        assert float((got.cpu().double() - like).norm() / like.norm()) < 4 * EPSILON

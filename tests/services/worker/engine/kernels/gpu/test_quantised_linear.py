"""Products with quantised matrices on the GPU against sums in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from services.worker.engine.kernels.composed import round_in_groups
from services.worker.engine.kernels.torch.kernels import gated
from services.worker.engine.model.config import Activation
from services.worker.engine.quantization import fp8, grouped, int8, mxfp4
from services.worker.engine.quantization.grouped import GroupedMatrix, Numbers

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from services.worker.engine.kernels.gpu import grouped_product, product_launch, quantised_linear
from services.worker.engine.kernels.gpu.kernels import GpuKernels

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.worker.engine.kernels.interface import Linear
    from services.worker.engine.quantization.matrices import QuantisedMatrix

HAS_GPU = torch.cuda.is_available()
# The interpreter multiplies no bfloat16.
DTYPE = torch.bfloat16 if HAS_GPU else torch.float16
EPSILON = torch.finfo(DTYPE).eps
# One token, few, a tile that is not full, several tiles, and widened weights.
TOKENS = (1, 3, 17, 33, 64, 130, 520) if HAS_GPU else (1, 17)


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
    """Return what an output may be off: weights are rounded to the inputs' type, sums once or twice."""
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


@pytest.fixture(autouse=True)
def can_multiply(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("this GPU does not multiply FP8")


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


@pytest.mark.parametrize("bits", grouped.BITS)
@pytest.mark.parametrize(("group", "width"), [(16, 96), (32, 128), (64, 192), (128, 256), (32, 96)])
def test_integers_of_every_group_are_unpacked(device: torch.device, bits: int, group: int, width: int) -> None:
    for shifted in (False, True):
        matrix = integers(40, width, bits, group, shifted=shifted)
        product = grouped_product.GroupedProduct(matrix.to(device))
        widened = product.widened(torch.float32, slice(3, 39)).cpu()
        torch.testing.assert_close(widened.double(), weights_of(matrix)[3:39], atol=1e-7, rtol=1e-5)


def test_many_tokens_are_multiplied_with_widened_weights(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_product, "_WIDENED_AT_ONCE", 24 * 128)
    monkeypatch.setattr(grouped_product, "_ALIGNED_OUTPUTS", 8)
    matrix, inputs, bias = integers(80, 128, 5, 32, shifted=True), random(70, 128), random(80, seed=3)
    linear = GpuKernels(DTYPE, device).linear(matrix, bias)
    expected = exact(inputs, matrix) + bias.double()
    check(linear, inputs, expected, tolerance(inputs, matrix) + EPSILON * float(expected.abs().max()), device)


def test_inputs_are_put_in_the_order_of_act_order(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(16, (48, 192), dtype=torch.uint8, generator=generator)
    scales = torch.rand(48, 8, generator=generator).half()
    # Groups of unequal size, as a rank has them that holds some columns of each.
    groups = torch.randint(8, (192,), generator=generator)
    matrix = grouped.sorted_matrix(values, 4, scales, None, groups, 128)
    assert matrix.input_width == 192
    inputs = random(6, 192)
    expected = inputs.double() @ ((values.double() - 8) * scales.double()[:, groups]).t()
    torch.testing.assert_close(exact(inputs, matrix), expected)
    linear = GpuKernels(DTYPE, device).linear(matrix, None)
    check(linear, inputs, expected, tolerance(inputs, matrix), device)


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


@pytest.mark.parametrize("tokens", [2, 20, 40, 70])
@pytest.mark.parametrize("group", [128, 64, 32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_four_bit_integers_are_multiplied_in_tiles_of_all_sizes(
    device: torch.device, tokens: int, group: int, dtype: torch.dtype
) -> None:
    if dtype == torch.bfloat16 and not HAS_GPU:
        pytest.skip("the interpreter multiplies no bfloat16")
    # Neither the outputs nor the tokens fill tiles; the inputs are cut into parts.
    matrix, bias = integers(200, 2048, 4, group, shifted=True), random(200, seed=3).to(dtype)
    inputs = random(tokens, 2048, seed=1).to(dtype)
    product = GpuKernels(dtype, device).linear(matrix.to(device), bias.to(device))
    wanted = inputs.double() @ weights_of(matrix).t() + bias.double()
    got = product(inputs.to(device)).cpu().double()
    assert float((got - wanted).norm() / wanted.norm()) < 2 * torch.finfo(dtype).eps


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
    monkeypatch.setattr(quantised_linear, "library_scales", lambda _matrix: None)
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
    scales = quantised_linear.library_scales(matrix)
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

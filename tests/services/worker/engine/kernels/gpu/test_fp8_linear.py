"""Products in FP8 on the GPU against sums in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.worker.engine.kernels.interface import FollowsNorm, PrecedesProduct
from services.worker.engine.kernels.torch.kernels import gated
from services.worker.engine.model.config import Activation
from services.worker.engine.quantization import fp8
from tests.services.worker.engine.quantization.fp8_bounds import exact_product, within

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from services.worker.engine.kernels.gpu import elementwise, fp8_linear, small_linear
from services.worker.engine.kernels.gpu.fp8_rows import quantise_rows
from services.worker.engine.kernels.gpu.kernels import GpuKernels

# The interpreter multiplies no bfloat16, and devices give products of scaled rows in nothing else.
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
# On both sides of where the library takes over.
TOKENS = (1, small_linear.MOST_TOKENS, small_linear.MOST_TOKENS + 1, 17)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


@pytest.fixture(autouse=True)
def can_multiply(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("this GPU does not multiply FP8")


@pytest.mark.parametrize("width", [16, 200, 5120])
def test_rows_are_quantised_as_the_reference_does(device: torch.device, width: int) -> None:
    rows = random(9, width) * torch.logspace(-3, 3, 9).to(DTYPE)[:, None]
    rows[3] = 0
    # All that FP8 has, and all that is half way between.
    steps = torch.arange(0x7F, dtype=torch.uint8).view(fp8.FP8).float()
    grid = torch.cat([steps, (steps[1:] + steps[:-1]) / 2]).to(DTYPE)
    rows[4, :16], rows[5] = grid[-16:], grid[torch.arange(width) % grid.numel()]
    rows[4, 0] = rows[5, 0] = fp8.LARGEST
    values, scales = quantise_rows(rows.to(device))
    expected_values, expected_scales = fp8.quantise_rows(rows)
    torch.testing.assert_close(scales.cpu(), expected_scales, atol=0, rtol=1e-6)
    same = values.cpu().float() == expected_values.float()
    # A division that is off in its last bit may round the other way, where it is half way between two values.
    assert same.double().mean() > 0.99
    assert same[3:6].all()
    off = (values.cpu().double() * scales.cpu() - rows).abs()
    assert within(off, (expected_values.double() * expected_scales - rows).abs() + rows.double().abs() * 2.0**-20)


def test_non_finite_values_affect_only_their_row_and_zero_rows_are_allowed(device: torch.device) -> None:
    rows = torch.tensor([[1.0, float("nan"), 2.0], [1.0, 2.0, 4.0], [1.0, float("-inf"), 2.0]], dtype=DTYPE)
    values, scales = quantise_rows(rows.to(device))
    product = (values.float() * scales).cpu().sum(dim=-1)
    assert product[0].isnan()
    assert product[1] == 7.0
    assert not product[2].isfinite()
    assert quantise_rows(rows[:0].to(device))[0].shape == (0, 3)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", [208, 1024, 4352])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_quantised_values(device: torch.device, tokens: int, width: int, has_bias: bool) -> None:
    inputs, matrix = random(tokens, width), fp8.quantise(random(32, width, seed=1).float())
    bias, sums = (random(32, seed=3) if has_bias else None), random(tokens, 32, seed=2)
    linear = GpuKernels(DTYPE, device).linear(matrix, bias)
    exact, bound = exact_product(inputs, matrix, bias, DTYPE)
    got = linear(inputs.to(device))
    assert got.dtype == DTYPE
    assert within((got.cpu().double() - exact).abs(), bound)
    added = sums.to(device, copy=True)
    linear.add_to(inputs.to(device), added)
    wanted = sums.double() + exact
    assert within((added.cpu().double() - wanted).abs(), bound + torch.finfo(DTYPE).eps * wanted.abs())


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", [208, 4352])
@pytest.mark.parametrize("activation", Activation)
def test_gated_products_are_those_of_quantised_values(
    device: torch.device, tokens: int, width: int, activation: Activation
) -> None:
    inputs = random(tokens, width) / width**0.5
    matrices = fp8.quantise(random(16, width, seed=1).float()), fp8.quantise(random(16, width, seed=2).float())
    biases = random(16, seed=3), random(16, seed=4)
    got = GpuKernels(DTYPE, device).gated_linear(*matrices, biases, activation)(inputs.to(device))
    gate, up = (exact_product(inputs, *each, DTYPE)[0] for each in zip(matrices, biases, strict=True))
    torch.testing.assert_close(got.cpu().double(), gated(gate, up, activation), atol=3e-2, rtol=3e-2)


def test_quantisation_of_a_token_does_not_depend_on_the_batch(device: torch.device) -> None:
    rows = (random(33, 256) * torch.logspace(-3, 3, 33)[:, None]).to(DTYPE).to(device)
    values, scales = quantise_rows(rows)
    for count in (1, 2, 16):
        some_values, some_scales = quantise_rows(rows[-count:])
        assert torch.equal(some_values.float(), values[-count:].float())
        assert torch.equal(some_scales, scales[-count:])


GIVEN_SCALES = (None, 0.0625)


def scale_of(given: float | None, device: torch.device) -> torch.Tensor | None:
    return None if given is None else torch.tensor([given], device=device)


def assert_same_rows(got: list[torch.Tensor], inputs: torch.Tensor, scale: torch.Tensor | None) -> None:
    for each, expected in zip(got, quantise_rows(inputs, scale), strict=True):
        assert torch.equal(each.float(), expected.float())


@pytest.mark.parametrize("given", GIVEN_SCALES)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("tokens", "width"), [(0, 64), (1, 64), (5, 200), (3, 4096)])
def test_norms_in_fp8_are_those_that_are_quantised_afterwards(
    device: torch.device, tokens: int, width: int, adds: bool, given: float | None
) -> None:
    sums, added, weight = (
        random(*shape, seed=i).to(device) for i, shape in enumerate([(tokens, width)] * 2 + [(width,)])
    )
    expected_sums, scale = sums.clone(), scale_of(given, device)
    if adds:
        expected = elementwise.add_rms_norm(expected_sums, added, weight, 1e-5)
    else:
        expected = elementwise.rms_norm(expected_sums, weight, 1e-5)
    normed, *rows = elementwise.rms_norm_in_fp8(sums, added if adds else None, weight, 1e-5, scale)
    assert torch.equal(normed, expected)
    assert torch.equal(sums, expected_sums)
    assert_same_rows(rows, expected, scale)


@pytest.mark.parametrize("given", GIVEN_SCALES)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize(("tokens", "width"), [(0, 64), (3, 200), (2, 2500)])
def test_gates_in_fp8_are_those_that_are_quantised_afterwards(
    device: torch.device, tokens: int, width: int, activation: Activation, given: float | None
) -> None:
    both, scale = (3 * random(tokens, 2 * width)).to(device), scale_of(given, device)
    result, *rows = elementwise.gate_in_fp8(both, activation, scale)
    assert torch.equal(result, elementwise.gate(both, activation))
    assert_same_rows(rows, result, scale)


@pytest.fixture
def quantised_apart(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Inputs that were quantised by a program of their own, not by the one that computed them."""
    seen: list[torch.Tensor] = []

    def quantise(inputs: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(inputs)
        return quantise_rows(inputs, scale)

    monkeypatch.setattr(fp8_linear, "quantise_rows", quantise)
    return seen


@pytest.mark.parametrize("tokens", TOKENS)
def test_a_product_takes_what_its_norms_have_quantised_and_quantises_anything_else(
    device: torch.device, tokens: int, quantised_apart: list[torch.Tensor]
) -> None:
    kernels, matrix = GpuKernels(DTYPE, device), fp8.quantise(random(32, 64, seed=1).float())
    linear = kernels.linear(matrix, None)
    assert isinstance(linear, FollowsNorm)
    hidden, added = (random(tokens, 64, seed=seed).to(device) for seed in (2, 3))
    weight = random(64, seed=4).to(device)
    expected_sums = hidden.clone()
    expected = kernels.linear(matrix, None)(kernels.add_rms_norm(expected_sums, added, weight, 1e-5))
    quantised_apart.clear()

    normed = linear.norms.add_rms_norm(hidden, added, weight, 1e-5)
    assert torch.equal(hidden, expected_sums)
    assert torch.equal(linear(normed), expected)
    assert not quantised_apart
    # A second time, and a copy that may differ: nothing is known of them.
    other = normed.clone()
    linear.norms.rms_norm(hidden, weight, 1e-5)
    assert torch.equal(linear(other), expected)
    assert torch.equal(linear(normed), expected)
    assert [id(each) for each in quantised_apart] == [id(other), id(normed)]


@pytest.mark.parametrize("given", GIVEN_SCALES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_gated_products_quantise_for_the_product_that_follows_and_only_for_that(
    device: torch.device, tokens: int, given: float | None, quantised_apart: list[torch.Tensor]
) -> None:
    matrices = [fp8.quantise(random(*shape, seed=i).float()) for i, shape in enumerate([(48, 64), (48, 64), (32, 48)])]
    if given is not None:
        matrices = [replace(each, input_scale=torch.tensor([given])) for each in matrices]
    gate, up, down_matrix = matrices
    kernels = GpuKernels(DTYPE, device)
    both, down = kernels.gated_linear(gate, up, None, Activation.SILU), kernels.linear(down_matrix, None)
    inputs = (random(tokens, 64) / 8).to(device)
    expected = down(both(inputs))
    quantised_apart.clear()

    assert isinstance(both, PrecedesProduct)
    prepared = both.preceding(down)
    assert torch.equal(down(prepared(inputs)), expected)
    # Few tokens are gated where they are multiplied.
    assert len(quantised_apart) == (1 if tokens > small_linear.MOST_TOKENS else 2)
    # The product by itself prepares nothing: what it returns may be changed.
    result = both(inputs)
    result *= 2
    assert not torch.equal(down(result), expected)
    assert both.preceding(GpuKernels(DTYPE, device).linear(random(32, 48), None))(inputs).shape == (tokens, 48)

"""Compiled operators against plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.kernels.cpu.kernels import CpuKernels
from services.worker.engine.kernels.torch.kernels import TorchKernels
from services.worker.engine.model.config import Activation

if TYPE_CHECKING:
    from services.worker.engine.kernels.cpu.library import CpuLibrary

CPU = torch.device("cpu")
REFERENCE = TorchKernels(torch.float32, CPU)
# Widths on both sides of whole registers and panels, tokens on both sides of whole tiles.
tokens = st.integers(1, 40)
inputs_width = st.integers(1, 200)
outputs_width = st.integers(1, 200)
seeds = st.integers(0, 2**32)


@given(tokens, inputs_width, outputs_width, seeds, st.booleans(), st.integers(1, 3))
def test_a_product_is_that_of_torch(
    library: CpuLibrary, tokens: int, width_in: int, width_out: int, seed: int, has_bias: bool, threads: int
) -> None:
    torch.manual_seed(seed)
    weight, inputs = torch.randn(width_out, width_in), torch.randn(tokens, width_in)
    bias = torch.randn(width_out) if has_bias else None
    linear = CpuKernels(library, torch.float32, threads).linear(weight, bias)
    expected = REFERENCE.linear(weight, bias)(inputs)
    torch.testing.assert_close(linear(inputs), expected, atol=1e-4, rtol=1e-4)
    sums = torch.randn(tokens, width_out)
    before = sums.clone()
    linear.add_to(inputs, sums)
    torch.testing.assert_close(sums, before + expected, atol=1e-4, rtol=1e-4)


@given(tokens, inputs_width, outputs_width, seeds, st.booleans(), st.sampled_from(Activation))
def test_a_gated_product_is_that_of_torch(
    library: CpuLibrary, tokens: int, width_in: int, width_out: int, seed: int, has_bias: bool,
    activation: Activation,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    threads = 1 + seed % 3
    gate, up, inputs = torch.randn(width_out, width_in), torch.randn(width_out, width_in), torch.randn(tokens, width_in)
    biases = (torch.randn(width_out), torch.randn(width_out)) if has_bias else None
    got = CpuKernels(library, torch.float32, threads).gated_linear(gate, up, biases, activation)(inputs)
    torch.testing.assert_close(got, REFERENCE.gated_linear(gate, up, biases, activation)(inputs), atol=2e-4, rtol=1e-4)


@given(tokens, st.integers(1, 300), seeds)
def test_a_norm_is_that_of_torch(library: CpuLibrary, tokens: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    inputs, weight = torch.randn(tokens, width) * 3, torch.randn(width)
    got = CpuKernels(library, torch.float32, 2).rms_norm(inputs, weight, 1e-5)
    torch.testing.assert_close(got, REFERENCE.rms_norm(inputs, weight, 1e-5), atol=1e-5, rtol=1e-5)
    sums, added = inputs.clone(), torch.randn(tokens, width)
    got = CpuKernels(library, torch.float32, 2).add_rms_norm(sums, added, weight, 1e-5)
    assert torch.equal(sums, inputs + added)
    torch.testing.assert_close(got, REFERENCE.rms_norm(sums, weight, 1e-5), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(tokens, inputs_width, outputs_width, seeds)
def test_smaller_weights_are_only_rounded(
    library: CpuLibrary, dtype: torch.dtype, tokens: int, width_in: int, width_out: int, seed: int
) -> None:
    torch.manual_seed(seed)
    shape = (width_out, 2 * width_in)
    weight, up, inputs = torch.randn(shape), torch.randn(shape), torch.randn(tokens, 2 * width_in)
    kernels = CpuKernels(library, dtype, 2)
    rounded, rounded_up = weight.to(dtype).float(), up.to(dtype).float()
    seen = inputs.bfloat16().float() if dtype == torch.bfloat16 and library.rounds_inputs else inputs
    expected = REFERENCE.linear(rounded, None)(seen)
    torch.testing.assert_close(kernels.linear(weight, None)(inputs), expected, atol=2e-4, rtol=1e-4)
    gated = REFERENCE.gated_linear(rounded, rounded_up, None, Activation.SILU)(seen)
    got = kernels.gated_linear(weight, up, None, Activation.SILU)(inputs)
    torch.testing.assert_close(got, gated, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_that_widen_weights_have_the_bits_of_float32(library: CpuLibrary, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and library.rounds_inputs:
        pytest.skip("this processor multiplies bfloat16, and rounds inputs to it")
    torch.manual_seed(3)
    # More inputs than are widened at a time; tokens for which weights are widened in tiles, and in whole panels.
    gate, up, bias = torch.randn(70, 600).to(dtype), torch.randn(70, 600).to(dtype), torch.randn(70)
    inputs = torch.randn(131, 600)
    narrow, wide = CpuKernels(library, dtype, 2), CpuKernels(library, torch.float32, 2)
    for tokens in (1, 5, 47, 48, 131):
        given_inputs, sums = inputs[:tokens], torch.randn(tokens, 70)
        found, expected = sums.clone(), sums.clone()
        narrow.linear(gate, bias).add_to(given_inputs, found)
        wide.linear(gate.float(), bias).add_to(given_inputs, expected)
        assert torch.equal(found, expected)
        for biases in (None, (bias, -bias)):
            product = narrow.gated_linear(gate, up, biases, Activation.SILU)(given_inputs)
            expected = wide.gated_linear(gate.float(), up.float(), biases, Activation.SILU)(given_inputs)
            assert torch.equal(product, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_token_gets_the_same_bits_in_every_batch(library: CpuLibrary, threads: int, dtype: torch.dtype) -> None:
    linear = CpuKernels(library, dtype, threads).linear(torch.randn(130, 78), torch.randn(130))
    inputs = torch.randn(256, 78)
    together = linear(inputs)
    for count in (1, 2, 7, 8, 9, 40, 47, 48, 64, 65):
        assert torch.equal(linear(inputs[-count:].contiguous()), together[-count:])


@pytest.mark.parametrize("threads", [1, 3])
def test_tokens_whose_inputs_do_not_fit_into_the_cache_get_the_same_bits(library: CpuLibrary, threads: int) -> None:
    kernels = CpuKernels(library, torch.bfloat16, threads)
    generator = torch.Generator().manual_seed(6)
    weight, up, inputs = (torch.randn(rows, 4096, generator=generator) for rows in (100, 100, 333))
    for product in (kernels.linear(weight, None), kernels.gated_linear(weight, up, None, Activation.SILU)):
        together = product(inputs)
        for first, last in ((0, 1), (100, 180), (150, 161), (300, 333)):
            assert torch.equal(product(inputs[first:last].contiguous()), together[first:last])


@pytest.mark.parametrize("width", [32, 64, 94, 600])
def test_sums_of_any_depth_and_number_of_rows_are_complete(library: CpuLibrary, width: int) -> None:
    # Small integers: their products and sums are exact in every order.
    generator = torch.Generator().manual_seed(5)
    weight, inputs = (torch.randint(-8, 9, (rows, width), generator=generator).float() for rows in (100, 83))
    linear = CpuKernels(library, torch.bfloat16, 2).linear(weight, None)
    for tokens in (*range(1, 34), 47, 48, 64, 83):
        assert torch.equal(linear(inputs[:tokens]), inputs[:tokens] @ weight.T)
        sums = torch.ones(tokens, 100)
        linear.add_to(inputs[:tokens], sums)
        assert torch.equal(sums, inputs[:tokens] @ weight.T + 1)


def test_extreme_gates_neither_overflow_nor_vanish(library: CpuLibrary) -> None:
    values = torch.tensor([[-1e4, -104.0, -88.0, -20.0, 0.0, 20.0, 88.0, 1e4]])
    identity = torch.eye(8)
    got = CpuKernels(library, torch.float32, 1).gated_linear(identity, identity, None, Activation.SILU)(values)
    torch.testing.assert_close(got, torch.nn.functional.silu(values) * values, atol=1e-6, rtol=1e-5)

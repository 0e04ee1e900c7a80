"""Products with integers that stay packed, against their widened weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.kernels.cpu.kernels import CpuKernels
from services.worker.engine.kernels.torch.kernels import TorchKernels
from services.worker.engine.model.config import Activation
from services.worker.engine.quantization.grouped import BITS, GroupedMatrix

if TYPE_CHECKING:
    from services.worker.engine.kernels.cpu.library import CpuLibrary

REFERENCE = TorchKernels(torch.float32, torch.device("cpu"))


def matrix(
    outputs: int, groups: int, group: int, bits: int, *, shifted: bool, wide: bool = False, seed: int = 0
) -> GroupedMatrix:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(2**bits, (outputs, groups * group), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(outputs, groups, generator=generator) + 0.5) * 2.0**-bits
    shifts = -scales * torch.rand(outputs, groups, generator=generator) * 2**bits
    dtype = torch.float32 if wide else torch.float16
    return GroupedMatrix(values, bits, scales.to(dtype), shifts.to(dtype) if shifted else None)


@given(
    st.integers(1, 40), st.integers(1, 70), st.sampled_from([(1, 16), (3, 32), (9, 64), (3, 128)]),
    st.sampled_from(BITS), st.booleans(), st.booleans(), st.integers(1, 3), st.integers(0, 2**31),
)  # fmt: skip
def test_products_are_those_of_widened_weights(
    library: CpuLibrary, tokens: int, outputs: int, groups: tuple[int, int], bits: int, shifted: bool, wide: bool,
    threads: int, seed: int,
) -> None:  # fmt: skip
    packed = matrix(outputs, *groups, bits, shifted=shifted, wide=wide, seed=seed)
    inputs, bias = torch.randn(tokens, packed.shape[1]), torch.randn(outputs) if seed % 2 else None
    linear = CpuKernels(library, torch.float32, threads).linear(packed, bias)
    expected = REFERENCE.linear(packed, bias)(inputs)
    torch.testing.assert_close(linear(inputs), expected, atol=2e-4, rtol=1e-4)
    sums = torch.randn(tokens, outputs)
    before = sums.clone()
    linear.add_to(inputs, sums)
    torch.testing.assert_close(sums, before + expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_products_are_those_of_widened_weights(
    library: CpuLibrary, activation: Activation, has_bias: bool
) -> None:
    # Gate and up may be packed differently.
    gate, up = matrix(40, 5, 32, 4, shifted=True), matrix(40, 10, 16, 6, shifted=False, seed=1)
    biases = (torch.randn(40), torch.randn(40)) if has_bias else None
    for tokens in (1, 3, 19):
        inputs = torch.randn(tokens, 160) / 4
        got = CpuKernels(library, torch.float32, 2).gated_linear(gate, up, biases, activation)(inputs)
        wide = REFERENCE.gated_linear(gate.widened(torch.float32), up.widened(torch.float32), biases, activation)
        expected = wide(inputs)
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("bits", BITS)
def test_weights_for_bfloat16_products_are_rounded_as_torch_does(library: CpuLibrary, bits: int) -> None:
    packed = matrix(70, 9, 32, bits, shifted=True)
    kernels, inputs = CpuKernels(library, torch.bfloat16, 2), torch.randn(7, 288)
    if not library.rounds_inputs:
        # They are not rounded: nothing would be gained.
        wide = CpuKernels(library, torch.float32, 2).linear(packed, None)
        assert torch.equal(kernels.linear(packed, None)(inputs), wide(inputs))
        return
    # The same operator multiplies weights that torch has rounded.
    torch.testing.assert_close(
        kernels.linear(packed, None)(inputs), kernels.linear(packed.widened(torch.float32), None)(inputs),
        atol=1e-4, rtol=1e-4,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_token_gets_the_same_bits_in_every_batch(library: CpuLibrary, dtype: torch.dtype, threads: int) -> None:
    linear = CpuKernels(library, dtype, threads).linear(matrix(130, 20, 32, 5, shifted=True), torch.randn(130))
    inputs = torch.randn(41, 640) * torch.logspace(-4, 4, 41)[:, None]
    together = linear(inputs)
    for count in (1, 2, 7, 8, 9, 16, 40):
        assert torch.equal(linear(inputs[-count:].contiguous()), together[-count:])

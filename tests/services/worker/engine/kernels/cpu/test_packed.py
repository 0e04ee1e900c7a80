"""Products with integers that stay packed, against their widened weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.kernels.cpu.build import BuildError, build_library, find_openmp
from services.worker.engine.kernels.cpu.kernels import CpuKernels
from services.worker.engine.kernels.cpu.library import CpuLibrary
from services.worker.engine.kernels.cpu.onednn import find_block_functions
from services.worker.engine.kernels.cpu.prebuilt import VARIANTS, processor_flags
from services.worker.engine.kernels.torch.kernels import TorchKernels
from services.worker.engine.model.config import Activation
from services.worker.engine.quantization.grouped import BITS, E2M1, GroupedMatrix, Numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

AVX2 = next(variant for variant in VARIANTS if variant.name == "avx2")
REFERENCE = TorchKernels(torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module", params=["this processor", "avx2"])
def operators(request: pytest.FixtureRequest, library: CpuLibrary) -> CpuLibrary:
    """Operators for this processor, and for x86-64 without instructions for bfloat16."""
    if request.param == "this processor":
        return library
    if not processor_flags() >= AVX2.needs:
        pytest.skip("this processor cannot run them")
    try:
        return CpuLibrary(build_library(find_openmp(), options=AVX2.options))
    except BuildError as error:
        pytest.skip(f"the CPU operators cannot be compiled here: {error}")


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
    operators: CpuLibrary, tokens: int, outputs: int, groups: tuple[int, int], bits: int, shifted: bool, wide: bool,
    threads: int, seed: int,
) -> None:  # fmt: skip
    packed = matrix(outputs, *groups, bits, shifted=shifted, wide=wide, seed=seed)
    inputs, bias = torch.randn(tokens, packed.shape[1]), torch.randn(outputs) if seed % 2 else None
    linear = CpuKernels(operators, torch.float32, threads).linear(packed, bias)
    expected = REFERENCE.linear(packed, bias)(inputs)
    torch.testing.assert_close(linear(inputs), expected, atol=2e-4, rtol=1e-4)
    sums = torch.randn(tokens, outputs)
    before = sums.clone()
    linear.add_to(inputs, sums)
    torch.testing.assert_close(sums, before + expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_products_are_those_of_widened_weights(
    operators: CpuLibrary, activation: Activation, has_bias: bool
) -> None:
    # Gate and up may be packed differently.
    gate, up = matrix(40, 5, 32, 4, shifted=True), matrix(40, 10, 16, 6, shifted=False, seed=1)
    biases = (torch.randn(40), torch.randn(40)) if has_bias else None
    for tokens in (1, 3, 19):
        inputs = torch.randn(tokens, 160) / 4
        got = CpuKernels(operators, torch.float32, 2).gated_linear(gate, up, biases, activation)(inputs)
        wide = REFERENCE.gated_linear(gate.widened(torch.float32), up.widened(torch.float32), biases, activation)
        expected = wide(inputs)
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)


def test_products_with_bfloat16_inputs_are_exact_to_float32_sums(operators: CpuLibrary) -> None:
    for number, (tokens, packed, bias) in enumerate(bfloat16_products()):
        inputs = torch.randn(tokens, packed.shape[1], generator=torch.Generator().manual_seed(number))
        got = CpuKernels(operators, torch.bfloat16, 1 + number % 3).linear(packed, bias)(inputs)
        seen = inputs.bfloat16().double() if operators.rounds_inputs else inputs.double()
        weights = exact_weights(packed)
        if operators.rounds_inputs and not operators.sums_groups:
            weights = weights.bfloat16().double()
        expected = seen @ weights.T + (0.0 if bias is None else bias.double())
        # Sums of groups are of integers, before they are scaled and shifted.
        size = seen.abs() @ (weights.abs() + exact_shifts(packed).abs()).T
        assert ((got - expected).abs() <= 3e-6 * size + 1e-6).all(), (number, tokens, packed.bits)


def bfloat16_products() -> Iterator[tuple[int, GroupedMatrix, torch.Tensor | None]]:
    """Yield tokens, a matrix and a bias, of all formats and ways to unpack them."""
    for tokens in (1, 2, 3, 4, 5, 6, 7, 8, 13, 24, 25, 64, 65, 70):
        for bits in BITS:
            # Up to 16 or 8 groups are unpacked at a time.
            for group, groups in ((16, 19), (32, 9), (128, 3)):
                outputs = (1, 47, 48, 70, 130)[(tokens + bits + group) % 5]
                shifted, wide = bool((tokens + groups) % 2), tokens % 3 == 0
                bias = torch.randn(outputs) if tokens % 2 else None
                yield tokens, matrix(outputs, groups, group, bits, shifted=shifted, wide=wide, seed=tokens), bias
        yield tokens, fp4_matrix(70, 9), None


def exact_weights(packed: GroupedMatrix) -> torch.Tensor:
    """Return the weights as the format defines them, [out, in] float64."""
    numbers = packed.values.double()
    if packed.numbers is Numbers.E2M1:
        numbers = torch.tensor(E2M1, dtype=torch.float64)[packed.values.int()]
    return numbers * packed.scales.double().repeat_interleave(packed.group, dim=1) + exact_shifts(packed)


def exact_shifts(packed: GroupedMatrix) -> torch.Tensor:
    if packed.numbers is Numbers.E2M1:
        return torch.zeros(packed.values.shape, dtype=torch.float64)
    return packed.explicit_shifts().double().repeat_interleave(packed.group, dim=1)


def fp4_matrix(outputs: int, groups: int) -> GroupedMatrix:
    generator = torch.Generator().manual_seed(outputs)
    values = torch.randint(16, (outputs, 32 * groups), dtype=torch.uint8, generator=generator)
    scales = torch.randint(-6, 3, (outputs, groups), generator=generator)
    return GroupedMatrix(values, 4, torch.exp2(scales.float()).half(), None, numbers=Numbers.E2M1)


@pytest.mark.parametrize("bits", [*BITS, "fp4"])
def test_weights_for_onednns_products_are_rounded_as_torch_does(library: CpuLibrary, bits: int | str) -> None:
    blocks = find_block_functions()
    if blocks is None or not library.has_blocks(blocks, torch.bfloat16):
        pytest.skip("oneDNN has no products of blocks with bfloat16 weights here")
    packed = fp4_matrix(70, 9) if isinstance(bits, str) else matrix(70, 9, 32, bits, shifted=bits > 5)
    kernels = CpuKernels(library, torch.bfloat16, 2, blocks)
    for tokens in (1, 7, 70):
        inputs = torch.randn(tokens, 288)
        # The same product with weights that torch has rounded.
        expected = kernels.linear(packed.widened(torch.float32), None)(inputs)
        torch.testing.assert_close(kernels.linear(packed, None)(inputs), expected, atol=1e-5, rtol=1e-5)


# Batches on both sides of every number of tokens from which on a format is unpacked in another way.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [*BITS, "fp4"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_token_gets_the_same_bits_in_every_batch(
    operators: CpuLibrary, dtype: torch.dtype, bits: int | str, threads: int
) -> None:
    packed = fp4_matrix(130, 20) if isinstance(bits, str) else matrix(130, 20, 32, bits, shifted=bits != 6)
    kernels = CpuKernels(operators, dtype, threads)
    linear = kernels.linear(packed, torch.randn(130))
    gated = kernels.gated_linear(packed, matrix(130, 40, 16, 6, shifted=True), None, Activation.SILU)
    inputs = torch.randn(71, 640) * torch.logspace(-4, 4, 71)[:, None]
    together, together_gated = linear(inputs), gated(inputs)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 24, 25, 40, 64, 65):
        part = inputs[-count:].contiguous()
        assert torch.equal(linear(part), together[-count:]), count
        assert torch.equal(gated(part), together_gated[-count:]), count

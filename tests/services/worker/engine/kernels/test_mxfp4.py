"""MXFP4 against `transformers`' own dequantisation, and products of all kernels with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from common.errors import ConfigurationError
from services.worker.engine.kernels.cpu.kernels import CpuKernels, CpuLinear
from services.worker.engine.kernels.torch.kernels import TorchKernels
from services.worker.engine.model.config import Activation
from services.worker.engine.quantization.grouped import Numbers
from services.worker.engine.quantization.mxfp4 import mxfp4_matrix, quantise, read_mxfp4

if TYPE_CHECKING:
    from services.worker.engine.kernels.cpu.library import CpuLibrary
    from services.worker.engine.quantization.grouped import GroupedMatrix

CPU = torch.device("cpu")
REFERENCE = TorchKernels(torch.float32, CPU)


def stored(outputs: int, inputs: int, exponents: tuple[int, int] = (110, 130)) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random blocks [out, in / 32, 16] and scales [out, in / 32]."""
    generator = torch.Generator().manual_seed(outputs)
    blocks = torch.randint(256, (outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(*exponents, (outputs, inputs // 32), generator=generator).to(torch.uint8)
    return blocks, scales


def matrix_of(
    blocks: torch.Tensor, scales: torch.Tensor, rows: slice | None = None, columns: slice | None = None
) -> GroupedMatrix:
    def read(name: str, rows: slice | None, columns: slice | None) -> torch.Tensor:
        return {"m.blocks": blocks, "m.scales": scales}[name][rows, columns]

    shape = blocks.shape[0], blocks.shape[1] * 32
    return read_mxfp4(read, "m", shape, rows or slice(0, shape[0]), columns or slice(0, shape[1]), CPU)


def dequantised(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return one expert as `transformers` dequantises it, [out, in]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    # mypy sees no types in transformers.
    wide: torch.Tensor = convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)
    return wide[0].t()


@pytest.mark.parametrize("exponents", [(110, 130), (0, 255), (60, 61), (254, 255)])
def test_weights_are_those_of_transformers_number_for_number(exponents: tuple[int, int]) -> None:
    blocks, scales = stored(37, 96, exponents)
    matrix = matrix_of(blocks, scales)
    assert matrix.numbers is Numbers.E2M1
    expected = dequantised(blocks, scales, torch.float32)
    assert torch.equal(matrix.widened(torch.float32), expected)
    if exponents[1] < 254:  # bfloat16 ends where float32 does, but its table is rounded before scales are applied
        assert torch.equal(matrix.widened(torch.bfloat16), dequantised(blocks, scales, torch.bfloat16))


def test_parts_are_parts_of_the_whole() -> None:
    blocks, scales = stored(40, 128)
    whole = dequantised(blocks, scales, torch.float32)
    part = matrix_of(blocks, scales, slice(8, 24), slice(32, 96))
    assert torch.equal(part.widened(torch.float32), whole[8:24, 32:96])
    assert torch.equal(matrix_of(blocks, scales).columns(slice(32, 96)).widened(torch.float32), whole[:, 32:96])


def test_scales_take_two_bytes_where_float16_has_them_and_four_elsewhere() -> None:
    assert matrix_of(*stored(8, 64)).scales.dtype == torch.float16
    assert matrix_of(*stored(8, 64, (60, 61))).scales.dtype == torch.float32


def test_scales_that_are_no_numbers_are_refused() -> None:
    blocks, scales = stored(8, 64)
    scales[3, 1] = 255
    with pytest.raises(ConfigurationError, match="matrix 'm' has scales that are no numbers"):
        matrix_of(blocks, scales)


def test_tensors_of_other_shapes_are_refused() -> None:
    blocks, scales = stored(8, 64)
    with pytest.raises(
        ConfigurationError, match=r"scales of torch\.uint8 and the shape \(8, 1\) where bytes in the shape"
    ):
        matrix_of(blocks, scales[:, :1])
    with pytest.raises(ConfigurationError, match=r"blocks of torch\.float32"):
        matrix_of(blocks.float(), scales)


def test_quantised_weights_are_the_nearest_numbers() -> None:
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 24)[:, None]
    weight[5] = 0.0
    matrix = quantise(weight)
    got = matrix.widened(torch.float32)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat((magnitudes, -magnitudes)) * matrix.scales.float().repeat_interleave(32, dim=1)[..., None]
    assert torch.equal((got - weight).abs(), (numbers - weight[..., None]).abs().amin(dim=-1))
    # Scales are the largest with which no value is cut off by more than rounding.
    largest = weight.view(24, 3, 32).abs().amax(dim=2)
    assert (largest[largest > 0] / matrix.scales.float()[largest > 0] >= 4).all()
    assert (largest[largest > 0] / matrix.scales.float()[largest > 0] < 8).all()


@pytest.mark.parametrize("exponents", [(120, 128), (60, 61)])
@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_compiled_products_are_those_of_widened_weights(
    library: CpuLibrary, tokens: int, exponents: tuple[int, int]
) -> None:
    blocks, scales = stored(77, 288, exponents)
    wide, inputs, bias = dequantised(blocks, scales, torch.float32), torch.randn(tokens, 288), torch.randn(77)
    size = 2.0 ** (exponents[1] - 127)
    linear = CpuKernels(library, torch.float32, 2).linear(matrix_of(blocks, scales), bias * size)
    assert isinstance(linear, CpuLinear)
    assert linear.matrix.scales is not None
    held = linear.matrix.panels.nbytes + linear.matrix.scales.nbytes
    rows = linear.matrix.panels.shape[0] * library.panel
    assert held == rows * 288 * (4.5 if exponents[0] == 120 else 5) / 8
    got = linear(inputs)
    torch.testing.assert_close(got / size, (inputs @ wide.t()) / size + bias, atol=1e-3, rtol=1e-4)


def test_compiled_gated_products_are_those_of_widened_weights(library: CpuLibrary) -> None:
    gate, up = (mxfp4_matrix(torch.randint(16, (50, 96)).to(torch.uint8), torch.full((50, 3), 125)) for _ in range(2))
    biases, inputs = (torch.randn(50), torch.randn(50)), torch.randn(7, 96) / 4
    got = CpuKernels(library, torch.float32, 2).gated_linear(gate, up, biases, Activation.CLAMPED_SWIGLU)(inputs)
    expected = REFERENCE.gated_linear(gate, up, biases, Activation.CLAMPED_SWIGLU)(inputs)
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)

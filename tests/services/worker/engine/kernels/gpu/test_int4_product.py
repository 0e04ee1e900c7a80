"""Products with four-bit integers that become weights in registers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from services.worker.engine.quantization import grouped

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from services.worker.engine.kernels.gpu import int4_product
from services.worker.engine.kernels.gpu.kernels import GpuKernels
from tests.services.worker.engine.kernels.gpu.matrices import DTYPE, HAS_GPU, integers, random, weights_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.worker.engine.quantization.grouped import GroupedMatrix


def _with_zero_points(outputs: int, width: int, group: int) -> GroupedMatrix:
    return grouped.quantise(random(outputs, width, seed=4).float() / width**0.5, 4, group, has_zero_points=True)


# Without offsets, with integers that are subtracted, and with numbers that are added to what is scaled.
KINDS: dict[str, Callable[[int, int, int], GroupedMatrix]] = {
    "symmetric": lambda outputs, width, group: integers(outputs, width, 4, group, shifted=False),
    "zero points": _with_zero_points,
    "shifts": lambda outputs, width, group: integers(outputs, width, 4, group, shifted=True),
}


@pytest.mark.parametrize("tokens", [2, 12, 20, 40, 70, 140])
@pytest.mark.parametrize(
    ("kind", "group"), [("symmetric", 32), ("zero points", 128), ("zero points", 16), ("shifts", 64)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_four_bit_integers_are_multiplied_in_tiles_of_all_sizes(
    device: torch.device, tokens: int, kind: str, group: int, dtype: torch.dtype
) -> None:
    if dtype == torch.bfloat16 and not HAS_GPU:
        pytest.skip("the interpreter multiplies no bfloat16")
    # Neither the outputs nor the tokens fill tiles; the inputs are cut into parts, or slices that do not divide them.
    for width in (1024, 640):
        matrix, bias = KINDS[kind](72, width, group), random(72, seed=3).to(dtype)
        inputs = random(tokens, width, seed=1).to(dtype)
        product = GpuKernels(dtype, device).linear(matrix.to(device), bias.to(device))
        wanted = inputs.double() @ weights_of(matrix).t() + bias.double()
        got = product(inputs.to(device)).cpu().double()
        # Besides the outputs, weights and scales are rounded to the inputs' type: each by a quarter of this on average.
        assert float((got - wanted).norm() / wanted.norm()) < torch.finfo(dtype).eps


@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_rounded_once_after_their_scale(device: torch.device, kind: str, group: int) -> None:
    matrix = KINDS[kind](40, 256, group)
    widened = int4_product.Int4Product(matrix.to(device), DTYPE).widened(DTYPE, slice(16, 39)).cpu()
    scales = matrix.scales.to(DTYPE).double().repeat_interleave(group, dim=1)
    if kind == "shifts":
        shifts = (matrix.explicit_shifts().float() + 8 * matrix.scales.float()).to(DTYPE)
        wanted = (matrix.values.double() - 8) * scales + shifts.double().repeat_interleave(group, dim=1)
    else:
        ratios = matrix.explicit_shifts().double() / matrix.scales.double()
        wanted = (matrix.values.double() + ratios.round().repeat_interleave(group, dim=1)) * scales
    torch.testing.assert_close(widened, wanted.to(DTYPE)[16:39], atol=0, rtol=0)


def test_scales_that_the_type_cannot_hold_are_not_rounded_to_it(device: torch.device) -> None:
    matrix = integers(32, 128, 4, 32, shifted=False)
    assert int4_product.fits(matrix, DTYPE)
    small = replace(matrix, scales=torch.full_like(matrix.scales, 1e-6))
    assert not int4_product.fits(small, torch.float16)
    inputs = random(3, 128)
    got = GpuKernels(torch.float16, device).linear(small, None)(inputs.to(device, torch.float16)).cpu().double()
    wanted = inputs.to(torch.float16).double() @ weights_of(small).t()
    assert float((got - wanted).abs().max()) < 1e-7

"""Products with four-bit integers that are not converted to floating point."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from services.worker.engine.kernels.gpu.kernels import GpuKernels
from tests.services.worker.engine.kernels.gpu.matrices import HAS_GPU, integers, random, weights_of


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

"""Norms, gating and products of the GPU against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from services.worker.engine.kernels.torch.kernels import gated, rms_norm
from services.worker.engine.model.config import Activation

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from services.worker.engine.kernels.gpu.kernels import GpuKernels

HAS_GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if HAS_GPU else torch.float16


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    error = (got.cpu().double() - expected.double()).norm() / expected.double().norm()
    assert float(error) < 1e-2


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("width", [200, 1024])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_any_size(device: torch.device, tokens: int, width: int, has_bias: bool) -> None:
    kernels = GpuKernels(DTYPE, device)
    inputs, weight, sums = random(tokens, width), random(300, width, seed=1), random(tokens, 300, seed=2)
    bias = random(300, seed=3) if has_bias else None
    expected = linear(inputs.double(), weight.double(), bias.double() if bias is not None else None)
    product = kernels.linear(weight, bias)
    close(product(inputs.to(device)), expected)
    added = sums.to(device, copy=True)
    product.add_to(inputs.to(device), added)
    close(added, sums.double() + expected)


@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", Activation)
def test_gated_products(device: torch.device, tokens: int, has_bias: bool, activation: Activation) -> None:
    inputs, gate, up = random(tokens, 200), random(96, 200, seed=1), random(96, 200, seed=2)
    biases = (random(96, seed=3), random(96, seed=4)) if has_bias else None
    wide = [
        linear(inputs.double(), weight.double(), bias.double() if bias is not None else None)
        for weight, bias in zip((gate, up), biases or (None, None), strict=True)
    ]
    got = GpuKernels(DTYPE, device).gated_linear(gate, up, biases, activation)(inputs.to(device))
    close(got, gated(wide[0], wide[1], activation))


@pytest.mark.parametrize("width", [48, 1000, 5120])
def test_norms(device: torch.device, width: int) -> None:
    inputs, weight = random(7, width) * 3, random(width, seed=1)
    got = GpuKernels(DTYPE, device).rms_norm(inputs.to(device), weight.to(device), 1e-6)
    torch.testing.assert_close(got.cpu(), rms_norm(inputs, weight, 1e-6), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("width", [48, 5120])
@pytest.mark.parametrize("tokens", [3, 100])
@pytest.mark.parametrize("is_strided", [False, True])
def test_norms_of_sums(device: torch.device, tokens: int, width: int, is_strided: bool) -> None:
    sums, weight = random(tokens, width) * 3, random(width, seed=1)
    added = random(tokens, 2 * width, seed=2)[:, :width] if is_strided else random(tokens, width, seed=2)
    expected = sums + added
    on_device = sums.to(device)
    got = GpuKernels(DTYPE, device).add_rms_norm(on_device, added.to(device), weight.to(device), 1e-6)
    assert torch.equal(on_device.cpu(), expected)
    torch.testing.assert_close(got.cpu(), rms_norm(expected, weight, 1e-6), atol=2e-2, rtol=2e-2)

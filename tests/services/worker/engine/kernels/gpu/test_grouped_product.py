"""Products with packed integers: how they are unpacked, widened weights, and orders of inputs."""

from __future__ import annotations

import pytest
import torch

from services.worker.engine.quantization import grouped

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from services.worker.engine.kernels.gpu import grouped_product
from services.worker.engine.kernels.gpu.kernels import GpuKernels
from tests.services.worker.engine.kernels.gpu.matrices import (
    DTYPE,
    EPSILON,
    check,
    exact,
    integers,
    random,
    tolerance,
    weights_of,
)


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

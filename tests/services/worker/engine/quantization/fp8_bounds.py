"""How far products of FP8 values may be off."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from services.worker.engine.quantization.fp8 import quantise_rows

if TYPE_CHECKING:
    from services.worker.engine.quantization.fp8 import Fp8Matrix

# Half a step of three bits of mantissa, and of the smallest numbers; a division may be off by two units in float32.
_RELATIVE, _ABSOLUTE, _DIVISION = 2.0**-4, 2.0**-10, 2.0**-21


def rounding_bound(exact: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return how far values may be from `exact` when they are quantised with `scales`, which spread over its rows."""
    wide = exact.double().abs()
    return torch.maximum(wide * _RELATIVE, scales.double() * _ABSOLUTE) + wide * _DIVISION


def widened(matrix: Fp8Matrix) -> torch.Tensor:
    """Return the matrix with its scales applied, in float32."""
    return matrix.values.float() * matrix.scales[:, None]


def exact_product(
    inputs: torch.Tensor, matrix: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product of quantised inputs in float64, and how far one that is summed in float32 may be off.

    It is rounded to `dtype` once as a sum, and once or twice when it is scaled and the bias is added. Hopper's matrix
    units keep some 14 bits of sums of FP8 products, of up to 128 (DeepSeek-V3 technical report, section 3.3.2).
    """
    values, scales = quantise_rows(inputs)
    lhs, rhs = values.double(), matrix.values.double()
    both_scales = scales.double() * matrix.scales.double()
    product = lhs @ rhs.t() * both_scales
    largest = lhs.abs() @ rhs.abs().t() * both_scales
    exact = product if bias is None else product + bias.double()
    rounding = torch.finfo(dtype).eps
    summing = max(inputs.shape[1] * torch.finfo(torch.float32).eps, 2.0**-11)
    bound = largest * summing + 2 * rounding * (product.abs() + exact.abs())
    if bias is not None:
        bound = bound + rounding * bias.double().abs()
    return exact, bound


def within(error: torch.Tensor, bound: torch.Tensor) -> bool:
    """Whether no error is above its bound."""
    return bool((error <= bound).all())

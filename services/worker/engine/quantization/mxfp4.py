"""Matrices in MXFP4 (OCP Microscaling Formats 1.0): FP4 (e2m1) numbers, scaled by a power of two for each 32 inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.errors import ConfigurationError
from services.worker.engine.quantization.formats import MXFP4_BLOCK
from services.worker.engine.quantization.grouped import GroupedMatrix, Numbers, narrowed

if TYPE_CHECKING:
    from collections.abc import Callable

# Of exponents, which are stored as bytes (e8m0). The last byte is not a number.
_BIAS, _NOT_A_NUMBER = 127, 255
# The exponent of the largest e2m1 number, 6 = 1.5 * 2^2.
_LARGEST_EXPONENT = 2


def mxfp4_matrix(codes: torch.Tensor, exponents: torch.Tensor) -> GroupedMatrix:
    """Return the matrix of `codes` [out, in] uint8, numbers of `E2M1`, and biased exponents [out, in / 32] uint8."""
    scales = torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.int() - _BIAS)
    return narrowed(GroupedMatrix(codes, 4, scales, None, numbers=Numbers.E2M1))


def read_mxfp4(
    read: Callable[[str, slice | None, slice | None], torch.Tensor], stem: str, shape: tuple[int, int], rows: slice,
    columns: slice, device: torch.device,
) -> GroupedMatrix:  # fmt: skip
    """Return a block of the matrix `stem`, which has the `shape` [out, in] as a whole.

    Args:
        read: returns rows and columns of a stored tensor.
        stem: the matrix's name without `.weight`. Its `blocks` [out, in / 32, 16] have two numbers in a byte, that of
            the even input in the lower bits; its `scales` are [out, in / 32].
        shape: of the whole matrix.
        rows: outputs.
        columns: inputs, whole blocks of 32.
        device: where numbers are unpacked.

    Raises:
        ConfigurationError: a tensor is missing or has another shape, or a scale is not a number.
    """
    groups = slice(columns.start // MXFP4_BLOCK, columns.stop // MXFP4_BLOCK)
    blocks, exponents = (read(f"{stem}.{part}", rows, groups) for part in ("blocks", "scales"))
    height, count = rows.stop - rows.start, groups.stop - groups.start
    for part, tensor, expected in (
        ("blocks", blocks, (height, count, MXFP4_BLOCK // 2)),
        ("scales", exponents, (height, count)),
    ):
        if tuple(tensor.shape) != expected or tensor.dtype != torch.uint8 or shape[1] % MXFP4_BLOCK:
            raise ConfigurationError(
                f"matrix {stem!r} has {part} of {tensor.dtype} and the shape {tuple(tensor.shape)} where bytes in the "
                f"shape {expected} belong"
            )
    if bool((exponents == _NOT_A_NUMBER).any()):
        raise ConfigurationError(f"matrix {stem!r} has scales that are no numbers")
    blocks = blocks.to(device)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).reshape(height, -1)
    return mxfp4_matrix(codes, exponents.to(device))


def quantise(weight: torch.Tensor) -> GroupedMatrix:
    """Return a matrix [out, in] rounded to nearest, by the specification's choice of scales (section 6.3)."""
    outputs, inputs = weight.shape
    blocks = weight.float().view(outputs, -1, MXFP4_BLOCK)
    largest = blocks.abs().amax(dim=2)
    # frexp's exponents are those of numbers below 1.
    exponents = torch.where(largest > 0, torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT, -_BIAS)
    exponents = exponents.clamp(-_BIAS, _BIAS)
    magnitudes = blocks.abs() * torch.ldexp(torch.ones_like(largest), -exponents)[:, :, None]
    # Codes grow with magnitudes in steps of 1/2 up to 2, of 1 up to 4, and of 2 beyond; ties go to even mantissas.
    places = torch.minimum(torch.minimum(2 * magnitudes, magnitudes + 2), magnitudes / 2 + 4)
    codes = places.round_().clamp_(max=7).to(torch.uint8) | ((blocks < 0).to(torch.uint8) << 3)
    return mxfp4_matrix(codes.view(outputs, inputs), (exponents + _BIAS).to(torch.uint8))

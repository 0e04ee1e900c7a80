"""Rotation of queries and keys by given angles, as encoders of pictures need it, in one Triton program."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch


@triton.jit
def _rotate(
    qkv, cosines, sines, width,
    HEADS: tl.constexpr, HALF: tl.constexpr, HEAD_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    patch = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    columns = tl.arange(0, HALF_BLOCK)
    in_half = columns < HALF
    inside = (heads < HEADS)[:, None] & in_half[None, :]
    cosine = tl.load(cosines + patch * HALF + columns, mask=in_half, other=0.0)[None, :]
    sine = tl.load(sines + patch * HALF + columns, mask=in_half, other=0.0)[None, :]
    places = qkv + patch * width + heads[:, None] * (2 * HALF) + columns[None, :]
    first = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=inside, other=0.0).to(tl.float32)
    element = qkv.dtype.element_ty
    tl.store(places, (first * cosine - second * sine).to(element), mask=inside)
    tl.store(places + HALF, (second * cosine + first * sine).to(element), mask=inside)


def rotate(qkv: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """Do what `patches.rotate` says; `qkv`, `cosines` and `sines` are contiguous."""
    patches, width = qkv.shape
    half = cosines.shape[1]
    # Queries, then keys: a third of the columns each.
    heads = 2 * width // 3 // (2 * half)
    block = min(triton.next_power_of_2(heads), 16)
    if patches:
        _rotate[(patches, triton.cdiv(heads, block))](
            qkv, cosines, sines, width,
            HEADS=heads, HALF=half, HEAD_BLOCK=block, HALF_BLOCK=triton.next_power_of_2(half), num_warps=4,
        )  # fmt: skip

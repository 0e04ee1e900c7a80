"""Quantises matrices to GGUF's blocks, each matrix to the kind that llama.cpp's own tool chooses.

The library `gguf` quantises to all kinds but the k-quants, for which this follows ggml-quants.c: `make_qkx2_quants` for
Q4_K and `make_qx_quants` for Q6_K, without an importance matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

MIXTURE = "Q4_K_M"
# After the name of a kind: embedding and head are of `_OUTSIDE`, as in llama.cpp's MXFP4_MOE.
LAYERS = " layers"
_OUTSIDE = Kind.Q8_0
_BLOCK = 256
# Rows of other widths than multiples of 256 are of these kinds instead.
_FALLBACKS = {Kind.Q4_K: Kind.Q5_0, Kind.Q6_K: Kind.Q8_0}
# Matrices of which some layers get more bits in the mixture.
_SENSITIVE = ("attn_v", "ffn_down")


def kind_of(mixture: str, name: str, columns: int, layers: int, *, is_tied: bool) -> Kind:
    """Return the kind of a matrix's blocks.

    Args:
        mixture: `Q4_K_M`, the name of a kind for all matrices, or this and `LAYERS`.
        name: its name in the file.
        columns: weights of a row.
        layers: of the model.
        is_tied: whether the embedding is also the head.
    """
    if mixture != MIXTURE:
        is_outside = mixture.endswith(LAYERS) and not name.startswith("blk.")
        return _OUTSIDE if is_outside else Kind[mixture.removesuffix(LAYERS)]
    is_head = name == "output.weight" or (is_tied and name == "token_embd.weight")
    part = name.split(".")
    is_wider = len(part) > 2 and part[2] in _SENSITIVE and _gets_more_bits(int(part[1]), layers)
    kind = Kind.Q6_K if is_head or is_wider else Kind.Q4_K
    return kind if columns % _BLOCK == 0 else _FALLBACKS[kind]


def _gets_more_bits(layer: int, layers: int) -> bool:
    """Whether it is one of the first and last eighth, or of every third one between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def quantise(values: Floats, kind: Kind) -> NDArray[np.uint8]:
    """Return the blocks of `values` [..., columns] as bytes [..., bytes of a row]."""
    if kind not in (Kind.Q4_K, Kind.Q6_K):
        blocks: NDArray[np.uint8] = quantize(values, kind)
        return blocks
    parts = values.reshape(-1, _BLOCK).astype(np.float32)
    packed = _q4_k(parts) if kind is Kind.Q4_K else _q6_k(parts)
    return packed.reshape(*values.shape[:-1], -1)


def _q4_k(blocks: Floats) -> NDArray[np.uint8]:
    """Return blocks of eight groups of 32 integers from 0 to 15, scaled and shifted, as bytes [blocks, 144]."""
    groups = blocks.reshape(-1, 8, 32)
    scales, minima = _scales_and_minima(groups, 15)
    steps, scale_ids = _six_bits(scales)
    shift_steps, shift_ids = _six_bits(minima)
    width = steps.astype(np.float32)[:, None] * scale_ids
    shift = shift_steps.astype(np.float32)[:, None] * shift_ids
    integers = np.rint(_divided(groups + shift[..., None], width[..., None])).clip(0, 15).astype(np.uint8)
    header = np.zeros((len(blocks), 12), np.uint8)
    header[:, :4] = scale_ids[:, :4] | (scale_ids[:, 4:] >> 4 << 6)
    header[:, 4:8] = shift_ids[:, :4] | (shift_ids[:, 4:] >> 4 << 6)
    header[:, 8:] = (scale_ids[:, 4:] & 15) | ((shift_ids[:, 4:] & 15) << 4)
    pairs = integers.reshape(-1, 4, 2, 32)
    nibbles = pairs[:, :, 0] | (pairs[:, :, 1] << 4)
    return np.concatenate([_bytes(steps), _bytes(shift_steps), header, nibbles.reshape(len(blocks), -1)], axis=1)


def _scales_and_minima(groups: Floats, most: int) -> tuple[Floats, Floats]:
    """Return those of each group that give the least weighted square error (`make_qkx2_quants`)."""
    weights = np.sqrt((groups**2).mean(axis=-1, keepdims=True)) + np.abs(groups)
    low, high = np.minimum(groups.min(axis=-1), 0), groups.max(axis=-1)
    span = high - low
    scale, minimum = span / most, low
    integers = np.rint(_divided(groups - low[..., None], scale[..., None])).clip(0, most)
    error = (weights * (scale[..., None] * integers + minimum[..., None] - groups) ** 2).sum(axis=-1)
    total, first = weights.sum(axis=-1), (weights * groups).sum(axis=-1)
    for step in range(21):
        factor = _divided(np.full_like(span, most - 1 + 0.1 * step), span)
        tried = np.rint(factor[..., None] * (groups - low[..., None])).clip(0, most)
        linear, square = (weights * tried).sum(axis=-1), (weights * tried**2).sum(axis=-1)
        product = (weights * tried * groups).sum(axis=-1)
        determinant = total * square - linear**2
        new_scale = _divided(total * product - first * linear, determinant)
        new_minimum = _divided(square * first - linear * product, determinant)
        is_positive = new_minimum > 0
        new_scale = np.where(is_positive, _divided(product, square), new_scale)
        new_minimum = np.where(is_positive, 0, new_minimum)
        new_error = (weights * (new_scale[..., None] * tried + new_minimum[..., None] - groups) ** 2).sum(axis=-1)
        is_better = (determinant > 0) & (new_error < error)
        scale, minimum = np.where(is_better, new_scale, scale), np.where(is_better, new_minimum, minimum)
        error = np.where(is_better, new_error, error)
    return scale, -minimum


def _six_bits(values: Floats) -> tuple[NDArray[np.float16], NDArray[np.uint8]]:
    """Return a step for each block, and its multiples from 0 to 63 that are nearest to `values` [blocks, groups]."""
    largest = values.max(axis=-1, keepdims=True)
    ids = np.rint(_divided(63 * values, largest)).clip(0, 63).astype(np.uint8)
    return (largest[:, 0] / 63).astype(np.float16), ids


def _q6_k(blocks: Floats) -> NDArray[np.uint8]:
    """Return blocks of 16 groups of 16 integers from -32 to 31, scaled, as bytes [blocks, 210]."""
    groups = blocks.reshape(-1, 16, 16)
    scales = _symmetric_scales(groups, 32)
    largest = np.take_along_axis(scales, np.abs(scales).argmax(axis=-1)[:, None], axis=-1)
    ids = np.rint(_divided(-128 * scales, largest)).clip(-128, 127).astype(np.int8)
    steps = (largest[:, 0] / -128).astype(np.float16)
    width = steps.astype(np.float32)[:, None] * ids
    integers = (np.rint(_divided(groups, width[..., None])).clip(-32, 31) + 32).astype(np.uint8)
    quarters = integers.reshape(-1, 2, 4, 32)
    lower = np.concatenate(
        [(quarters[:, :, i] & 15) | ((quarters[:, :, i + 2] & 15) << 4) for i in range(2)], axis=-1
    ).reshape(len(blocks), -1)
    upper = sum((quarters[:, :, i] >> 4) << np.uint8(2 * i) for i in range(4)).reshape(len(blocks), -1)  # type: ignore[union-attr]  # an array
    return np.concatenate([lower, upper, ids.view(np.uint8), _bytes(steps)], axis=1)


def _symmetric_scales(groups: Floats, most: int) -> Floats:
    """Return those of each group with the least error weighted by squares, of 19 ways to round (`make_qx_quants`)."""
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(axis=-1)[..., None], axis=-1)
    weights = groups**2
    best, scale = np.zeros(groups.shape[:-1], np.float32), np.zeros(groups.shape[:-1], np.float32)
    for step in (0, *range(-9, 0), *range(1, 10)):
        factor = _divided(np.full_like(extreme, -(most + 0.1 * step)), extreme)
        tried = np.rint(factor * groups).clip(-most, most - 1)
        product, square = (weights * groups * tried).sum(axis=-1), (weights * tried**2).sum(axis=-1)
        fit = _divided(product**2, square)
        is_better = (square > 0) & (fit > best)
        scale, best = np.where(is_better, _divided(product, square), scale), np.where(is_better, fit, best)
    return scale


def _divided(numerator: Floats, denominator: Floats) -> Floats:
    """Return the quotients, 0 where the denominator is."""
    shape = np.broadcast_shapes(numerator.shape, denominator.shape)
    return np.divide(numerator, denominator, out=np.zeros(shape, np.float32), where=denominator != 0)


def _bytes(halves: NDArray[np.float16]) -> NDArray[np.uint8]:
    return halves[:, None].view(np.uint8)

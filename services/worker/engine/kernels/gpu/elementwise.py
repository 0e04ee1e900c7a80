"""Norms, rotation and gating as Triton programs: each reads its input once and writes its output once.

Where products in FP8 follow, norms and gates write their output in FP8, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from services.worker.engine.kernels.gpu.dependent_launch import follow, launch_options
from services.worker.engine.kernels.gpu.fp8_rows import LIMITS, empty_rows, in_fp8
from services.worker.engine.model.config import Activation

if TYPE_CHECKING:
    from services.worker.engine.kernels.interface import AttentionShape, KvLayer, QkNorm
    from services.worker.engine.model.batch import ForwardBatch

# Heads that one program of `rotate_and_store` works on, and its warps: few tokens are spread out, many are bundled.
_SPREAD, _BUNDLED = (4, 1), (16, 4)
_MANY_TOKENS = 512
_GATE_BLOCK = 1024
# Most outputs of a token that one program gates and quantises together.
WIDEST_GATED_ROW = 16384
ACTIVATIONS = {Activation.SILU: 0, Activation.GELU_TANH: 1, Activation.CLAMPED_SWIGLU: 2}


@triton.jit
def _rms_norm(
    inputs, added, weight, outputs, epsilon, given_scale, values, scales,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, QUANTISES: tl.constexpr, IS_GIVEN: tl.constexpr,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Normalise a row; QUANTISES: write it in FP8, too."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    factors = tl.load(weight + columns, mask=inside, other=0.0)
    if OVERLAPS:
        follow()
    wide = tl.load(inputs + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        wide += tl.load(added + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        total = wide.to(inputs.dtype.element_ty)
        tl.store(inputs + row * WIDTH + columns, total, mask=inside)
        # The norm is that of the stored values.
        wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + epsilon)
    normed = ((wide * scale).to(weight.dtype.element_ty) * factors).to(outputs.dtype.element_ty)
    tl.store(outputs + row * WIDTH + columns, normed, mask=inside)
    if QUANTISES:
        grid, row_scale = in_fp8(
            normed.to(tl.float32), given_scale, LARGEST=LARGEST, SMALLEST=SMALLEST, IS_GIVEN=IS_GIVEN
        )
        tl.store(values + row * WIDTH + columns, grid.to(values.dtype.element_ty), mask=inside)
        tl.store(scales + row, row_scale)


@triton.jit
def gated(gate, up, ELEMENT: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return the gated product of both, which are float32, by a number of `ACTIVATIONS`; float32.

    It is rounded to ELEMENT where the reference rounds.
    """
    if ACTIVATION == 2:
        # Not a number stays so.
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return (gate / (1.0 + tl.exp(-1.702 * gate))) * (up + 1.0)
    u = gate
    if ACTIVATION == 1:
        # GELU's approximation by a hyperbolic tangent is gate * sigmoid(u).
        u = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return (gate / (1.0 + tl.exp(-u))).to(ELEMENT).to(tl.float32) * up


@triton.jit
def _gate(
    both, outputs, width, given_scale, values, scales,
    BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, QUANTISES: tl.constexpr, IS_GIVEN: tl.constexpr,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Gate BLOCK outputs of a row; QUANTISES: write them in FP8, too, all of a row's unless IS_GIVEN."""
    if OVERLAPS:
        follow()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(both + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    element = outputs.dtype.element_ty
    product = gated(gate, up, ELEMENT=element, ACTIVATION=ACTIVATION).to(element)
    tl.store(outputs + row * width + columns, product, mask=inside)
    if QUANTISES:
        grid, scale = in_fp8(product.to(tl.float32), given_scale, LARGEST=LARGEST, SMALLEST=SMALLEST, IS_GIVEN=IS_GIVEN)
        tl.store(values + row * width + columns, grid.to(values.dtype.element_ty), mask=inside)
        tl.store(scales + row, scale)


@triton.jit
def to_float8(numbers, scales):
    """Return numbers divided by scales, limited to the range of e4m3 and rounded."""
    # A division that rounds as the reference's does.
    scaled = tl.div_rn(numbers.to(tl.float32), scales)
    # Not a number stays so: comparisons with it are false.
    limited = tl.where(scaled > 448.0, 448.0, tl.where(scaled < -448.0, -448.0, scaled))
    # Rounded to nearest even here, so that conversions are exact: Triton's interpreter rounds otherwise. Numbers below
    # 2^-6 are multiples of 2^-9, others have three bits after the first.
    bits = limited.to(tl.int32, bitcast=True)
    wide = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
    # Adding a large number rounds; a zero keeps its sign.
    small = (limited + 24576.0 - 24576.0).to(tl.int32, bitcast=True) | ((bits >> 31) << 31)
    rounded = tl.where(tl.abs(limited) < 0.015625, small, wide).to(tl.float32, bitcast=True)
    return tl.where(limited == limited, rounded, limited).to(tl.float8e4nv)


@triton.jit(do_not_specialize_on_alignment=["positions", "write_slots"])
def _rotate_and_store(
    qkv, keys, values, key_scales, value_scales, angles, positions, write_slots, query_norm, key_norm, epsilon,
    stride_page, stride_head, stride_token,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    NORMED: tl.constexpr, SCALED: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        follow()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, HALF)
    in_half = columns < HEAD_DIM // 2
    inside = (heads < QUERY_HEADS + 2 * KV_HEADS)[:, None] & in_half[None, :]
    is_query = heads < QUERY_HEADS
    is_value = heads >= QUERY_HEADS + KV_HEADS
    places = qkv + token * (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM + heads[:, None] * HEAD_DIM + columns[None, :]
    raw_first = tl.load(places, mask=inside, other=0.0)
    raw_second = tl.load(places + HEAD_DIM // 2, mask=inside, other=0.0)
    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    if NORMED:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + epsilon)[:, None]
        query_first = tl.load(query_norm + columns, mask=in_half, other=0.0)
        query_second = tl.load(query_norm + HEAD_DIM // 2 + columns, mask=in_half, other=0.0)
        key_first = tl.load(key_norm + columns, mask=in_half, other=0.0)
        key_second = tl.load(key_norm + HEAD_DIM // 2 + columns, mask=in_half, other=0.0)
        factors_first = tl.where(is_query[:, None], query_first[None, :], key_first[None, :])
        factors_second = tl.where(is_query[:, None], query_second[None, :], key_second[None, :])
        # Rounded where the reference rounds.
        first = ((first * scale).to(query_norm.dtype.element_ty) * factors_first).to(tl.float32)
        second = ((second * scale).to(query_norm.dtype.element_ty) * factors_second).to(tl.float32)
    angle = angles + tl.load(positions + token) * HEAD_DIM + columns
    cosines = tl.load(angle, mask=in_half, other=0.0)[None, :]
    sines = tl.load(angle + HEAD_DIM // 2, mask=in_half, other=0.0)[None, :]
    turned_first = (first * cosines - second * sines).to(qkv.dtype.element_ty)
    turned_second = (second * cosines + first * sines).to(qkv.dtype.element_ty)
    tl.store(places, turned_first, mask=inside & is_query[:, None])
    tl.store(places + HEAD_DIM // 2, turned_second, mask=inside & is_query[:, None])
    slot = tl.load(write_slots + token)
    kv_head = tl.where(is_value, heads - QUERY_HEADS - KV_HEADS, heads - QUERY_HEADS)
    page = (slot // PAGE_SIZE) * stride_page + (slot % PAGE_SIZE) * stride_token
    target = page + kv_head[:, None] * stride_head + columns[None, :]
    is_key = (heads >= QUERY_HEADS) & (heads < QUERY_HEADS + KV_HEADS)
    if SCALED:
        of_keys = tl.load(key_scales + kv_head, mask=is_key, other=1.0)[:, None]
        of_values = tl.load(value_scales + kv_head, mask=is_value & (kv_head < KV_HEADS), other=1.0)[:, None]
        new_first, new_second = to_float8(turned_first, of_keys), to_float8(turned_second, of_keys)
        value_first, value_second = to_float8(raw_first, of_values), to_float8(raw_second, of_values)
    else:
        element = keys.dtype.element_ty
        new_first, new_second = turned_first.to(element), turned_second.to(element)
        value_first, value_second = raw_first.to(element), raw_second.to(element)
    tl.store(keys + target, new_first, mask=inside & is_key[:, None])
    tl.store(keys + target + HEAD_DIM // 2, new_second, mask=inside & is_key[:, None])
    tl.store(values + target, value_first, mask=inside & is_value[:, None])
    tl.store(values + target + HEAD_DIM // 2, value_second, mask=inside & is_value[:, None])


def rms_norm(inputs: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return inputs [tokens, width] / sqrt(mean of squares + epsilon) * weight [width]."""
    inputs = inputs.contiguous()
    outputs = torch.empty_like(inputs)
    _normalise(inputs, None, weight, outputs, epsilon)
    return outputs


def add_rms_norm(sums: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Add `added` to `sums`, both [tokens, width] and contiguous, in place; return the norm of the sums."""
    outputs = torch.empty_like(sums)
    _normalise(sums, added, weight, outputs, epsilon)
    return outputs


def rms_norm_in_fp8(
    inputs: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, epsilon: float, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the norm of inputs [tokens, width], and that in FP8 with its scales, as `quantise_rows` would.

    `added`, if given, is added to inputs first, in place; both are contiguous. `scale` [1] is that of all rows.
    """
    inputs = inputs.contiguous()
    outputs = torch.empty_like(inputs)
    values, scales = empty_rows(outputs)
    _normalise(inputs, added, weight, outputs, epsilon, _Quantised(scale, values, scales))
    return outputs, values, scales


def gate(both: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return the gated product of both[:, :width] and both[:, width:], [tokens, width], of both [tokens, 2 width]."""
    outputs = both.new_empty(both.shape[0], both.shape[1] // 2)
    _multiply_gate(both, activation, outputs, _GATE_BLOCK)
    return outputs


def gate_in_fp8(
    both: torch.Tensor, activation: Activation, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the result of `gate`, and that in FP8 with its scales, as `quantise_rows` would.

    Without a `scale` [1] of all rows, width is at most WIDEST_GATED_ROW.
    """
    outputs = both.new_empty(both.shape[0], both.shape[1] // 2)
    values, scales = empty_rows(outputs)
    block = triton.next_power_of_2(outputs.shape[1]) if scale is None else _GATE_BLOCK
    _multiply_gate(both, activation, outputs, block, _Quantised(scale, values, scales))
    return outputs, values, scales


class _Quantised(NamedTuple):
    """Tensors that a program takes and writes beside its outputs."""

    scale: torch.Tensor | None  # [1] float32, of all rows
    values: torch.Tensor  # [tokens, width] FP8
    scales: torch.Tensor  # [tokens, 1] float32


def _normalise(
    inputs: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, outputs: torch.Tensor, epsilon: float,
    quantised: _Quantised | None = None,
) -> None:  # fmt: skip
    tokens, width = inputs.shape
    if tokens:
        block = triton.next_power_of_2(width)
        _rms_norm[(tokens,)](
            inputs, inputs if added is None else added, weight, outputs, epsilon, *_parameters(quantised, outputs),
            WIDTH=width, BLOCK=block, ADDS=added is not None, num_warps=min(max(block // 512, 1), 8),
            **_constants(quantised), **launch_options(tokens),
        )  # fmt: skip


def _multiply_gate(
    both: torch.Tensor, activation: Activation, outputs: torch.Tensor, block: int, quantised: _Quantised | None = None
) -> None:
    tokens, width = outputs.shape
    if tokens:
        _gate[(tokens, triton.cdiv(width, block))](
            both, outputs, width, *_parameters(quantised, outputs),
            BLOCK=block, ACTIVATION=ACTIVATIONS[activation], num_warps=min(max(block // 1024, 4), 16),
            **_constants(quantised), **launch_options(tokens),
        )  # fmt: skip


def _parameters(quantised: _Quantised | None, unused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if quantised is None:
        return unused, unused, unused
    scale, values, scales = quantised
    return scales if scale is None else scale, values, scales


def _constants(quantised: _Quantised | None) -> dict[str, float | bool]:
    is_given = quantised is not None and quantised.scale is not None
    return {"QUANTISES": quantised is not None, "IS_GIVEN": is_given, **LIMITS}


def rotate_and_store(
    qkv: torch.Tensor, layer: KvLayer, norms: QkNorm | None, batch: ForwardBatch, shape: AttentionShape,
    angles: torch.Tensor, *, is_ordered: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Normalise and rotate queries in place, store rotated keys and values; return the queries, a view of `qkv`.

    Args:
        qkv: [tokens, (query_heads + 2 kv_heads) * head_dim], contiguous.
        layer: keys and values [pages, kv_heads, page_size, head_dim].
        norms: of queries and keys, if the model has them.
        batch: says where tokens are and go.
        shape: of the heads.
        angles: [positions, head_dim] float32, cosines then sines.
        is_ordered: heads are normalised with the same order of sums for any number of tokens.
    """
    tokens = qkv.shape[0]
    heads = shape.query_heads + 2 * shape.kv_heads
    stride_page, stride_head, stride_token, _ = layer.keys.stride()
    scales = (angles, angles) if layer.scales is None else (layer.scales.keys, layer.scales.values)
    if tokens:
        heads_at_once, warps = _BUNDLED if tokens >= _MANY_TOKENS and not is_ordered else _SPREAD
        _rotate_and_store[(tokens, triton.cdiv(heads, heads_at_once))](
            qkv, layer.keys, layer.values, *scales, angles, batch.positions, batch.write_slots,
            norms.query if norms else qkv, norms.key if norms else qkv, norms.epsilon if norms else 0.0,
            stride_page, stride_head, stride_token,
            QUERY_HEADS=shape.query_heads, KV_HEADS=shape.kv_heads, HEAD_DIM=shape.head_dim,
            PAGE_SIZE=shape.page_size, NORMED=norms is not None, SCALED=layer.scales is not None,
            HEADS=heads_at_once,
            HALF=triton.next_power_of_2(shape.head_dim // 2), num_warps=warps, **launch_options(tokens),
        )  # fmt: skip
    return qkv[:, : shape.query_width]

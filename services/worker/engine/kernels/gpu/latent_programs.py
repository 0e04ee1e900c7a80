"""Triton programs of latent attention: storing a token's row, and attention of queries over rows.

The rows of the KV pool are keys and values at once, so each is loaded once for both products, by programs that have
several heads: all heads share the rows. Nothing is planned on the host: see `decode_attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from services.worker.engine.kernels.gpu.dependent_launch import follow, launch_options

if TYPE_CHECKING:
    from services.worker.engine.kernels.interface import AttentionShape, KvLayer
    from services.worker.engine.model.batch import ForwardBatch

_LOG2_E = 1.4426950408889634
# The smallest side of matrices that tensor cores multiply.
_LEAST_SIDE = 16
_MOST_PARTS = 16
# Heads that one program of `rotate_and_store` works on.
_HEADS_AT_ONCE = 8


@triton.jit(do_not_specialize_on_alignment=["positions", "write_slots"])
def _rotate_and_store(
    projected, pool, angles, positions, write_slots, stride_page, stride_token,
    HEADS: tl.constexpr, LATENT: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        follow()
    token = tl.program_id(0).to(tl.int64)
    # The row comes after the heads.
    heads = tl.program_id(1) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, HALF)
    in_half = columns < ROTARY // 2
    inside = (heads <= HEADS)[:, None] & in_half[None, :]
    of_token = projected + token * (HEADS + 1) * (LATENT + ROTARY)
    places = of_token + heads[:, None] * (LATENT + ROTARY) + LATENT + columns[None, :]
    first = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(places + ROTARY // 2, mask=inside, other=0.0).to(tl.float32)
    angle = angles + tl.load(positions + token) * ROTARY + columns
    cosines = tl.load(angle, mask=in_half, other=0.0)[None, :]
    sines = tl.load(angle + ROTARY // 2, mask=in_half, other=0.0)[None, :]
    turned_first = (first * cosines - second * sines).to(projected.dtype.element_ty)
    turned_second = (second * cosines + first * sines).to(projected.dtype.element_ty)
    is_row = (heads == HEADS)[:, None]
    tl.store(places, turned_first, mask=inside & ~is_row)
    tl.store(places + ROTARY // 2, turned_second, mask=inside & ~is_row)
    slot = tl.load(write_slots + token)
    element = pool.dtype.element_ty
    row = pool + (slot // PAGE_SIZE) * stride_page + (slot % PAGE_SIZE) * stride_token
    target = row + LATENT + heads[:, None] * 0 + columns[None, :]
    tl.store(target, turned_first.to(element), mask=inside & is_row)
    tl.store(target + ROTARY // 2, turned_second.to(element), mask=inside & is_row)
    if tl.program_id(1) == HEADS // TILE:
        latent = tl.arange(0, WIDTH)
        in_latent = latent < LATENT
        values = tl.load(of_token + HEADS * (LATENT + ROTARY) + latent, mask=in_latent, other=0.0)
        tl.store(row + latent, values.to(element), mask=in_latent)


@triton.jit
def _cut(length, PARTS: tl.constexpr, BLOCK: tl.constexpr, LEAST_PART: tl.constexpr):
    """Return the number of keys of a part, and the number of parts."""
    share = tl.maximum(tl.cdiv(tl.cdiv(length, PARTS), BLOCK) * BLOCK, LEAST_PART)
    return share, tl.cdiv(length, share)


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["page_table", "rows", "lengths"])
def _attend(
    queries, pool, outputs, page_table, rows, lengths, partial, weights,
    scale, stride_query, stride_page, stride_token, stride_table,
    HEADS: tl.constexpr, TILE: tl.constexpr, LATENT: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr,
    ROTARY_WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    LEAST_PART: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        follow()
    index = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    length = tl.load(lengths + index)
    table = page_table + tl.load(rows + index).to(tl.int64) * stride_table
    share, parts = _cut(length, PARTS=PARTS, BLOCK=BLOCK, LEAST_PART=LEAST_PART)
    if part < parts:
        heads = tl.program_id(0) * TILE + tl.arange(0, TILE)
        in_heads = (heads < HEADS)[:, None]
        latent = tl.arange(0, WIDTH)
        in_latent = (latent < LATENT)[None, :]
        turned = tl.arange(0, ROTARY_WIDTH)
        in_turned = (turned < ROTARY)[None, :]
        element = pool.dtype.element_ty
        of_heads = queries + index * stride_query + heads[:, None] * (LATENT + ROTARY)
        query = tl.load(of_heads + latent[None, :], mask=in_heads & in_latent, other=0.0).to(element)
        turned_query = tl.load(of_heads + LATENT + turned[None, :], mask=in_heads & in_turned, other=0.0).to(element)
        largest = tl.full([TILE], -float("inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        sums = tl.zeros([TILE, WIDTH], tl.float32)
        start = part * share
        end = tl.minimum(start + share, length)
        steps = tl.arange(0, BLOCK)
        for at in range(start, end, BLOCK):
            tokens = at + steps
            inside = tokens < end
            page = tl.load(table + tokens // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
            place = pool + (page * stride_page + (tokens % PAGE_SIZE) * stride_token)[:, None]
            values = tl.load(place + latent[None, :], mask=inside[:, None] & in_latent, other=0.0)
            keys = tl.load(place + LATENT + turned[None, :], mask=inside[:, None] & in_turned, other=0.0)
            scores = (tl.dot(query, tl.trans(values)) + tl.dot(turned_query, tl.trans(keys))) * scale
            scores = tl.where(inside[None, :], scores, -float("inf"))
            larger = tl.maximum(largest, tl.max(scores, axis=1))
            # Exponentials to base 2: `scale` contains log2(e).
            shrink = tl.exp2(largest - larger)
            shares = tl.exp2(scores - larger[:, None])
            total = total * shrink + tl.sum(shares, axis=1)
            sums = sums * shrink[:, None] + tl.dot(shares.to(element), values)
            largest = larger
        mine = in_heads & in_latent
        if PARTS == 1:
            target = outputs + (index * HEADS + heads)[:, None] * LATENT + latent[None, :]
            tl.store(target, (sums / total[:, None]).to(outputs.dtype.element_ty), mask=mine)
        else:
            cells = (index * PARTS + part) * HEADS + heads
            tl.store(partial + cells[:, None] * LATENT + latent[None, :], sums, mask=mine)
            tl.store(weights + cells * 2, largest, mask=heads < HEADS)
            tl.store(weights + cells * 2 + 1, total, mask=heads < HEADS)


@triton.jit(do_not_specialize_on_alignment=["lengths"])
def _merge(
    outputs, lengths, partial, weights,
    HEADS: tl.constexpr, LATENT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    LEAST_PART: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        follow()
    head = tl.program_id(0)
    index = tl.program_id(1).to(tl.int64)
    _, parts = _cut(tl.load(lengths + index), PARTS=PARTS, BLOCK=BLOCK, LEAST_PART=LEAST_PART)
    latent = tl.arange(0, WIDTH)
    in_latent = latent < LATENT
    others = tl.arange(0, PARTS)
    is_there = others < parts
    cells = (index * PARTS + others) * HEADS + head
    peaks = tl.load(weights + cells * 2, mask=is_there, other=-float("inf"))
    masses = tl.load(weights + cells * 2 + 1, mask=is_there, other=0.0)
    found = tl.load(
        partial + cells[:, None] * LATENT + latent[None, :], mask=is_there[:, None] & in_latent[None, :], other=0.0
    )
    shares = tl.exp2(peaks - tl.max(peaks, axis=0))
    merged = tl.sum(found * shares[:, None], axis=0) / tl.sum(masses * shares, axis=0)
    target = outputs + (index * HEADS + head) * LATENT + latent
    tl.store(target, merged.to(outputs.dtype.element_ty), mask=in_latent)


def rotate_and_store(
    projected: torch.Tensor, layer: KvLayer, batch: ForwardBatch, shape: AttentionShape, angles: torch.Tensor
) -> torch.Tensor:
    """Rotate queries in place, store the rotated row; return the queries, a view of `projected`.

    Args:
        projected: [tokens, (query_heads + 1) * head_dim], contiguous.
        layer: rows [pages, page_size, 1, head_dim].
        batch: says where tokens are and go.
        shape: of the heads.
        angles: [positions, rotated] float32, cosines then sines.
    """
    tokens, heads = projected.shape[0], shape.query_heads
    if tokens:
        rotary = shape.head_dim - shape.value_dim
        _rotate_and_store[(tokens, triton.cdiv(heads + 1, _HEADS_AT_ONCE))](
            projected, layer.keys, angles, batch.positions, batch.write_slots, *layer.keys.stride()[:2],
            HEADS=heads, LATENT=shape.value_dim, WIDTH=triton.next_power_of_2(shape.value_dim), ROTARY=rotary,
            HALF=triton.next_power_of_2(rotary // 2), PAGE_SIZE=shape.page_size, TILE=_HEADS_AT_ONCE, num_warps=2,
            **launch_options(tokens),
        )  # fmt: skip
    return projected[:, : shape.query_width]


@dataclass(frozen=True, slots=True)
class LatentTuning:
    """Division of the work: heads of a program, keys per inner step, warps, stages, and keys that are worth a part."""

    heads: int = 16
    block: int = 32
    warps: int = 4
    stages: int = 2
    least_part: int = 128
    programs: int = 132 * 2
    """Programs that keep the device busy; tokens are cut into parts until there are so many."""


class LatentRowAttention:
    """Attention of single queries, each over the first rows of a sequence, with memory for those cut into parts."""

    def __init__(self, shape: AttentionShape, device: torch.device, tuning: LatentTuning | None = None) -> None:
        """Serve heads of `shape`; there may be any number of queries."""
        self.tuning = tuning or LatentTuning()
        self._shape = shape
        self._tiles = triton.cdiv(shape.query_heads, self.tuning.heads)
        # Only few queries are cut, so that there are never more cells than heads of so many programs.
        cells = self.tuning.programs * self.tuning.heads
        self._partial = torch.zeros(cells * shape.value_dim, dtype=torch.float32, device=device)
        self._weights = torch.zeros(cells * 2, dtype=torch.float32, device=device)

    def parts_of(self, tokens: int) -> int:
        """Return into how many parts each of `tokens` queries is cut at most: a power of two."""
        wanted = self.tuning.programs // (tokens * self._tiles)
        return min(1 << max(wanted.bit_length() - 1, 0), _MOST_PARTS) if wanted > 1 else 1

    def __call__(
        self, queries: torch.Tensor, outputs: torch.Tensor, layer: KvLayer, page_table: torch.Tensor,
        rows: torch.Tensor, lengths: torch.Tensor,
    ) -> None:  # fmt: skip
        """Fill `outputs` [tokens, query_heads * value_dim], contiguous.

        Args:
            queries: [tokens, query_heads * head_dim], rows may be strided.
            outputs: see above.
            layer: rows [pages, page_size, 1, head_dim].
            page_table: [slots, pages] int32, rows may be strided.
            rows: [tokens] int32, the table's row of each query.
            lengths: [tokens] int32, keys that each query sees.
        """
        shape, tuning, tokens = self._shape, self.tuning, queries.shape[0]
        if not tokens:
            return
        parts, rotary = self.parts_of(tokens), shape.head_dim - shape.value_dim
        sizes = {
            "HEADS": shape.query_heads, "LATENT": shape.value_dim,
            "WIDTH": max(triton.next_power_of_2(shape.value_dim), _LEAST_SIDE),
            "BLOCK": tuning.block, "PARTS": parts, "LEAST_PART": tuning.least_part,
        }  # fmt: skip
        _attend[(self._tiles, tokens, parts)](
            queries, layer.keys, outputs, page_table, rows, lengths, self._partial, self._weights,
            shape.scale * _LOG2_E, queries.stride(0), *layer.keys.stride()[:2], page_table.stride(0),
            TILE=tuning.heads, ROTARY=rotary, ROTARY_WIDTH=max(triton.next_power_of_2(rotary), _LEAST_SIDE),
            PAGE_SIZE=shape.page_size, num_warps=tuning.warps, num_stages=tuning.stages, **sizes,
            **launch_options(tokens),
        )  # fmt: skip
        if parts > 1:
            _merge[(shape.query_heads, tokens)](
                outputs, lengths, self._partial, self._weights, num_warps=4, **sizes, **launch_options(tokens)
            )

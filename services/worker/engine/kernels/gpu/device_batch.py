"""Programs over the rows' state on the device; `execution/device_batch.py` describes its columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

# Columns of the state. A float is stored by its bits.
LENGTH = tl.constexpr(0)
LAST_TOKEN = tl.constexpr(1)
SEED_LOW = tl.constexpr(2)
SEED_HIGH = tl.constexpr(3)
TEMPERATURE = tl.constexpr(4)
TOP_K = tl.constexpr(5)
TOP_P = tl.constexpr(6)
MIN_P = tl.constexpr(7)
# Bits of `sampling/table.py`'s `Needs`; 0 in the padding line.
NEEDS = tl.constexpr(8)
REPETITION_PENALTY = tl.constexpr(9)
PRESENCE_PENALTY = tl.constexpr(10)
FREQUENCY_PENALTY = tl.constexpr(11)
# The length from which on stop ids count.
STOPS_FROM = tl.constexpr(12)
# Added to a token's place in its row to get its position for rotary embedding.
POSITION_OFFSET = tl.constexpr(13)
# A power of two, so that page tables begin where lines of memory do.
PAGES = tl.constexpr(16)

_BLOCK = 256


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["places", "values"])
def _scatter(cells, places, values, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    place = tl.load(places + at, mask=inside, other=0)
    tl.store(cells + place, tl.load(values + at, mask=inside, other=0), mask=inside)


@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["slots", "token_ids", "positions", "lengths", "write_slots"],
)
def _prepare(
    cells, slots, token_ids, positions, lengths, write_slots, count, stride, PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = cells + tl.load(slots + at, mask=inside, other=0).to(tl.int64) * stride
    length = tl.load(row + LENGTH, mask=inside, other=1)
    position = length - 1
    page = tl.load(row + PAGES + position // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
    tl.store(token_ids + at, tl.load(row + LAST_TOKEN, mask=inside, other=0).to(tl.int64), mask=inside)
    offset = tl.load(row + POSITION_OFFSET, mask=inside, other=0)
    tl.store(positions + at, (position + offset).to(tl.int64), mask=inside)
    tl.store(lengths + at, length, mask=inside)
    tl.store(write_slots + at, page * PAGE_SIZE + position % PAGE_SIZE, mask=inside)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots", "lengths", "write_slots"])
def _place(table, slots, lengths, write_slots, count, stride, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = table + tl.load(slots + at, mask=inside, other=0).to(tl.int64) * stride
    position = tl.load(lengths + at, mask=inside, other=1) - 1
    page = tl.load(row + position // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
    tl.store(write_slots + at, page * PAGE_SIZE + position % PAGE_SIZE, mask=inside)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots", "token_ids"])
def _append(cells, slots, token_ids, count, stride, padding_slot, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + at, mask=at < count, other=0)
    # Padding rows do not change: one token long, on the padding page.
    inside = (at < count) & (slot != padding_slot)
    row = cells + slot.to(tl.int64) * stride
    tl.store(row + LENGTH, tl.load(row + LENGTH, mask=inside, other=0) + 1, mask=inside)
    tl.store(row + LAST_TOKEN, tl.load(token_ids + at, mask=inside, other=0), mask=inside)


def scatter(cells: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    """Set cells[places[i]] = values[i]; `places` int32 into the flat state, each at most once, `values` int32."""
    count = places.shape[0]
    _scatter[(triton.cdiv(count, _BLOCK),)](cells, places, values, count, BLOCK=_BLOCK, num_warps=4)


def prepare(
    cells: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor,
    lengths: torch.Tensor, write_slots: torch.Tensor, page_size: int,
) -> None:  # fmt: skip
    """Fill the input of a decode pass of rows `slots` [rows] int32 from the state.

    Args:
        cells: [slots, columns] int32.
        slots: who takes part.
        token_ids: [rows] int64, each row's last token.
        positions: [rows] int64, that token's position for rotary embedding.
        lengths: [rows] int32, keys that it sees.
        write_slots: [rows] int64, where its KV goes.
        page_size: tokens per page.
    """
    count = slots.shape[0]
    _prepare[(triton.cdiv(count, _BLOCK),)](
        cells, slots, token_ids, positions, lengths, write_slots, count, cells.stride(0), PAGE_SIZE=page_size,
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


def place(
    table: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, write_slots: torch.Tensor, page_size: int
) -> None:
    """Fill `write_slots` [rows] int64, where KV of rows `slots` goes by another page table [slots, pages] int32."""
    count = slots.shape[0]
    _place[(triton.cdiv(count, _BLOCK),)](
        table, slots, lengths, write_slots, count, table.stride(0), PAGE_SIZE=page_size, BLOCK=_BLOCK, num_warps=4
    )


def append(cells: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Give each of `slots` its sampled token; the last slot of the state is padding and ignored."""
    count = slots.shape[0]
    _append[(triton.cdiv(count, _BLOCK),)](
        cells, slots, token_ids, count, cells.stride(0), cells.shape[0] - 1, BLOCK=_BLOCK, num_warps=4
    )

"""Products of tokens with the low-rank factors of the adapters in their slots, in tiles of tokens with one adapter.

Factors are found by addresses in a table on the device, and the tokens of each adapter are sorted there, too. So the
same launches serve any adapters of any ranks, which is what CUDA graphs need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Sequence

# Columns of a table's line: the address of `a` and its rows, then five of each part: the address of `b`, the first
# output and the number of outputs, the first of the rows of `a` and their number. All are 0 where nothing is changed.
HEAD = tl.constexpr(2)
OF_PART = tl.constexpr(5)

# Up to so many tokens, tiles are the smallest that tensor cores take, and several programs share a token's inputs.
_FEW_TOKENS = 256
_FEW_ROWS, _MANY_ROWS = 16, 64
# With more than a few tiles, these occupy the device, and fewer shares have to be added up.
_FEW_TILES = 8
_LEAST_SHARE, _MOST_SHARES, _SOME_SHARES = 512, 16, 4
_DEPTH = 128
_RANKS = 32
_FEW_COLUMNS, _MANY_COLUMNS = 64, 128
# Registers of a thread, so that four programs instead of two run on a multiprocessor: they wait for memory mostly.
_REGISTERS = 128


@dataclass(frozen=True, slots=True)
class TokenTiles:
    """The tokens of a pass in tiles of those with one adapter; how many there are follows from the tokens' number."""

    order: torch.Tensor  # [tokens] int64, by slot
    tiles: torch.Tensor  # [tiles, 3] int32: slot, first and stop in `order`; first = stop where a tile is not used
    rows: int
    """Most tokens of a tile."""

    @classmethod
    def of(cls, slots: torch.Tensor, count: int) -> TokenTiles:
        """Sort tokens [tokens] int32 with slots below `count`, or below 0 for none, without waiting for the device."""
        tokens, device = slots.shape[0], slots.device
        rows = _FEW_ROWS if tokens <= _FEW_TOKENS else _MANY_ROWS
        every = torch.arange(count, dtype=torch.int32, device=device)
        sizes = (slots[None, :] == every[:, None]).sum(1)
        # Tokens without an adapter come first.
        stops = tokens - sizes.sum() + sizes.cumsum(0)
        tiles = (sizes + rows - 1) // rows
        ends = tiles.cumsum(0)
        number = torch.arange(min(tokens, tokens // rows + min(tokens, count)), device=device)
        slot = torch.searchsorted(ends, number, right=True)
        is_used = slot < count
        slot = slot.clamp(max=count - 1)
        first = stops[slot] - sizes[slot] + (number - ends[slot] + tiles[slot]) * rows
        stop = torch.minimum(first + rows, stops[slot])
        places = torch.stack((slot, first, stop), dim=1) * is_used[:, None]
        return cls(slots.sort(stable=True).indices, places.to(torch.int32), rows)


def table_line(a: torch.Tensor, parts: Sequence[tuple[int, slice, torch.Tensor]], columns: int) -> list[int]:
    """Return a table's line of `columns` for `a` [ranks, in] and parts: first output, ranks, and `b` [ranks, out]."""
    line = [a.data_ptr(), a.shape[0]]
    for first, ranks, b in parts:
        line += [b.data_ptr(), first, b.shape[1], ranks.start, ranks.stop - ranks.start]
    return line + [0] * (columns - len(line))


@triton.jit(do_not_specialize=["count", "most_ranks"])
def _shrink(
    inputs, order, tiles, table, partial, count, most_ranks, width, stride_token_in,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, DEPTH: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Write the products of a share of the inputs of a tile's tokens with `a`, to partial[share, place, rank]."""
    tile = tiles + tl.program_id(0) * 3
    share = tl.program_id(1)
    first = tl.load(tile + 1)
    stop = tl.load(tile + 2)
    line = table + tl.load(tile).to(tl.int64) * COLUMNS
    a = tl.load(line).to(tl.pointer_type(inputs.dtype.element_ty))
    a = tl.multiple_of(a, 16)
    ranks = tl.load(line + 1)
    at = first + tl.arange(0, ROWS)
    inside = at < stop
    token = tl.load(order + at, mask=inside, other=0)
    if stop > first:
        for rank in range(0, ranks, RANKS):
            rows = rank + tl.arange(0, RANKS)
            sums = tl.zeros([ROWS, RANKS], tl.float32)
            for depth in range(share * SHARE, min(share * SHARE + SHARE, width), DEPTH):
                columns = depth + tl.arange(0, DEPTH)
                given = tl.load(
                    inputs + token[:, None] * stride_token_in + columns[None, :],
                    mask=inside[:, None] & (columns < width)[None, :], other=0.0,
                )  # fmt: skip
                factor = tl.load(
                    a + rows[:, None] * width + columns[None, :],
                    mask=(rows < ranks)[:, None] & (columns < width)[None, :], other=0.0,
                )  # fmt: skip
                sums = tl.dot(given, tl.trans(factor), sums, input_precision="ieee")
            target = partial + (share * count + at).to(tl.int64)[:, None] * most_ranks + rows[None, :]
            tl.store(target, sums, mask=inside[:, None] & (rows < ranks)[None, :])


@triton.jit(do_not_specialize=["most_ranks"], do_not_specialize_on_alignment=["token_ids"])
def _look_up(
    token_ids, order, tiles, table, partial, outputs, most_ranks,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Write the lines of `a` [vocabulary, ranks] of a tile's tokens, to partial[0, place, rank]."""
    tile = tiles + tl.program_id(0) * 3
    first = tl.load(tile + 1)
    stop = tl.load(tile + 2)
    line = table + tl.load(tile).to(tl.int64) * COLUMNS
    a = tl.load(line).to(tl.pointer_type(outputs.dtype.element_ty))
    ranks = tl.load(line + HEAD + 4)
    at = first + tl.arange(0, ROWS)
    inside = at < stop
    token = tl.load(order + at, mask=inside, other=0)
    token_id = tl.load(token_ids + token, mask=inside, other=0)
    if stop > first:
        for rank in range(0, ranks, RANKS):
            rows = rank + tl.arange(0, RANKS)
            mask = inside[:, None] & (rows < ranks)[None, :]
            found = tl.load(a + token_id[:, None] * ranks + rows[None, :], mask=mask, other=0.0)
            target = partial + at.to(tl.int64)[:, None] * most_ranks + rows[None, :]
            tl.store(target, found.to(tl.float32), mask=mask)


@triton.jit(do_not_specialize=["count", "most_ranks"])
def _expand(
    outputs, order, tiles, table, partial, count, most_ranks, stride,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, SHARES: tl.constexpr,
    PARTS: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Add the products of a tile's shrunk inputs with `b` to a block of the outputs.

    NARROW: places in `partial` and in the outputs fit into 32 bits.
    """
    tile = tiles + tl.program_id(0) * 3
    first = tl.load(tile + 1)
    stop = tl.load(tile + 2)
    line = table + tl.load(tile).to(tl.int64) * COLUMNS
    begin = tl.program_id(1) * BLOCK
    at = first + tl.arange(0, ROWS)
    inside = at < stop
    token = tl.load(order + at, mask=inside, other=0)
    place = at
    if NARROW:
        token = token.to(tl.int32)
    else:
        place = at.to(tl.int64)
    element = outputs.dtype.element_ty
    if stop > first:
        for part in tl.static_range(PARTS):
            own = line + HEAD + part * OF_PART
            b = tl.multiple_of(tl.load(own).to(tl.pointer_type(element)), 16)
            first_output = tl.load(own + 1)
            outs = tl.load(own + 2)
            first_rank = tl.load(own + 3)
            ranks = tl.load(own + 4)
            if (begin < first_output + outs) & (begin + BLOCK > first_output):
                columns = begin - first_output + tl.arange(0, BLOCK)
                is_own = (columns >= 0) & (columns < outs)
                sums = tl.zeros([ROWS, BLOCK], tl.float32)
                for rank in range(0, ranks, RANKS):
                    rows = rank + tl.arange(0, RANKS)
                    low = tl.zeros([ROWS, RANKS], tl.float32)
                    for share in tl.static_range(SHARES):
                        low += tl.load(
                            partial + (share * count + place)[:, None] * most_ranks
                            + (first_rank + rows)[None, :],
                            mask=inside[:, None] & (rows < ranks)[None, :], other=0.0,
                        )  # fmt: skip
                    factor = tl.load(
                        b + rows[:, None] * outs + columns[None, :],
                        mask=(rows < ranks)[:, None] & is_own[None, :], other=0.0,
                    )  # fmt: skip
                    sums = tl.dot(low.to(element), factor, sums, input_precision="ieee")
                target = outputs + token[:, None] * stride + (first_output + columns)[None, :]
                mask = inside[:, None] & is_own[None, :]
                tl.store(target, (tl.load(target, mask=mask, other=0.0).to(tl.float32) + sums).to(element), mask=mask)


def add_products(
    tiles: TokenTiles, table: torch.Tensor, parts: int, most_ranks: int, inputs: torch.Tensor, outputs: torch.Tensor
) -> None:
    """Add the adapters' products of inputs [tokens, in] to outputs [tokens, out] in place.

    Args:
        tiles: the tokens.
        table: [slots, columns] int64, the factors of one product.
        parts: matrices above each other in the product.
        most_ranks: at least as many as any adapter has for this product, all parts together.
        inputs: of the type of factors and outputs.
        outputs: rows are contiguous.
    """
    tokens, width = inputs.shape
    if inputs.stride(1) != 1:
        inputs = inputs.contiguous()
    assert outputs.stride(1) == 1, "rows of outputs are contiguous"
    # Sums do not depend on which programs run first.
    shares = 1
    if tokens <= _FEW_TOKENS:
        shares = _MOST_SHARES if len(tiles.tiles) <= _FEW_TILES else _SOME_SHARES
    share = max(_LEAST_SHARE, triton.cdiv(width, shares * _DEPTH) * _DEPTH)
    shares = triton.cdiv(width, share)
    partial = torch.empty(shares, tokens, most_ranks, dtype=torch.float32, device=inputs.device)
    _shrink[(len(tiles.tiles), shares)](
        inputs, tiles.order, tiles.tiles, table, partial, tokens, most_ranks, width, inputs.stride(0),
        COLUMNS=table.shape[1], ROWS=tiles.rows, RANKS=_RANKS, DEPTH=_DEPTH, SHARE=share,
    )  # fmt: skip
    _expand_into(outputs, tiles, table, partial, parts)


def add_embeddings(
    tiles: TokenTiles, table: torch.Tensor, most_ranks: int, token_ids: torch.Tensor, outputs: torch.Tensor
) -> None:
    """Add the adapters' embeddings of `token_ids` [tokens] int64 to outputs [tokens, hidden] in place.

    `table` is as in `add_products`, but `a` is [vocabulary, ranks].
    """
    partial = torch.empty(1, token_ids.shape[0], most_ranks, dtype=torch.float32, device=outputs.device)
    _look_up[(len(tiles.tiles),)](
        token_ids, tiles.order, tiles.tiles, table, partial, outputs, most_ranks,
        COLUMNS=table.shape[1], ROWS=tiles.rows, RANKS=_RANKS,
    )  # fmt: skip
    _expand_into(outputs, tiles, table, partial, parts=1)


def _expand_into(
    outputs: torch.Tensor, tiles: TokenTiles, table: torch.Tensor, partial: torch.Tensor, parts: int
) -> None:
    shares, tokens, most_ranks = partial.shape
    is_narrow = tiles.rows == _FEW_ROWS
    columns = _MANY_COLUMNS if is_narrow else _FEW_COLUMNS
    # Ranks fit into one or a few rounds, which are not worth a pipeline's memory.
    options = {"num_stages": 1} if is_narrow else {}
    if is_narrow and len(tiles.tiles) > _FEW_TILES:
        options["maxnreg"] = _REGISTERS
    _expand[(len(tiles.tiles), triton.cdiv(outputs.shape[1], columns))](
        outputs, tiles.order, tiles.tiles, table, partial, tokens, most_ranks, outputs.stride(0),
        COLUMNS=table.shape[1], ROWS=tiles.rows, RANKS=_RANKS, BLOCK=columns, SHARES=shares, PARTS=parts,
        NARROW=is_narrow, **options,
    )  # fmt: skip

"""Products of tokens with the low-rank factors of the adapters in their slots, in tiles of tokens with one adapter.

Factors are found by addresses in a table on the device, and the tokens of each adapter are sorted there, too. So the
same launches serve any adapters of any ranks, which is what CUDA graphs need. Inputs are shrunk by one program, and a
second one expands them and adds them to the base product, before the activation where there is one. A graph has room
for more tiles than are used; programs of unused ones end at once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
import triton.language as tl

from services.worker.engine.kernels.gpu.dependent_launch import follow, launch_options
from services.worker.engine.kernels.gpu.elementwise import ACTIVATIONS, gated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.worker.engine.adapters.sites import PartFactors
    from services.worker.engine.model.config import Activation

# Columns of a table's line: the address of `a` and its ranks, then five of each part: the address of `b`, the first
# output and the number of outputs of its lines, the first of the rows of `a` and their number. All are 0 where nothing
# is changed, and in line 0, that of tokens without an adapter.
HEAD = tl.constexpr(2)
OF_PART = tl.constexpr(5)
# Lines of `b` begin and end at multiples of these outputs, and rows of `a` of a part at multiples of these ranks, so
# that 16 bytes are loaded at once.
OUTPUTS_AT_ONCE: Final = 16
RANKS_AT_ONCE: Final = 4
# Of shrunk inputs' rows, in numbers.
_ROW_OF_RANKS = 32

# Up to so many tokens, tiles are the smallest that tensor cores take.
_FEW_TOKENS = 256
_FEW_ROWS, _MANY_ROWS = 16, 64
# Programs share a token's inputs, each at least so many, and at most so many programs; with many tokens only as many
# as give each multiprocessor some work.
_LEAST_SHARE, _MOST_SHARES = 512, 8
_SHRINKING_ON_EACH = 2
# Inputs at a time, of few tokens with one matrix and otherwise.
_LONG_DEPTH, _DEPTH = 256, 128
# Ranks at a time: of products with one matrix, of several together, and of the second product.
_RANKS_OF_ONE, _RANKS_OF_SEVERAL, _RANKS = 32, 64, 16


@dataclass(frozen=True, slots=True)
class _Expansion:
    """How the second product is cut into programs: each has a tile's `share` of columns, `block` at a time.

    Programs wait for memory mostly: with shares this small, several find room on each multiprocessor.
    """

    block: int
    share: int
    warps: int
    stages: int
    registers: int | None = None
    """Most of a thread, so that more programs find room."""


# Of few tokens and of many; and of gated products, where a block has columns of both halves.
_FEW, _MANY = _Expansion(128, 512, 4, 3), _Expansion(128, 512, 8, 2)
_FEW_GATED, _MANY_GATED = _Expansion(128, 1024, 8, 3), _Expansion(64, 512, 8, 1, registers=80)
# Of a machine without a GPU, where Triton's interpreter runs.
_INTERPRETED_MULTIPROCESSORS = 8
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") != "0"


@dataclass(frozen=True, slots=True)
class TokenTiles:
    """The tokens of a pass in tiles of those with one adapter; how many there are follows from the tokens' number."""

    order: torch.Tensor  # [tokens] int64, those without an adapter first, then by slot
    # [tiles, 3] int32: line of a table, first and stop in `order`; those without an adapter first, unused ones last
    tiles: torch.Tensor
    rows: int
    """Most tokens of a tile."""

    @classmethod
    def of(cls, slots: torch.Tensor, count: int) -> TokenTiles:
        """Sort tokens [tokens] int32 with slots below `count`, or -1 for none, without waiting for the device."""
        tokens, device = slots.shape[0], slots.device
        rows = _FEW_ROWS if tokens <= _FEW_TOKENS else _MANY_ROWS
        lines = slots + 1
        every = torch.arange(count + 1, dtype=torch.int32, device=device)
        sizes = (lines[None, :] == every[:, None]).sum(1)
        stops, tiles = sizes.cumsum(0), (sizes + rows - 1) // rows
        ends = tiles.cumsum(0)
        number = torch.arange(min(tokens, tokens // rows + min(tokens, count + 1)), device=device)
        line = torch.searchsorted(ends, number, right=True)
        is_used = line <= count
        line = line.clamp(max=count)
        first = stops[line] - sizes[line] + (number - ends[line] + tiles[line]) * rows
        stop = torch.minimum(first + rows, stops[line])
        places = torch.stack((line, first, stop), dim=1) * is_used[:, None]
        return cls(lines.sort(stable=True).indices, places.to(torch.int32), rows)


@dataclass(frozen=True, slots=True)
class PartLines:
    """Factors of one matrix of a product, as programs read them: `b` [ranks, outputs], of outputs from `first` on.

    Lines of `b` contain zeros where the matrix has no outputs.
    """

    first: int
    ranks: slice
    b: torch.Tensor


def lay_out(a: torch.Tensor, parts: Sequence[PartFactors]) -> tuple[torch.Tensor, tuple[PartLines, ...]]:
    """Return `a` [ranks of all parts, in] and the parts' factors as programs read them."""
    blocks, lines, begin = [], [], 0
    for part in parts:
        line = _lines(part.first, begin, part.b)
        rest = line.b.shape[0] - part.b.shape[1]
        blocks += [a[part.ranks], a.new_zeros(rest, a.shape[1])]
        lines.append(line)
        begin = line.ranks.stop
    return (a if begin == a.shape[0] else torch.cat(blocks)), tuple(lines)


def lay_out_embedding(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, tuple[PartLines, ...]]:
    """Return `a` [vocabulary, ranks] and `b` [hidden, ranks] as programs read them."""
    line = _lines(0, 0, b)
    return torch.nn.functional.pad(a, (0, line.ranks.stop - a.shape[1])), (line,)


def _lines(first: int, first_rank: int, b: torch.Tensor) -> PartLines:
    outputs, ranks = b.shape
    before = first % OUTPUTS_AT_ONCE
    height, width = _multiple(ranks, RANKS_AT_ONCE), _multiple(before + outputs, OUTPUTS_AT_ONCE)
    turned = b.new_zeros(height, width)
    turned[:ranks, before : before + outputs] = b.t()
    return PartLines(first - before, slice(first_rank, first_rank + height), turned)


def table_line(a: torch.Tensor, parts: Sequence[PartLines], columns: int) -> list[int]:
    """Return a table's line of `columns` for factors as `lay_out` or `lay_out_embedding` returns them."""
    line = [a.data_ptr(), parts[-1].ranks.stop]
    for part in parts:
        ranks, outputs = part.b.shape
        line += [part.b.data_ptr(), part.first, outputs, part.ranks.start, ranks]
    return line + [0] * (columns - len(line))


@triton.jit(do_not_specialize=["count", "most_ranks", "steps"])
def _shrink(
    inputs, order, tiles, table, partial, count, most_ranks, steps, width, stride_token_in,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, DEPTH: tl.constexpr, NARROW: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write the products of a share of the inputs of a tile's tokens with `a`, to partial[share, place, rank].

    A share is `steps` times DEPTH inputs. NARROW: places in inputs and in `partial` fit into 32 bits.
    """
    if OVERLAPS:
        follow()
    tile = tiles + tl.program_id(0) * 3
    share = tl.program_id(1)
    first = tl.load(tile + 1)
    stop = tl.load(tile + 2)
    line = table + tl.load(tile).to(tl.int64) * COLUMNS
    a = tl.load(line).to(tl.pointer_type(inputs.dtype.element_ty))
    a = tl.multiple_of(a, 16)
    ranks = tl.load(line + 1).to(tl.int32)
    at = first + tl.arange(0, ROWS)
    inside = at < stop
    token = tl.load(order + at, mask=inside, other=0)
    if NARROW:
        token = token.to(tl.int32)
    begin = share * steps * DEPTH
    if stop > first:
        for rank in range(0, ranks, RANKS):
            rows = rank + tl.arange(0, RANKS)
            sums = tl.zeros([ROWS, RANKS], tl.float32)
            for depth in range(begin, min(begin + steps * DEPTH, width), DEPTH):
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
    ranks = tl.load(line + 1).to(tl.int32)
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


@triton.jit
def _low(
    partial, place, inside, first_rank, ranks, rank, count, most_ranks, shares,
    ELEMENT: tl.constexpr, RANKS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Return RANKS of a part's shrunk inputs from `rank` on, the sum of their shares, [ROWS, RANKS].

    Up to SHARES `shares` are loaded at once; with 1, they are added one after the other.
    """
    rows = rank + tl.arange(0, RANKS)
    places = partial + place[:, None] * most_ranks + (first_rank + rows)[None, :]
    mask = inside[:, None] & (rows < ranks)[None, :]
    if SHARES > 1:
        share = tl.arange(0, SHARES)
        of_shares = (share * count)[:, None, None] * most_ranks + places[None, :, :]
        found = tl.sum(tl.load(of_shares, mask=(share < shares)[:, None, None] & mask[None, :, :], other=0.0), axis=0)
    else:
        found = tl.load(places, mask=mask, other=0.0)
        for _ in range(1, shares):
            places += count.to(tl.int64) * most_ranks
            found += tl.load(places, mask=mask, other=0.0)
    return found.to(ELEMENT)


@triton.jit
def _factor(b, outs, ranks, rank, columns, RANKS: tl.constexpr):
    """Return RANKS lines of `b` from `rank` on at `columns` of the line, zeros where it has none, [RANKS, BLOCK]."""
    rows = rank + tl.arange(0, RANKS)
    mask = (rows < ranks)[:, None] & ((columns >= 0) & (columns < outs))[None, :]
    return tl.load(b + rows[:, None] * outs + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _part_of_half(line, begin, width, ELEMENT: tl.constexpr, PARTS: tl.constexpr, LAST: tl.constexpr):
    """Return where `b` is, first output, outputs, first rank and ranks, of the first or LAST part in a half.

    The half has `width` columns from `begin` on. All are 0 where no part has any.
    """
    address = tl.full((), 0, tl.int64)
    first_output, outs, first_rank, ranks = address, address, address, address
    for part in tl.static_range(PARTS):
        own = line + HEAD + part * OF_PART
        first, length = tl.load(own + 1), tl.load(own + 2)
        is_here = (begin < first + length) & (begin + width > first)
        if not LAST:
            is_here = is_here & (outs == 0)
        address = tl.where(is_here, tl.load(own), address)
        first_output = tl.where(is_here, first, first_output)
        outs = tl.where(is_here, length, outs)
        first_rank = tl.where(is_here, tl.load(own + 3), first_rank)
        ranks = tl.where(is_here, tl.load(own + 4), ranks)
    return (
        tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), 16),
        tl.multiple_of(first_output.to(tl.int32), 16), tl.multiple_of(outs.to(tl.int32), 16),
        tl.multiple_of(first_rank.to(tl.int32), 4), tl.multiple_of(ranks.to(tl.int32), 4),
    )  # fmt: skip


@triton.jit
def _add_part(
    targets, b, first_output, outs, first_rank, ranks, begin_part, end_part, partial, place, inside, count, most_ranks,
    shares,
    ROWS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, SHARES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add the products of a part to columns `begin_part` to `end_part` of rows that begin at `targets` [ROWS]."""
    element = b.dtype.element_ty
    if ranks <= RANKS:
        low = _low(
            partial, place, inside, first_rank, ranks, 0, count, most_ranks, shares,
            ELEMENT=element, RANKS=RANKS, SHARES=SHARES,
        )  # fmt: skip
        for begin in tl.range(begin_part, end_part, BLOCK, num_stages=STAGES):
            columns = tl.multiple_of(begin, 16) + tl.arange(0, BLOCK)
            mask = inside[:, None] & (columns < end_part)[None, :]
            base = tl.load(targets[:, None] + columns[None, :], mask=mask, other=0.0)
            factor = _factor(b, outs, ranks, 0, columns - first_output, RANKS=RANKS)
            sums = base.to(tl.float32) + tl.dot(low, factor, input_precision="ieee")
            tl.store(targets[:, None] + columns[None, :], sums.to(element), mask=mask)
    else:
        for begin in range(begin_part, end_part, BLOCK):
            columns = tl.multiple_of(begin, 16) + tl.arange(0, BLOCK)
            mask = inside[:, None] & (columns < end_part)[None, :]
            base = tl.load(targets[:, None] + columns[None, :], mask=mask, other=0.0)
            sums = tl.zeros([ROWS, BLOCK], tl.float32)
            for rank in range(0, ranks, RANKS):
                low = _low(
                    partial, place, inside, first_rank, ranks, rank, count, most_ranks, shares,
                    ELEMENT=element, RANKS=RANKS, SHARES=SHARES,
                )  # fmt: skip
                factor = _factor(b, outs, ranks, rank, columns - first_output, RANKS=RANKS)
                sums = tl.dot(low, factor, sums, input_precision="ieee")
            sums += base.to(tl.float32)
            tl.store(targets[:, None] + columns[None, :], sums.to(element), mask=mask)


@triton.jit(do_not_specialize=["count", "most_ranks", "shares"])
def _expand(
    outputs, order, tiles, table, partial, count, most_ranks, shares, columns_out, stride,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr,
    SHARES: tl.constexpr, PARTS: tl.constexpr, NARROW: tl.constexpr, STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Add the products of a tile's shrunk inputs with `b` to SHARE columns of the outputs, part by part.

    Lines of two parts may have zeros for some of each other's columns. NARROW: places in `partial` and in the outputs
    fit into 32 bits.
    """
    element = outputs.dtype.element_ty
    # So that the compiler knows what they are multiples of.
    most_ranks = most_ranks // 32 * 32
    tile = tiles + tl.program_id(0) * 3
    first = tl.load(tile + 1)
    stop = tl.load(tile + 2)
    line = table + tl.load(tile).to(tl.int64) * COLUMNS
    place = first + tl.arange(0, ROWS)
    inside = place < stop
    token = tl.load(order + place, mask=inside, other=0)
    if NARROW:
        token = token.to(tl.int32)
    else:
        place = place.to(tl.int64)
    begin_share = tl.program_id(1) * SHARE
    end_share = min(begin_share + SHARE, columns_out)
    if OVERLAPS:
        follow()
    if stop > first:
        for number in range(PARTS):
            own = line + HEAD + number * OF_PART
            b = tl.multiple_of(tl.load(own).to(tl.pointer_type(element)), 16)
            first_output = tl.multiple_of(tl.load(own + 1).to(tl.int32), 16)
            outs = tl.multiple_of(tl.load(own + 2).to(tl.int32), 16)
            first_rank = tl.multiple_of(tl.load(own + 3).to(tl.int32), 4)
            ranks = tl.multiple_of(tl.load(own + 4).to(tl.int32), 4)
            begin_part, end_part = max(begin_share, first_output), min(end_share, first_output + outs)
            if begin_part < end_part:
                _add_part(
                    outputs + token * stride, b, first_output, outs, first_rank, ranks, begin_part, end_part, partial,
                    place, inside, count, most_ranks, shares,
                    ROWS=ROWS, RANKS=RANKS, BLOCK=BLOCK, SHARES=SHARES, STAGES=STAGES,
                )  # fmt: skip
            if PARTS > 1:
                # Other threads may load what was stored in columns that are of both parts' lines.
                tl.debug_barrier()


@triton.jit
def _gated_sums(gate_base, gate, up_base, up, ELEMENT: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return the gated product of base products with what adapters add, rounded as if both halves had been stored."""
    gate = (gate_base.to(tl.float32) + gate).to(ELEMENT).to(tl.float32)
    up = (up_base.to(tl.float32) + up).to(ELEMENT).to(tl.float32)
    return gated(gate, up, ELEMENT=ELEMENT, ACTIVATION=ACTIVATION).to(ELEMENT)


@triton.jit(do_not_specialize=["count", "most_ranks", "shares"])
def _expand_and_gate(
    both, outputs, order, tiles, table, partial, count, most_ranks, shares, width,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr,
    SHARES: tl.constexpr, PARTS: tl.constexpr, NARROW: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write SHARE columns of the gated product of both halves [tokens, 2 width], with a tile's products with `b` added.

    Parts are one matrix of each half, or one of both, so that each half has one: zeros of the line of the other half's
    may reach into it only. Tiles of tokens without an adapter are gated as they are. NARROW: as in `_expand`.
    """
    element = outputs.dtype.element_ty
    # So that the compiler knows what they are multiples of.
    most_ranks = most_ranks // 32 * 32
    tile = tiles + tl.program_id(0) * 3
    first = tl.load(tile + 1)
    stop = tl.load(tile + 2)
    line = table + tl.load(tile).to(tl.int64) * COLUMNS
    gate_b, gate_first, gate_outs, gate_rank, gate_ranks = _part_of_half(
        line, 0, width, ELEMENT=element, PARTS=PARTS, LAST=False
    )
    up_b, up_first, up_outs, up_rank, up_ranks = _part_of_half(
        line, width, width, ELEMENT=element, PARTS=PARTS, LAST=True
    )
    place = first + tl.arange(0, ROWS)
    inside = place < stop
    token = tl.load(order + place, mask=inside, other=0)
    if NARROW:
        token = token.to(tl.int32)
    else:
        place = place.to(tl.int64)
    begin_share = tl.program_id(1) * SHARE
    end_share = min(begin_share + SHARE, width)
    ranks = max(gate_ranks, up_ranks)
    if OVERLAPS:
        follow()
    if stop > first:
        gate_low = _low(
            partial, place, inside, gate_rank, gate_ranks, 0, count, most_ranks, shares,
            ELEMENT=element, RANKS=RANKS, SHARES=SHARES,
        )  # fmt: skip
        up_low = _low(
            partial, place, inside, up_rank, up_ranks, 0, count, most_ranks, shares,
            ELEMENT=element, RANKS=RANKS, SHARES=SHARES,
        )  # fmt: skip
        if ranks <= RANKS:
            for begin in tl.range(begin_share, end_share, BLOCK, num_stages=STAGES):
                columns = begin + tl.arange(0, BLOCK)
                mask = inside[:, None] & (columns < width)[None, :]
                source = both + token[:, None] * (2 * width) + columns[None, :]
                gate_base = tl.load(source, mask=mask, other=0.0)
                up_base = tl.load(source + width, mask=mask, other=0.0)
                gate_factor = _factor(gate_b, gate_outs, gate_ranks, 0, columns - gate_first, RANKS=RANKS)
                up_factor = _factor(up_b, up_outs, up_ranks, 0, width + columns - up_first, RANKS=RANKS)
                gate = tl.dot(gate_low, gate_factor, input_precision="ieee")
                up = tl.dot(up_low, up_factor, input_precision="ieee")
                product = _gated_sums(gate_base, gate, up_base, up, ELEMENT=element, ACTIVATION=ACTIVATION)
                tl.store(outputs + token[:, None] * width + columns[None, :], product, mask=mask)
        else:
            for begin in range(begin_share, end_share, BLOCK):
                columns = begin + tl.arange(0, BLOCK)
                mask = inside[:, None] & (columns < width)[None, :]
                source = both + token[:, None] * (2 * width) + columns[None, :]
                gate_base = tl.load(source, mask=mask, other=0.0)
                up_base = tl.load(source + width, mask=mask, other=0.0)
                gate = tl.zeros([ROWS, BLOCK], tl.float32)
                up = tl.zeros([ROWS, BLOCK], tl.float32)
                for rank in range(0, ranks, RANKS):
                    gate_factor = _factor(gate_b, gate_outs, gate_ranks, rank, columns - gate_first, RANKS=RANKS)
                    up_factor = _factor(up_b, up_outs, up_ranks, rank, width + columns - up_first, RANKS=RANKS)
                    gate_low = _low(
                        partial, place, inside, gate_rank, gate_ranks, rank, count, most_ranks, shares,
                        ELEMENT=element, RANKS=RANKS, SHARES=SHARES,
                    )  # fmt: skip
                    up_low = _low(
                        partial, place, inside, up_rank, up_ranks, rank, count, most_ranks, shares,
                        ELEMENT=element, RANKS=RANKS, SHARES=SHARES,
                    )  # fmt: skip
                    gate = tl.dot(gate_low, gate_factor, gate, input_precision="ieee")
                    up = tl.dot(up_low, up_factor, up, input_precision="ieee")
                product = _gated_sums(gate_base, gate, up_base, up, ELEMENT=element, ACTIVATION=ACTIVATION)
                tl.store(outputs + token[:, None] * width + columns[None, :], product, mask=mask)


def add_products(
    tiles: TokenTiles, table: torch.Tensor, parts: int, most_ranks: int, inputs: torch.Tensor, outputs: torch.Tensor
) -> None:
    """Add the adapters' products of inputs [tokens, in] to outputs [tokens, out] in place.

    Args:
        tiles: the tokens.
        table: [1 + slots, columns] int64, the factors of one product.
        parts: matrices above each other in the product.
        most_ranks: at least as many as any line of the table has.
        inputs: of the type of factors and outputs.
        outputs: rows are contiguous.
    """
    _expand_into(outputs, tiles, table, _shrunk(tiles, table, parts, most_ranks, inputs), parts)


def gated_products(
    tiles: TokenTiles, table: torch.Tensor, parts: int, most_ranks: int, inputs: torch.Tensor, both: torch.Tensor,
    activation: Activation,
) -> torch.Tensor:  # fmt: skip
    """Return the gated product [tokens, width] of both halves [tokens, 2 width] with adapters' products of inputs.

    Tokens without an adapter are gated as they are. See `add_products` for the other arguments; `both` is contiguous.
    """
    tokens, width = both.shape[0], both.shape[1] // 2
    partial = _shrunk(tiles, table, parts, most_ranks, inputs)
    outputs = both.new_empty(tokens, width)
    form = _FEW_GATED if tiles.rows == _FEW_ROWS else _MANY_GATED
    _expand_and_gate[(len(tiles.tiles), triton.cdiv(width, form.share))](
        both, outputs, tiles.order, tiles.tiles, table, partial, tokens, partial.shape[2], partial.shape[0], width,
        NARROW=_is_narrow(both, partial), ACTIVATION=ACTIVATIONS[activation],
        **_constants(form, tiles, table, partial, parts),
    )  # fmt: skip
    return outputs


def add_embeddings(
    tiles: TokenTiles, table: torch.Tensor, most_ranks: int, token_ids: torch.Tensor, outputs: torch.Tensor
) -> None:
    """Add the adapters' embeddings of `token_ids` [tokens] int64 to outputs [tokens, hidden] in place.

    `table` is as in `add_products`, but `a` is [vocabulary, ranks].
    """
    partial = _partial(1, token_ids.shape[0], most_ranks, outputs.device)
    _look_up[(len(tiles.tiles),)](
        token_ids, tiles.order, tiles.tiles, table, partial, outputs, partial.shape[2],
        COLUMNS=table.shape[1], ROWS=tiles.rows, RANKS=_RANKS,
    )  # fmt: skip
    _expand_into(outputs, tiles, table, partial, parts=1)


def _shrunk(tiles: TokenTiles, table: torch.Tensor, parts: int, most_ranks: int, inputs: torch.Tensor) -> torch.Tensor:
    """Return the products of inputs with `a` in shares, [shares, tokens in their order, ranks] float32."""
    tokens, width = inputs.shape
    if inputs.stride(1) != 1:
        inputs = inputs.contiguous()
    # Sums do not depend on which programs run first.
    shares = _MOST_SHARES
    if tiles.rows == _MANY_ROWS:
        shares = _SHRINKING_ON_EACH * _multiprocessors(inputs.device) // triton.cdiv(tokens, _MANY_ROWS)
        shares = max(1, min(shares, _MOST_SHARES))
    depth = _LONG_DEPTH if parts == 1 and tiles.rows == _FEW_ROWS else _DEPTH
    steps = triton.cdiv(max(_LEAST_SHARE, triton.cdiv(width, shares)), depth)
    shares = triton.cdiv(width, steps * depth)
    partial = _partial(shares, tokens, most_ranks, inputs.device)
    _shrink[(len(tiles.tiles), shares)](
        inputs, tiles.order, tiles.tiles, table, partial, tokens, partial.shape[2], steps, width, inputs.stride(0),
        COLUMNS=table.shape[1], ROWS=tiles.rows, RANKS=_RANKS_OF_ONE if parts == 1 else _RANKS_OF_SEVERAL,
        DEPTH=depth, NARROW=_is_narrow(inputs, partial), **_overlap(tiles),
    )  # fmt: skip
    return partial


def _expand_into(
    outputs: torch.Tensor, tiles: TokenTiles, table: torch.Tensor, partial: torch.Tensor, parts: int
) -> None:
    assert outputs.stride(1) == 1, "rows of outputs are contiguous"
    shares, tokens, most_ranks = partial.shape
    form = _FEW if tiles.rows == _FEW_ROWS else _MANY
    _expand[(len(tiles.tiles), triton.cdiv(outputs.shape[1], form.share))](
        outputs, tiles.order, tiles.tiles, table, partial, tokens, most_ranks, shares, outputs.shape[1],
        outputs.stride(0), NARROW=_is_narrow(outputs, partial), **_constants(form, tiles, table, partial, parts),
    )  # fmt: skip


def _constants(
    form: _Expansion, tiles: TokenTiles, table: torch.Tensor, partial: torch.Tensor, parts: int
) -> dict[str, Any]:
    """Return the constants that programs of the second product are compiled and launched with."""
    shares = triton.next_power_of_2(partial.shape[0]) if tiles.rows == _FEW_ROWS else 1
    registers = {} if form.registers is None else {"maxnreg": form.registers}
    return {
        "COLUMNS": table.shape[1], "ROWS": tiles.rows, "RANKS": _RANKS, "BLOCK": form.block, "SHARE": form.share,
        "SHARES": shares, "PARTS": parts, "STAGES": form.stages, "num_warps": form.warps, **registers,
        **_overlap(tiles),
    }  # fmt: skip


def _overlap(tiles: TokenTiles) -> dict[str, Any]:
    """Return the arguments of a launch that say whether it overlaps with the one before."""
    return launch_options(tiles.order.shape[0], most_tokens=_FEW_TOKENS)


def _partial(shares: int, tokens: int, most_ranks: int, device: torch.device) -> torch.Tensor:
    ranks = _multiple(most_ranks, _ROW_OF_RANKS)
    return torch.empty(shares, tokens, ranks, dtype=torch.float32, device=device)


def _is_narrow(*tensors: torch.Tensor) -> bool:
    """Return whether places in all of them fit into 32 bits."""
    return all(tensor.shape[0] * tensor.stride(0) < 2**31 for tensor in tensors)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _multiprocessors(device: torch.device) -> int:
    if _IS_INTERPRETED:
        return _INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count

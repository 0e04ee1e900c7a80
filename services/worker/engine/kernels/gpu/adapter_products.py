"""Products of tokens with the low-rank factors of the adapters in their slots, in tiles of tokens with one adapter.

Factors are found by addresses in a table on the device, and the tokens of each adapter are sorted there, too. So the
same launches serve any adapters of any ranks, which is what CUDA graphs need. Inputs are shrunk by one program, and a
second one expands them and adds them to the base product, before the activation where there is one. Programs of the
second one share out the tiles that are used, as most of those that a graph has room for are not.
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
# is changed. Line 0 belongs to tokens without an adapter; its first column is the most ranks of any other line.
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
_DEPTH = 128
# Ranks at a time: of products with one matrix, of several together, and of the second product.
_RANKS_OF_ONE, _RANKS_OF_SEVERAL, _RANKS = 32, 64, 16
# Outputs at a time, and of each half of a gated product; warps. Programs wait for memory mostly: blocks are as wide as
# leaves room for several programs on a multiprocessor.
_FEW_COLUMNS, _MANY_COLUMNS = 256, 64
_FEW_GATED_COLUMNS, _MANY_GATED_COLUMNS = 128, 64
_FEW_WARPS, _MANY_WARPS = 4, 8
# Registers of a thread of gated products of many tokens, so that a third program finds room.
_MANY_GATED_REGISTERS = 80
# Programs of the second product for each multiprocessor: of a few tokens, those that find room at a time.
_FEW_ON_EACH, _MANY_ON_EACH = 4, 32
# Of a machine without a GPU, where Triton's interpreter runs.
_INTERPRETED_MULTIPROCESSORS = 8
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") != "0"


@dataclass(frozen=True, slots=True)
class TokenTiles:
    """The tokens of a pass in tiles of those with one adapter; how many there are follows from the tokens' number."""

    order: torch.Tensor  # [tokens] int64, those without an adapter first, then by slot
    # [tiles, 3] int32: line of a table, first and stop in `order`; those without an adapter first, unused ones last
    tiles: torch.Tensor
    counts: torch.Tensor  # [2] int32, tiles of tokens without an adapter, and all that are used
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
        counts = torch.stack((ends[0], ends[-1])).to(torch.int32)
        return cls(lines.sort(stable=True).indices, places.to(torch.int32), counts, rows)


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
def _factor(b, outs, ranks, rank, begin, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """Return RANKS lines of `b` from `rank` on for BLOCK outputs from the line's `begin` on, [RANKS, BLOCK]."""
    rows = rank + tl.arange(0, RANKS)
    columns = begin + tl.arange(0, BLOCK)
    mask = (rows < ranks)[:, None] & ((columns >= 0) & (columns < outs))[None, :]
    return tl.load(b + rows[:, None] * outs + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _shares_of(
    partial, place, inside, first_rank, ranks, rank, count, most_ranks, shares,
    RANKS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Return RANKS of a part's shrunk inputs from `rank` on in shares, [SHARES, ROWS, RANKS] float32.

    With 1 for SHARES, add up all `shares` one after the other, to [ROWS, RANKS].
    """
    rows = rank + tl.arange(0, RANKS)
    places = partial + place[:, None] * most_ranks + (first_rank + rows)[None, :]
    mask = inside[:, None] & (rows < ranks)[None, :]
    if SHARES > 1:
        share = tl.arange(0, SHARES)
        of_shares = (share * count)[:, None, None] * most_ranks + places[None, :, :]
        found = tl.load(of_shares, mask=(share < shares)[:, None, None] & mask[None, :, :], other=0.0)
    else:
        found = tl.load(places, mask=mask, other=0.0)
        for _ in range(1, shares):
            places += count.to(tl.int64) * most_ranks
            found += tl.load(places, mask=mask, other=0.0)
    return found


@triton.jit
def _summed(shares, ELEMENT: tl.constexpr, SHARES: tl.constexpr):
    """Return the sum of what `_shares_of` returns, [ROWS, RANKS]."""
    if SHARES > 1:
        shares = tl.sum(shares, axis=0)
    return shares.to(ELEMENT)


@triton.jit
def _expanded(
    line, partial, place, inside, begin, count, most_ranks, shares,
    ELEMENT: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, SHARES: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Return the products of a tile's shrunk inputs with `b` for BLOCK outputs from `begin` on, [ROWS, BLOCK] float32.

    Up to SHARES `shares` of the inputs are loaded at once; with 1, one after the other.
    """
    # So that the compiler knows what they are multiples of.
    most_ranks = most_ranks // 32 * 32
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for part in range(PARTS):
        own = line + HEAD + part * OF_PART
        b = tl.multiple_of(tl.load(own).to(tl.pointer_type(ELEMENT)), 16)
        first_output = tl.multiple_of(tl.load(own + 1).to(tl.int32), 16)
        outs = tl.multiple_of(tl.load(own + 2).to(tl.int32), 16)
        first_rank = tl.multiple_of(tl.load(own + 3).to(tl.int32), 4)
        ranks = tl.multiple_of(tl.load(own + 4).to(tl.int32), 4)
        if (begin < first_output + outs) & (begin + BLOCK > first_output):
            for rank in range(0, ranks, RANKS):
                factor = _factor(b, outs, ranks, rank, begin - first_output, RANKS=RANKS, BLOCK=BLOCK)
                low = _shares_of(
                    partial, place, inside, first_rank, ranks, rank, count, most_ranks, shares,
                    RANKS=RANKS, SHARES=SHARES,
                )  # fmt: skip
                sums = tl.dot(_summed(low, ELEMENT=ELEMENT, SHARES=SHARES), factor, sums, input_precision="ieee")
    return sums


@triton.jit
def _part_at(line, begin, ELEMENT: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, LAST: tl.constexpr):
    """Return where `b` is, its first output, outputs, first rank and ranks, of the first or LAST part at a block.

    All are 0 where no part has outputs of the BLOCK from `begin` on.
    """
    address = tl.full((), 0, tl.int64)
    first_output, outs, first_rank, ranks = address, address, address, address
    for part in tl.static_range(PARTS):
        own = line + HEAD + part * OF_PART
        first, length = tl.load(own + 1), tl.load(own + 2)
        is_here = (begin < first + length) & (begin + BLOCK > first)
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


@triton.jit(do_not_specialize=["count", "most_ranks", "shares"])
def _expand(
    outputs, order, tiles, counts, table, partial, count, most_ranks, shares, columns_out, stride,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, SHARES: tl.constexpr,
    PARTS: tl.constexpr, NARROW: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Add the products of shrunk inputs with `b` to the outputs: a block of columns of one tile after the other.

    NARROW: places in `partial` and in the outputs fit into 32 bits.
    """
    if OVERLAPS:
        follow()
    element = outputs.dtype.element_ty
    blocks = tl.cdiv(columns_out, BLOCK)
    begin_item = tl.load(counts) * blocks
    end_item = tl.load(counts + 1) * blocks
    if tl.load(table) == 0:
        end_item = begin_item
    # Neighbours, as those of a tile read the same places.
    each = tl.cdiv(end_item - begin_item, tl.num_programs(0))
    begin_item += tl.program_id(0) * each
    for item in range(begin_item, min(begin_item + each, end_item)):
        tile = tiles + item // blocks * 3
        begin = item % blocks * BLOCK
        first = tl.load(tile + 1)
        stop = tl.load(tile + 2)
        line = table + tl.load(tile).to(tl.int64) * COLUMNS
        if tl.load(line + 1) > 0:
            place = first + tl.arange(0, ROWS)
            inside = place < stop
            token = tl.load(order + place, mask=inside, other=0)
            if NARROW:
                token = token.to(tl.int32)
            else:
                place = place.to(tl.int64)
            columns = begin + tl.arange(0, BLOCK)
            target = outputs + token[:, None] * stride + columns[None, :]
            mask = inside[:, None] & (columns < columns_out)[None, :]
            base = tl.load(target, mask=mask, other=0.0)
            added = _expanded(
                line, partial, place, inside, begin, count, most_ranks, shares,
                ELEMENT=element, ROWS=ROWS, RANKS=RANKS, BLOCK=BLOCK, SHARES=SHARES, PARTS=PARTS,
            )  # fmt: skip
            tl.store(target, (base.to(tl.float32) + added).to(element), mask=mask)


@triton.jit(do_not_specialize=["count", "most_ranks", "shares"])
def _expand_and_gate(
    both, outputs, order, tiles, counts, table, partial, count, most_ranks, shares, width,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, SHARES: tl.constexpr,
    PARTS: tl.constexpr, NARROW: tl.constexpr, ACTIVATION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write the gated product of both halves [tokens, 2 width] with those of shrunk inputs with `b` added; all tokens.

    Parts are one matrix of each half, or one of both, so that each half of a block has one: zeros of the line of the
    other half's may reach into it only. All that both need is loaded at once. NARROW: as in `_expand`.
    """
    if OVERLAPS:
        follow()
    # So that the compiler knows what they are multiples of.
    most_ranks = most_ranks // 32 * 32
    element = outputs.dtype.element_ty
    blocks = tl.cdiv(width, BLOCK)
    items = tl.load(counts + 1) * blocks
    each = tl.cdiv(items, tl.num_programs(0))
    begin_item = tl.program_id(0) * each
    for item in range(begin_item, min(begin_item + each, items)):
        tile = tiles + item // blocks * 3
        begin = item % blocks * BLOCK
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
        columns = begin + tl.arange(0, BLOCK)
        mask = inside[:, None] & (columns < width)[None, :]
        source = both + token[:, None] * (2 * width) + columns[None, :]
        gate_base = tl.load(source, mask=mask, other=0.0)
        up_base = tl.load(source + width, mask=mask, other=0.0)
        gate_b, gate_first, gate_outs, gate_rank, gate_ranks = _part_at(
            line, begin, ELEMENT=element, BLOCK=BLOCK, PARTS=PARTS, LAST=False
        )
        up_b, up_first, up_outs, up_rank, up_ranks = _part_at(
            line, begin + width, ELEMENT=element, BLOCK=BLOCK, PARTS=PARTS, LAST=True
        )
        gate = tl.zeros([ROWS, BLOCK], tl.float32)
        up = tl.zeros([ROWS, BLOCK], tl.float32)
        for rank in range(0, max(gate_ranks, up_ranks), RANKS):
            gate_factor = _factor(gate_b, gate_outs, gate_ranks, rank, begin - gate_first, RANKS=RANKS, BLOCK=BLOCK)
            up_factor = _factor(up_b, up_outs, up_ranks, rank, begin + width - up_first, RANKS=RANKS, BLOCK=BLOCK)
            gate_low = _shares_of(
                partial, place, inside, gate_rank, gate_ranks, rank, count, most_ranks, shares,
                RANKS=RANKS, SHARES=SHARES,
            )  # fmt: skip
            up_low = _shares_of(
                partial, place, inside, up_rank, up_ranks, rank, count, most_ranks, shares,
                RANKS=RANKS, SHARES=SHARES,
            )  # fmt: skip
            gate_low = _summed(gate_low, ELEMENT=element, SHARES=SHARES)
            up_low = _summed(up_low, ELEMENT=element, SHARES=SHARES)
            gate = tl.dot(gate_low, gate_factor, gate, input_precision="ieee")
            up = tl.dot(up_low, up_factor, up, input_precision="ieee")
        # Rounded as if both halves had been stored.
        gate = (gate_base.to(tl.float32) + gate).to(element).to(tl.float32)
        up = (up_base.to(tl.float32) + up).to(element).to(tl.float32)
        product = gated(gate, up, ELEMENT=element, ACTIVATION=ACTIVATION)
        tl.store(outputs + token[:, None] * width + columns[None, :], product.to(element), mask=mask)


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
    is_few = tiles.rows == _FEW_ROWS
    columns = _FEW_GATED_COLUMNS if is_few else _MANY_GATED_COLUMNS
    registers = {} if is_few else {"maxnreg": _MANY_GATED_REGISTERS}
    _expand_and_gate[(_expanding(tiles, triton.cdiv(width, columns)),)](
        both, outputs, tiles.order, tiles.tiles, tiles.counts, table, partial, tokens, partial.shape[2],
        partial.shape[0], width,
        COLUMNS=table.shape[1], ROWS=tiles.rows, RANKS=_RANKS, BLOCK=columns,
        SHARES=_shares_at_once(tiles, partial), PARTS=parts, NARROW=_is_narrow(both, partial),
        ACTIVATION=ACTIVATIONS[activation],
        num_warps=_FEW_WARPS if is_few else _MANY_WARPS, num_stages=1, **registers, **_overlap(tiles),
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
    steps = triton.cdiv(max(_LEAST_SHARE, triton.cdiv(width, shares)), _DEPTH)
    shares = triton.cdiv(width, steps * _DEPTH)
    partial = _partial(shares, tokens, most_ranks, inputs.device)
    _shrink[(len(tiles.tiles), shares)](
        inputs, tiles.order, tiles.tiles, table, partial, tokens, partial.shape[2], steps, width, inputs.stride(0),
        COLUMNS=table.shape[1], ROWS=tiles.rows, RANKS=_RANKS_OF_ONE if parts == 1 else _RANKS_OF_SEVERAL,
        DEPTH=_DEPTH, NARROW=_is_narrow(inputs, partial), **_overlap(tiles),
    )  # fmt: skip
    return partial


def _expand_into(
    outputs: torch.Tensor, tiles: TokenTiles, table: torch.Tensor, partial: torch.Tensor, parts: int
) -> None:
    assert outputs.stride(1) == 1, "rows of outputs are contiguous"
    shares, tokens, most_ranks = partial.shape
    is_few = tiles.rows == _FEW_ROWS
    columns = _FEW_COLUMNS if is_few else _MANY_COLUMNS
    _expand[(_expanding(tiles, triton.cdiv(outputs.shape[1], columns)),)](
        outputs, tiles.order, tiles.tiles, tiles.counts, table, partial, tokens, most_ranks, shares,
        outputs.shape[1], outputs.stride(0),
        COLUMNS=table.shape[1], ROWS=tiles.rows, RANKS=_RANKS, BLOCK=columns,
        SHARES=_shares_at_once(tiles, partial), PARTS=parts, NARROW=_is_narrow(outputs, partial),
        num_warps=_FEW_WARPS if is_few else _MANY_WARPS, num_stages=1, **_overlap(tiles),
    )  # fmt: skip


def _expanding(tiles: TokenTiles, blocks: int) -> int:
    """Return the number of programs that share out `blocks` blocks of columns of each tile."""
    on_each = _FEW_ON_EACH if tiles.rows == _FEW_ROWS else _MANY_ON_EACH
    return min(len(tiles.tiles) * blocks, on_each * _multiprocessors(tiles.tiles.device))


def _overlap(tiles: TokenTiles) -> dict[str, Any]:
    """Return the arguments of a launch that say whether it overlaps with the one before."""
    return launch_options(tiles.order.shape[0], most_tokens=_FEW_TOKENS)


def _partial(shares: int, tokens: int, most_ranks: int, device: torch.device) -> torch.Tensor:
    ranks = _multiple(most_ranks, _ROW_OF_RANKS)
    return torch.empty(shares, tokens, ranks, dtype=torch.float32, device=device)


def _shares_at_once(tiles: TokenTiles, partial: torch.Tensor) -> int:
    return triton.next_power_of_2(partial.shape[0]) if tiles.rows == _FEW_ROWS else 1


def _is_narrow(*tensors: torch.Tensor) -> bool:
    """Return whether places in all of them fit into 32 bits."""
    return all(tensor.shape[0] * tensor.stride(0) < 2**31 for tensor in tensors)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _multiprocessors(device: torch.device) -> int:
    if _IS_INTERPRETED:
        return _INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count

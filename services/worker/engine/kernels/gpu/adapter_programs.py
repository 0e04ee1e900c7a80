"""Programs of the products of tokens with adapters' factors; `adapter_products` launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from services.worker.engine.kernels.gpu.dependent_launch import follow
from services.worker.engine.kernels.gpu.elementwise import gated

# Columns of a table's line: the address of `a` and its ranks, then five of each part: the address of `b`, the first
# output and the number of outputs of its lines, the first of the rows of `a` and their number. All are 0 where nothing
# is changed, and in line 0, that of tokens without an adapter.
HEAD = tl.constexpr(2)
OF_PART = tl.constexpr(5)


@triton.jit(do_not_specialize=["tokens", "count"], do_not_specialize_on_alignment=["slots"])
def sort_tokens(
    slots, order, tiles, tokens, count,
    ADAPTERS: tl.constexpr, ROWS: tl.constexpr, MOST: tl.constexpr, OWN: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Write the order of `tokens` tokens with slots below ADAPTERS, or -1, and the `count` tiles of ROWS tokens.

    Each program has OWN of the MOST tokens; the first one writes the tiles, of LINES lines at a time.
    """
    every = tl.arange(0, MOST)
    # Beyond all lines where there is no token.
    lines = tl.load(slots + every, mask=every < tokens, other=ADAPTERS) + 1
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    own_lines = tl.load(slots + own, mask=own < tokens, other=ADAPTERS) + 1
    is_before = lines[None, :] < own_lines[:, None]
    is_before |= (lines[None, :] == own_lines[:, None]) & (every[None, :] < own[:, None])
    tl.store(order + tl.sum(is_before.to(tl.int32), axis=1), own.to(tl.int64), mask=own < tokens)
    if tl.program_id(0) == 0:
        stop, used = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
        for begin in range(0, ADAPTERS + 1, LINES):
            line = begin + tl.arange(0, LINES)
            is_member = (lines[None, :] == line[:, None]) & (line <= ADAPTERS)[:, None]
            sizes = tl.sum(is_member.to(tl.int32), axis=1)
            stops, own_tiles = stop + tl.cumsum(sizes, axis=0), tl.cdiv(sizes, ROWS)
            ends = used + tl.cumsum(own_tiles, axis=0)
            number = tl.arange(0, MOST // ROWS)[None, :]
            first = (stops - sizes)[:, None] + number * ROWS
            tile = tiles + ((ends - own_tiles)[:, None] + number) * 4
            mask = number < own_tiles[:, None]
            tl.store(tile, tl.broadcast_to(line[:, None], first.shape), mask=mask)
            tl.store(tile + 1, first, mask=mask)
            tl.store(tile + 2, tl.minimum(first + ROWS, stops[:, None]), mask=mask)
            stop += tl.sum(sizes)
            used += tl.sum(own_tiles)
        tile = tiles + every * 4
        is_unused = (every >= used) & (every < count)
        for column in tl.static_range(3):
            tl.store(tile + column, tl.zeros_like(every), mask=is_unused)
        tl.store(tile + 3, tl.zeros_like(every) + used, mask=every < count)


@triton.jit(do_not_specialize=["count", "most_ranks", "steps"])
def shrink(
    inputs, order, tiles, table, partial, count, most_ranks, steps, width, stride_token_in,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
    NARROW: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write the products of a share of the inputs of a tile's tokens with `a`, to partial[share, place, rank].

    A share is `steps` times DEPTH inputs. EVEN: DEPTH divides `width`. NARROW: places in inputs and in `partial` fit
    into 32 bits.
    """
    tile = tiles + tl.program_id(0) * 4
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
    if OVERLAPS:
        follow()
    if stop > first:
        for rank in range(0, ranks, RANKS):
            rows = rank + tl.arange(0, RANKS)
            sums = tl.zeros([ROWS, RANKS], tl.float32)
            for depth in range(begin, min(begin + steps * DEPTH, width), DEPTH):
                columns = depth + tl.arange(0, DEPTH)
                is_given, is_factor = inside[:, None], (rows < ranks)[:, None]
                if not EVEN:
                    is_given = is_given & (columns < width)[None, :]
                    is_factor = is_factor & (columns < width)[None, :]
                places = inputs + token[:, None] * stride_token_in + columns[None, :]
                given = tl.load(places, mask=is_given, other=0.0)
                factor = tl.load(a + rows[:, None] * width + columns[None, :], mask=is_factor, other=0.0)
                sums = tl.dot(given, tl.trans(factor), sums, input_precision="ieee")
            target = partial + (share * count + at).to(tl.int64)[:, None] * most_ranks + rows[None, :]
            tl.store(target, sums, mask=inside[:, None] & (rows < ranks)[None, :])


@triton.jit(do_not_specialize=["most_ranks"], do_not_specialize_on_alignment=["token_ids"])
def look_up(
    token_ids, order, tiles, table, partial, outputs, most_ranks,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Write the lines of `a` [vocabulary, ranks] of a tile's tokens, to partial[0, place, rank]."""
    tile = tiles + tl.program_id(0) * 4
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
def _share(tiles, width, BLOCK: tl.constexpr):
    """Return this program's tile, and the first and stop of its share of the tile's `width` columns.

    Used tiles have equally many programs, each with whole blocks; programs that are left over have no columns, of the
    last tile. No program has columns of two tiles: it would wait twice for one load after the other.
    """
    used = tl.load(tiles + 3)
    of_tile = tl.num_programs(0) // tl.maximum(used, 1)
    index, number = tl.program_id(0) // of_tile, tl.program_id(0) % of_tile
    blocks = tl.cdiv(width, BLOCK)
    begin, end = blocks * number // of_tile * BLOCK, blocks * (number + 1) // of_tile * BLOCK
    last = tl.maximum(used, 1) - 1
    return tl.minimum(index, last), begin, tl.where(index < used, tl.minimum(end, width), begin)


@triton.jit
def _tokens(order, first, stop, ROWS: tl.constexpr, NARROW: tl.constexpr):
    """Return the first ROWS tokens in `order` from `first` on, 0 from `stop` on, in 32 bits if NARROW."""
    place = first + tl.arange(0, ROWS)
    token = tl.load(order + place, mask=place < stop, other=0)
    return token.to(tl.int32) if NARROW else token


@triton.jit
def _parts(line, PARTS: tl.constexpr):
    """Return the entries of a line: the five numbers of its first part, then those of the second one, and so on."""
    found = (tl.load(line + HEAD),)
    for column in tl.static_range(1, PARTS * OF_PART):
        found = found + (tl.load(line + HEAD + column),)  # type: ignore[assignment]  # noqa: RUF005  # Triton knows no stars
    return found


@triton.jit
def _part(parts, number, ELEMENT: tl.constexpr, PARTS: tl.constexpr):
    """Return where `b` is, first output, outputs, first rank and ranks, of the part with this number."""
    address, first_output, outs, first_rank, ranks = parts[0], parts[1], parts[2], parts[3], parts[4]
    for part in tl.static_range(1, PARTS):
        is_it = number == part
        address = tl.where(is_it, parts[part * OF_PART], address)
        first_output = tl.where(is_it, parts[part * OF_PART + 1], first_output)
        outs = tl.where(is_it, parts[part * OF_PART + 2], outs)
        first_rank = tl.where(is_it, parts[part * OF_PART + 3], first_rank)
        ranks = tl.where(is_it, parts[part * OF_PART + 4], ranks)
    return _known_multiples(address, first_output, outs, first_rank, ranks, ELEMENT=ELEMENT)


@triton.jit
def _known_multiples(address, first_output, outs, first_rank, ranks, ELEMENT: tl.constexpr):
    """Return a part's numbers in 32 bits, and an address, such that the compiler knows what they are multiples of."""
    return (
        tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), 16),
        tl.multiple_of(first_output.to(tl.int32), 16), tl.multiple_of(outs.to(tl.int32), 16),
        tl.multiple_of(first_rank.to(tl.int32), 4), tl.multiple_of(ranks.to(tl.int32), 4),
    )  # fmt: skip


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
    return _known_multiples(address, first_output, outs, first_rank, ranks, ELEMENT=ELEMENT)


@triton.jit
def _add_part(
    targets, b, first_output, outs, first_rank, ranks, begin_part, end_part, partial, place, inside, count, most_ranks,
    shares,
    ROWS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, SHARES: tl.constexpr, STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Add the products of a part to columns `begin_part` to `end_part` of rows that begin at `targets` [ROWS]."""
    element = b.dtype.element_ty
    if ranks <= RANKS:
        # The first block is loaded before the wait, too: only `partial` is of the program before.
        columns = tl.multiple_of(begin_part, 16) + tl.arange(0, BLOCK)
        mask = inside[:, None] & (columns < end_part)[None, :]
        base = tl.load(targets[:, None] + columns[None, :], mask=mask, other=0.0)
        factor = _factor(b, outs, ranks, 0, columns - first_output, RANKS=RANKS)
        if OVERLAPS:
            follow()
        low = _low(
            partial, place, inside, first_rank, ranks, 0, count, most_ranks, shares,
            ELEMENT=element, RANKS=RANKS, SHARES=SHARES,
        )  # fmt: skip
        sums = base.to(tl.float32) + tl.dot(low, factor, input_precision="ieee")
        tl.store(targets[:, None] + columns[None, :], sums.to(element), mask=mask)
        for begin in tl.range(begin_part + BLOCK, end_part, BLOCK, num_stages=STAGES):
            columns = tl.multiple_of(begin, 16) + tl.arange(0, BLOCK)
            mask = inside[:, None] & (columns < end_part)[None, :]
            base = tl.load(targets[:, None] + columns[None, :], mask=mask, other=0.0)
            factor = _factor(b, outs, ranks, 0, columns - first_output, RANKS=RANKS)
            sums = base.to(tl.float32) + tl.dot(low, factor, input_precision="ieee")
            tl.store(targets[:, None] + columns[None, :], sums.to(element), mask=mask)
    else:
        if OVERLAPS:
            follow()
        for begin in tl.range(begin_part, end_part, BLOCK, num_stages=1):
            columns = tl.multiple_of(begin, 16) + tl.arange(0, BLOCK)
            mask = inside[:, None] & (columns < end_part)[None, :]
            base = tl.load(targets[:, None] + columns[None, :], mask=mask, other=0.0)
            sums = tl.zeros([ROWS, BLOCK], tl.float32)
            for rank in tl.range(0, ranks, RANKS, num_stages=1):
                low = _low(
                    partial, place, inside, first_rank, ranks, rank, count, most_ranks, shares,
                    ELEMENT=element, RANKS=RANKS, SHARES=1,
                )  # fmt: skip
                factor = _factor(b, outs, ranks, rank, columns - first_output, RANKS=RANKS)
                sums = tl.dot(low, factor, sums, input_precision="ieee")
            sums += base.to(tl.float32)
            tl.store(targets[:, None] + columns[None, :], sums.to(element), mask=mask)


@triton.jit(do_not_specialize=["count", "most_ranks", "shares"])
def expand(
    outputs, order, tiles, table, partial, count, most_ranks, shares, columns_out, stride,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, SHARES: tl.constexpr,
    PARTS: tl.constexpr, NARROW: tl.constexpr, STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Add the products of tiles' shrunk inputs with `b` to this program's blocks of the outputs, part by part.

    Lines of two parts may have zeros for some of each other's columns. NARROW: places in `partial` and in the outputs
    fit into 32 bits.
    """
    element = outputs.dtype.element_ty
    # So that the compiler knows what they are multiples of.
    most_ranks = most_ranks // 32 * 32
    index, begin_share, end_share = _share(tiles, columns_out, BLOCK=BLOCK)
    # Written before the pass, or by programs that are done; what the program before wrote is `partial`.
    tile = tiles + index * 4
    first = tl.load(tile + 1)
    stop = tl.load(tile + 2)
    line = table + tl.load(tile).to(tl.int64) * COLUMNS
    place = first + tl.arange(0, ROWS)
    inside = place < stop
    token = _tokens(order, first, stop, ROWS=ROWS, NARROW=NARROW)
    parts = _parts(line, PARTS=PARTS)
    if not NARROW:
        place = place.to(tl.int64)
    if begin_share < end_share:
        for number in range(PARTS):
            b, first_output, outs, first_rank, ranks = _part(parts, number, ELEMENT=element, PARTS=PARTS)
            begin_part, end_part = max(begin_share, first_output), min(end_share, first_output + outs)
            if begin_part < end_part:
                _add_part(
                    outputs + token * stride, b, first_output, outs, first_rank, ranks, begin_part, end_part, partial,
                    place, inside, count, most_ranks, shares,
                    ROWS=ROWS, RANKS=RANKS, BLOCK=BLOCK, SHARES=SHARES, STAGES=STAGES, OVERLAPS=OVERLAPS,
                )  # fmt: skip
            if PARTS > 1:
                # Other threads may load what was stored in columns that are of both parts' lines.
                tl.debug_barrier()
    if OVERLAPS:
        follow()


@triton.jit
def _first_half(sums, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first half of the rows of `sums` [ROWS, BLOCK]."""
    half, _ = tl.split(tl.permute(tl.reshape(sums, [2, ROWS // 2, BLOCK]), [1, 2, 0]))
    return half


@triton.jit
def _gate_columns(
    both, outputs, token, inside, begin_share, end_share, width, gate_low, gate_b, gate_first, gate_outs, gate_ranks,
    up_low, up_b, up_first, up_outs, up_ranks,
    ROWS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr,
    IS_HALF: tl.constexpr,
):  # fmt: skip
    """Write columns of the gated product of a tile's tokens, `token` where `inside`, [ROWS // 2 if IS_HALF else ROWS].

    Shrunk inputs are of ROWS tokens.
    """
    element = outputs.dtype.element_ty
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
        if IS_HALF:
            gate, up = _first_half(gate, ROWS=ROWS, BLOCK=BLOCK), _first_half(up, ROWS=ROWS, BLOCK=BLOCK)
        product = _gated_sums(gate_base, gate, up_base, up, ELEMENT=element, ACTIVATION=ACTIVATION)
        tl.store(outputs + token[:, None] * width + columns[None, :], product, mask=mask)


@triton.jit
def _gated_sums(gate_base, gate, up_base, up, ELEMENT: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return the gated product of base products with what adapters add, rounded as if both halves had been stored."""
    gate = (gate_base.to(tl.float32) + gate).to(ELEMENT).to(tl.float32)
    up = (up_base.to(tl.float32) + up).to(ELEMENT).to(tl.float32)
    return gated(gate, up, ELEMENT=ELEMENT, ACTIVATION=ACTIVATION).to(ELEMENT)


@triton.jit(do_not_specialize=["count", "most_ranks", "shares"])
def expand_and_gate(
    both, outputs, order, tiles, table, partial, count, most_ranks, shares, width,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, SHARES: tl.constexpr,
    PARTS: tl.constexpr, NARROW: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write this program's blocks of the gated product of both halves [tokens, 2 width], with products with `b` added.

    Parts are one matrix of each half, or one of both, so that each half has one: zeros of the line of the other half's
    may reach into it only. Tiles of tokens without an adapter are gated as they are. NARROW: as in `expand`.
    """
    element = outputs.dtype.element_ty
    # So that the compiler knows what they are multiples of.
    most_ranks = most_ranks // 32 * 32
    index, begin_share, end_share = _share(tiles, width, BLOCK=BLOCK)
    # Written before the pass, or by programs that are done; what the program before wrote is `partial`.
    tile = tiles + index * 4
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
    token = _tokens(order, first, stop, ROWS=ROWS, NARROW=NARROW)
    first_tokens = _tokens(order, first, stop, ROWS=ROWS // 2, NARROW=NARROW)
    if not NARROW:
        place = place.to(tl.int64)
    if OVERLAPS:
        follow()
    if begin_share < end_share:
        ranks = max(gate_ranks, up_ranks)
        gate_low = _low(
            partial, place, inside, gate_rank, gate_ranks, 0, count, most_ranks, shares,
            ELEMENT=element, RANKS=RANKS, SHARES=SHARES,
        )  # fmt: skip
        up_low = _low(
            partial, place, inside, up_rank, up_ranks, 0, count, most_ranks, shares,
            ELEMENT=element, RANKS=RANKS, SHARES=SHARES,
        )  # fmt: skip
        if ranks <= RANKS:
            # Activating empty rows takes as long as reading the factors. With 16 rows, each thread has both halves.
            if ROWS == 16 and stop - first <= ROWS // 2:
                _gate_columns(
                    both, outputs, first_tokens, first + tl.arange(0, ROWS // 2) < stop, begin_share, end_share, width,
                    gate_low, gate_b, gate_first, gate_outs, gate_ranks, up_low, up_b, up_first, up_outs, up_ranks,
                    ROWS=ROWS, RANKS=RANKS, BLOCK=BLOCK, STAGES=STAGES, ACTIVATION=ACTIVATION, IS_HALF=True,
                )  # fmt: skip
            else:
                _gate_columns(
                    both, outputs, token, inside, begin_share, end_share, width, gate_low, gate_b, gate_first,
                    gate_outs, gate_ranks, up_low, up_b, up_first, up_outs, up_ranks,
                    ROWS=ROWS, RANKS=RANKS, BLOCK=BLOCK, STAGES=STAGES, ACTIVATION=ACTIVATION, IS_HALF=False,
                )  # fmt: skip
        else:
            for begin in tl.range(begin_share, end_share, BLOCK, num_stages=1):
                columns = begin + tl.arange(0, BLOCK)
                mask = inside[:, None] & (columns < width)[None, :]
                source = both + token[:, None] * (2 * width) + columns[None, :]
                gate_base = tl.load(source, mask=mask, other=0.0)
                up_base = tl.load(source + width, mask=mask, other=0.0)
                gate = tl.zeros([ROWS, BLOCK], tl.float32)
                up = tl.zeros([ROWS, BLOCK], tl.float32)
                for rank in tl.range(0, ranks, RANKS, num_stages=1):
                    gate_factor = _factor(gate_b, gate_outs, gate_ranks, rank, columns - gate_first, RANKS=RANKS)
                    up_factor = _factor(up_b, up_outs, up_ranks, rank, width + columns - up_first, RANKS=RANKS)
                    gate_low = _low(
                        partial, place, inside, gate_rank, gate_ranks, rank, count, most_ranks, shares,
                        ELEMENT=element, RANKS=RANKS, SHARES=1,
                    )  # fmt: skip
                    up_low = _low(
                        partial, place, inside, up_rank, up_ranks, rank, count, most_ranks, shares,
                        ELEMENT=element, RANKS=RANKS, SHARES=1,
                    )  # fmt: skip
                    gate = tl.dot(gate_low, gate_factor, gate, input_precision="ieee")
                    up = tl.dot(up_low, up_factor, up, input_precision="ieee")
                product = _gated_sums(gate_base, gate, up_base, up, ELEMENT=element, ACTIVATION=ACTIVATION)
                tl.store(outputs + token[:, None] * width + columns[None, :], product, mask=mask)

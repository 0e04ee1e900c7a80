"""Attention whose sums have one order: for a row that decodes, a chunk of a prompt and a draft alike.

A query goes through blocks of keys that begin at fixed positions, from first to last. Blocks are joined to segments,
which end at fixed positions too, and segments to the output, one after another. Keys that a query does not see have a
share of exactly zero, so a program may go through blocks for other queries. Few queries are cut into programs for
single segments, whose results are then joined in the same order by the program that ends last.

The matrix instruction is the same for all tiles of queries (mma.sync of 16 queries, 8 keys and 16 components): Triton
takes it for fewer than 64 rows or 4 warps. Sums over the shares of keys are products with ones, as a reduction over
threads has an order that depends on the tile. Multiplications and additions are not fused, since a compiler may fuse
them differently in each variant of a program.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from services.worker.engine.kernels.gpu import elementwise
from services.worker.engine.kernels.gpu.dependent_launch import follow, launch_options
from services.worker.engine.kernels.interface import AttentionShape, KvLayer, KvLayout, QkNorm

if TYPE_CHECKING:
    from services.worker.engine.model.batch import ForwardBatch

_LOG2_E = 1.4426950408889634
# Keys of a segment: a multiple of each block.
SEGMENT = 256
# Of keys, and of values, of a block: 64 of 256 components.
_BLOCK_COMPONENTS = 64 * 256
_MOST_BLOCK = 64
# Programs up to which segments are programs of their own, and what their results may take.
_PROGRAMS = 132 * 4
_PARTIAL_BYTES = 128 * 1024**2


@triton.jit
def _finite(peaks):
    """Return maxima that can be subtracted: zero before any key."""
    return tl.where(peaks == -float("inf"), 0.0, peaks)


@triton.jit
def _first_seen(position, WINDOW_LEFT: tl.constexpr, CHUNKED: tl.constexpr):
    """Return the first position that queries at `position` see."""
    if CHUNKED:
        least = position // (WINDOW_LEFT + 1) * (WINDOW_LEFT + 1)
    elif WINDOW_LEFT >= 0:
        least = tl.maximum(position - WINDOW_LEFT, 0)
    else:
        least = position * 0
    return least


@triton.jit
def _add_block(
    query, keys, values, table, at, end, position, head, peak, mass, sums, scale, cap,
    stride_page, stride_head, stride_token,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW_LEFT: tl.constexpr, CHUNKED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Add the keys at [at, at + BLOCK) to a segment: its maximum [height], masses [height, 16] and sums."""
    element = values.dtype.element_ty
    columns = tl.arange(0, WIDTH)
    in_head = columns < HEAD_DIM
    tokens = at + tl.arange(0, BLOCK)
    inside = tokens < end
    page = tl.load(table + tokens // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
    place = page * stride_page + head * stride_head + (tokens % PAGE_SIZE) * stride_token
    key = tl.load(keys + place[None, :] + columns[:, None], mask=inside[None, :] & in_head[:, None], other=0.0)
    value = tl.load(values + place[:, None] + columns[None, :], mask=inside[:, None] & in_head[None, :], other=0.0)
    scores = tl.dot(query, key) * scale
    if CAPPED:  # cap * tanh(scores)
        scores = cap - 2.0 * cap / (tl.exp(2.0 * scores) + 1.0)
    seen = tokens[None, :] <= position[:, None]
    if WINDOW_LEFT >= 0:
        seen = seen & (tokens[None, :] >= _first_seen(position, WINDOW_LEFT=WINDOW_LEFT, CHUNKED=CHUNKED)[:, None])
    scores = tl.where(seen, scores, -float("inf"))
    larger = tl.maximum(peak, tl.max(scores, axis=1))
    subtracted = _finite(larger)
    shrink = tl.exp2(peak - subtracted)
    shares = tl.exp2(scores - subtracted[:, None]).to(element)
    mass = tl.dot(shares, tl.full([BLOCK, 16], 1.0, element), mass * shrink[:, None])
    sums = tl.dot(shares, value, sums * shrink[:, None])
    return larger, mass, sums


@triton.jit
def _join(peak, mass, sums, of_segment, mass_of_segment, sums_of_segment):
    """Add a segment to what the ones before it gave."""
    larger = tl.maximum(peak, of_segment)
    subtracted = _finite(larger)
    old, new = tl.exp2(peak - subtracted), tl.exp2(of_segment - subtracted)
    mass = mass * old + mass_of_segment * new
    sums = sums * old[:, None] + sums_of_segment * new[:, None]
    return larger, mass, sums


@triton.jit
def _whole(
    query, keys, values, table, first, end, position, head, scale, cap, stride_page, stride_head, stride_token,
    HEIGHT: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr, WINDOW_LEFT: tl.constexpr, CHUNKED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Return maxima, masses and sums over all keys at [first, end), one segment after the other."""
    peak = tl.full([HEIGHT], -float("inf"), tl.float32)
    mass = tl.zeros([HEIGHT], tl.float32)
    sums = tl.zeros([HEIGHT, WIDTH], tl.float32)
    its_peak = tl.full([HEIGHT], -float("inf"), tl.float32)
    masses = tl.zeros([HEIGHT, 16], tl.float32)
    its_sums = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for at in range(first, end, BLOCK):
        its_peak, masses, its_sums = _add_block(
            query, keys, values, table, at, end, position, head, its_peak, masses, its_sums, scale, cap,
            stride_page, stride_head, stride_token, HEAD_DIM=HEAD_DIM, WIDTH=WIDTH, PAGE_SIZE=PAGE_SIZE,
            BLOCK=BLOCK, WINDOW_LEFT=WINDOW_LEFT, CHUNKED=CHUNKED, CAPPED=CAPPED,
        )  # fmt: skip
        if (at + BLOCK) % SEGMENT == 0:
            peak, mass, sums = _join(peak, mass, sums, its_peak, tl.max(masses, axis=1), its_sums)
            its_peak = tl.full([HEIGHT], -float("inf"), tl.float32)
            masses = tl.zeros([HEIGHT, 16], tl.float32)
            its_sums = tl.zeros([HEIGHT, WIDTH], tl.float32)
    # After a whole segment there is nothing left, and nothing changes.
    return _join(peak, mass, sums, its_peak, tl.max(masses, axis=1), its_sums)


@triton.jit
def _joined(
    partial, weights, first_cell, segments, lines, columns, mask, is_there,
    HEIGHT: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, CELL: tl.constexpr,
):  # fmt: skip
    """Return the same from the results of single segments, which other programs have stored."""
    peak = tl.full([HEIGHT], -float("inf"), tl.float32)
    mass = tl.zeros([HEIGHT], tl.float32)
    sums = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for segment in range(segments):
        places = (first_cell + segment).to(tl.int64) * CELL + lines
        at = partial + places[:, None] * HEAD_DIM + columns[None, :]
        its_sums = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
        its_peak = tl.load(weights + places * 2, mask=is_there, other=0.0, cache_modifier=".cg")
        its_mass = tl.load(weights + places * 2 + 1, mask=is_there, other=1.0, cache_modifier=".cg")
        peak, mass, sums = _join(peak, mass, sums, its_peak, its_mass, its_sums)
    return peak, mass, sums


@triton.jit
def _finish(peak, mass, sums, targets, sinks, mask, HAS_SINKS: tl.constexpr):
    """Store outputs; a sink is one more segment, whose sums are zero."""
    if HAS_SINKS:
        of_sink = sinks * 1.4426950408889634
        peak, mass, sums = _join(peak, mass, sums, of_sink, mass * 0.0 + 1.0, sums * 0.0)
    tl.store(targets, (sums / mass[:, None]).to(targets.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["count", "stride_table", "steps"],
    do_not_specialize_on_alignment=["page_table", "rows", "lengths", "starts"],
)
def _attend(
    queries, keys, values, outputs, page_table, rows, lengths, starts, partial, weights, counters, sinks,
    scale, cap, count, steps, stride_query, stride_page, stride_head, stride_token, stride_table,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEIGHT: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SEARCH: tl.constexpr,
    DECODES: tl.constexpr, IS_CUT: tl.constexpr, WINDOW_LEFT: tl.constexpr, CHUNKED: tl.constexpr,
    CAPPED: tl.constexpr, HAS_SINKS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Attend for a tile of TOKENS tokens of one row and the GROUP query heads of one KV head.

    `starts` are tokens at which the `count` rows begin; where each row DECODES one token, they are not read. If
    IS_CUT, a program takes every so many segments, of up to `steps`.
    """
    if OVERLAPS:
        follow()
    head = tl.program_id(0)
    tile = tl.program_id(1)
    if DECODES:
        row = tile
        token = tile
        new = 1
        length = tl.load(lengths + row)
        first_position = length - 1
    else:
        indices = tl.arange(0, SEARCH)
        begins = tl.load(starts + indices, mask=indices < count, other=0)
        ends = tl.load(starts + indices + 1, mask=indices < count, other=0)
        tiles = tl.cdiv(ends - begins, TOKENS)
        row = tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32), axis=0)
        if row >= count:
            return
        before = tl.sum(tl.where(indices < row, tiles, 0), axis=0)
        begin = tl.load(starts + row)
        of_row = tl.load(starts + row + 1) - begin
        # Those with the most keys first: programs that start last have the least work.
        skipped = (tl.cdiv(of_row, TOKENS) - 1 - (tile - before)) * TOKENS
        token = begin + skipped
        new = tl.minimum(of_row - skipped, TOKENS)
        length = tl.load(lengths + row)
        first_position = length - of_row + skipped
    table = page_table + tl.load(rows + row).to(tl.int64) * stride_table
    lines = tl.arange(0, HEIGHT)
    is_there = lines < new * GROUP
    # Lines of the tile beyond its tokens repeat the first one.
    member = tl.where(is_there, lines // GROUP, 0)
    query_head = head * GROUP + tl.where(is_there, lines % GROUP, 0)
    position = first_position + member
    columns = tl.arange(0, WIDTH)
    in_head = columns < HEAD_DIM
    mask = is_there[:, None] & in_head[None, :]
    at_token = (token + member).to(tl.int64)
    at_queries = queries + at_token[:, None] * stride_query + query_head[:, None] * HEAD_DIM + columns[None, :]
    query = tl.load(at_queries, mask=in_head[None, :], other=0.0)
    targets = outputs + (at_token[:, None] * KV_HEADS * GROUP + query_head[:, None]) * HEAD_DIM + columns[None, :]
    end = first_position + new
    first = _first_seen(first_position, WINDOW_LEFT=WINDOW_LEFT, CHUNKED=CHUNKED) // BLOCK * BLOCK
    first_segment = first // SEGMENT
    segments = (end - 1) // SEGMENT - first_segment + 1
    of_sinks = lines.to(tl.float32)
    if HAS_SINKS:
        of_sinks = tl.load(sinks + query_head)
    if IS_CUT:
        part = tl.program_id(2)
        parts = tl.num_programs(2)
        job = tile * KV_HEADS + head
        cell: tl.constexpr = TOKENS * GROUP
        for segment in range(part, segments, parts):
            start = (first_segment + segment) * SEGMENT
            its_peak = tl.full([HEIGHT], -float("inf"), tl.float32)
            masses = tl.zeros([HEIGHT, 16], tl.float32)
            its_sums = tl.zeros([HEIGHT, WIDTH], tl.float32)
            for at in range(tl.maximum(start, first), tl.minimum(start + SEGMENT, end), BLOCK):
                its_peak, masses, its_sums = _add_block(
                    query, keys, values, table, at, end, position, head, its_peak, masses, its_sums, scale, cap,
                    stride_page, stride_head, stride_token, HEAD_DIM=HEAD_DIM, WIDTH=WIDTH, PAGE_SIZE=PAGE_SIZE,
                    BLOCK=BLOCK, WINDOW_LEFT=WINDOW_LEFT, CHUNKED=CHUNKED, CAPPED=CAPPED,
                )  # fmt: skip
            places = (job * steps + segment).to(tl.int64) * cell + lines
            tl.store(partial + places[:, None] * HEAD_DIM + columns[None, :], its_sums, mask=mask)
            tl.store(weights + places * 2, its_peak, mask=is_there)
            tl.store(weights + places * 2 + 1, tl.max(masses, axis=1), mask=is_there)
        if part < segments:
            # Every thread's results must be written before the count says so.
            tl.debug_barrier()
            finished = tl.atomic_add(counters + job, 1, sem="acq_rel")
            if finished == tl.minimum(parts, segments) - 1:
                tl.debug_barrier()
                peak, mass, sums = _joined(
                    partial, weights, job * steps, segments, lines, columns, mask, is_there,
                    HEIGHT=HEIGHT, HEAD_DIM=HEAD_DIM, WIDTH=WIDTH, CELL=cell,
                )  # fmt: skip
                _finish(peak, mass, sums, targets, of_sinks, mask, HAS_SINKS=HAS_SINKS)
                tl.store(counters + job, 0)
    else:
        peak, mass, sums = _whole(
            query, keys, values, table, first, end, position, head, scale, cap, stride_page, stride_head, stride_token,
            HEIGHT=HEIGHT, HEAD_DIM=HEAD_DIM, WIDTH=WIDTH, PAGE_SIZE=PAGE_SIZE, BLOCK=BLOCK, SEGMENT=SEGMENT,
            WINDOW_LEFT=WINDOW_LEFT, CHUNKED=CHUNKED, CAPPED=CAPPED,
        )  # fmt: skip
        _finish(peak, mass, sums, targets, of_sinks, mask, HAS_SINKS=HAS_SINKS)


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Lines of a tile, one for each token and query head of a group; warps and pipeline stages.

    Fewer than 64 lines, or than 4 warps, so that all tiles use the same matrix instruction.
    """

    height: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class OrderedTuning:
    """Tiles of rows that decode and of chunks, and for how many programs rows are cut into segments."""

    decode: QueryTile = QueryTile(16, 2, 3)
    chunk: QueryTile = QueryTile(32, 2, 3)
    programs: int = _PROGRAMS


class OrderedAttention:
    """See `AttentionBackend`; keys and values lie head by head within a page."""

    layout = KvLayout.HEAD_MAJOR

    def __init__(
        self, shape: AttentionShape, angles: torch.Tensor, max_rows: int, tuning: OrderedTuning | None = None
    ) -> None:
        """Serve up to `max_rows` rows at once; `angles` is `rotary_table`'s."""
        self._shape = shape
        self._angles = angles
        self._tuning = tuning or OrderedTuning()
        self._group = shape.query_heads // shape.kv_heads
        self._width = max(triton.next_power_of_2(shape.head_dim), 16)
        self._search = triton.next_power_of_2(max_rows)
        self._own_rows = torch.arange(max_rows, dtype=torch.int32, device=angles.device)
        self._counters = torch.zeros(self._tuning.programs, dtype=torch.int32, device=angles.device)

    def store(self, qkv: torch.Tensor, layer: KvLayer, norms: QkNorm | None, batch: ForwardBatch) -> torch.Tensor:
        """Rotate, write keys and values, return queries; see `AttentionBackend.store`."""
        return elementwise.rotate_and_store(qkv, layer, norms, batch, self._shape, self._angles, is_ordered=True)

    def attend(
        self, queries: torch.Tensor, layer: KvLayer, batch: ForwardBatch, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend over cached and new tokens; see `AttentionBackend.attend`."""
        outputs = queries.new_empty(queries.shape)
        attend = partial(self._fill, layer, sinks)
        if batch.defer is None:
            attend(queries, outputs, batch)
        else:
            batch.defer(attend, queries, outputs, in_window=batch.is_in_window)
        return outputs

    def store_and_attend(
        self, qkv: torch.Tensor, layer: KvLayer, norms: QkNorm | None, batch: ForwardBatch,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Do one after the other: scores of the newest key have to come from the same products as all others."""
        return self.attend(self.store(qkv, layer, norms, batch), layer, batch, sinks)

    def _fill(
        self, layer: KvLayer, sinks: torch.Tensor | None, queries: torch.Tensor, outputs: torch.Tensor,
        batch: ForwardBatch,
    ) -> None:  # fmt: skip
        """Fill `outputs` from `queries`, both [tokens, query_heads * head_dim]; rows that decode come first."""
        assert batch.blocks is None, "tokens of images are refused"
        decoding, height = batch.decode_rows, self._tuning.chunk.height
        if decoding:
            self._launch(self._tuning.decode, 1, slice(decoding), decoding, queries, outputs, layer, batch, sinks)
        if decoding < batch.rows:
            tokens = max(height // self._group, 1)
            # Each row may leave one tile unfilled.
            tiles = (queries.shape[0] - decoding) // tokens + batch.rows - decoding
            part = slice(decoding, batch.rows)
            self._launch(self._tuning.chunk, tokens, part, tiles, queries, outputs, layer, batch, sinks)

    def _launch(
        self, tile: QueryTile, tokens: int, part: slice, tiles: int, queries: torch.Tensor, outputs: torch.Tensor,
        layer: KvLayer, batch: ForwardBatch, sinks: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Attend for a part of the rows, which begins with the first one if these decode, in tiles of tokens."""
        shape, device = self._shape, queries.device
        rows = self._own_rows if batch.table_rows is None else batch.table_rows
        decodes = part.start is None
        count = part.stop - (part.start or 0)
        segments = self._most_segments(batch, tokens)
        parts = self._parts_of(tiles, segments, tokens)
        cells = tiles * shape.kv_heads * segments * tokens * self._group if parts > 1 else 0
        partial_sums = torch.empty(cells * shape.head_dim, dtype=torch.float32, device=device)
        weights = torch.empty(cells * 2, dtype=torch.float32, device=device)
        capped = shape.attention_softcap is not None
        cap = (shape.attention_softcap or 0.0) * _LOG2_E
        scale = shape.scale / shape.attention_softcap if shape.attention_softcap else shape.scale * _LOG2_E
        stride_page, stride_head, stride_token, _ = layer.keys.stride()
        _attend[(shape.kv_heads, tiles, parts)](
            queries, layer.keys, layer.values, outputs, batch.page_table, rows[part], batch.key_lengths[part],
            batch.query_starts[part], partial_sums, weights, self._counters, weights if sinks is None else sinks,
            scale, cap, count, segments, queries.stride(0), stride_page, stride_head, stride_token,
            batch.page_table.stride(0),
            KV_HEADS=shape.kv_heads, GROUP=self._group, HEIGHT=max(tile.height, triton.next_power_of_2(self._group)),
            TOKENS=tokens, HEAD_DIM=shape.head_dim, WIDTH=self._width, PAGE_SIZE=shape.page_size,
            BLOCK=min(_MOST_BLOCK, _BLOCK_COMPONENTS // self._width), SEGMENT=SEGMENT,
            SEARCH=1 if decodes else self._search, DECODES=decodes, IS_CUT=parts > 1,
            WINDOW_LEFT=-1 if shape.window_left is None else shape.window_left, CHUNKED=shape.is_chunked,
            CAPPED=capped, HAS_SINKS=sinks is not None, num_warps=tile.warps, num_stages=tile.stages,
            enable_fp_fusion=False, **launch_options(queries.shape[0]),
        )  # fmt: skip

    def _most_segments(self, batch: ForwardBatch, tokens: int) -> int:
        """Count the segments that the queries of a tile can see."""
        seen, window = batch.max_key_length, self._shape.window_left
        if window is None:
            return -(-seen // SEGMENT)
        return min(-(-seen // SEGMENT), (window + tokens + _MOST_BLOCK) // SEGMENT + 2)

    def _parts_of(self, tiles: int, segments: int, tokens: int) -> int:
        """Return by how many programs a tile's segments are computed."""
        jobs = tiles * self._shape.kv_heads
        cell_bytes = tokens * self._group * (self._shape.head_dim + 2) * 4
        if jobs * segments * cell_bytes > _PARTIAL_BYTES:
            return 1
        return max(min(self._tuning.programs // jobs, segments), 1)

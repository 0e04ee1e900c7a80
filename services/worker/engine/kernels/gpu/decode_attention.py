"""Attention of single queries over paged keys and values, as one Triton program per row, KV head and part.

Nothing is planned on the host: lengths and page tables are read on the device, so a captured launch stays right while
rows grow. Long rows of small batches are cut into parts (flash-decoding); the program that ends last merges them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from services.worker.engine.kernels.gpu.dependent_launch import follow, launch_options
from services.worker.engine.kernels.gpu.elementwise import to_float8

if TYPE_CHECKING:
    from services.worker.engine.kernels.interface import AttentionShape, KvLayer, QkNorm

# The smallest matrix that tensor cores multiply.
_LEAST_QUERIES = 16
_MOST_PARTS = 16
# Of keys, and of values: 64 of 256 components.
_STEP_COMPONENTS = 64 * 256
_LOG2_E = 1.4426950408889634
# Bytes: Triton compiles one program for addresses that are multiples of it, and another for those that are not.
_ALIGNMENT = 16


@triton.jit
def _turned(
    heads, norm, epsilon, cosines, sines, columns, in_head,
    HEAD_DIM: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Return heads [heads, head_dim] from their addresses, normalised and rotated, in their own type."""
    element = heads.dtype.element_ty
    # Halves of a head are rotated against each other: each component needs its partner in the other half.
    partners = tl.where(columns < HEAD_DIM // 2, columns + HEAD_DIM // 2, columns - HEAD_DIM // 2)
    inside = in_head[None, :]
    mine = tl.load(heads + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(heads + partners[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(mine * mine, axis=1) / HEAD_DIM + epsilon)[:, None]
        # Rounded where the reference rounds.
        my_factors = tl.load(norm + columns, mask=in_head, other=0.0)[None, :]
        other_factors = tl.load(norm + partners, mask=in_head, other=0.0)[None, :]
        mine = ((mine * scale).to(norm.dtype.element_ty) * my_factors).to(tl.float32)
        other = ((other * scale).to(norm.dtype.element_ty) * other_factors).to(tl.float32)
    signed = tl.where((columns < HEAD_DIM // 2)[None, :], -other, other)
    return (mine * cosines[None, :] + signed * sines[None, :]).to(element)


@triton.jit
def _scored(products, scale, cap, CAPPED: tl.constexpr):
    """Return scores as exponents to base 2 of products of queries and keys: log2(e) is in `cap` or else in `scale`."""
    scores = products * scale
    if CAPPED:  # cap * tanh(scores)
        scores = cap - 2.0 * cap / (tl.exp(2.0 * scores) + 1.0)
    return scores


@triton.jit
def _sinks_or_nothing(of_sinks, is_first, QUERIES: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Return maximum and sum of exponentials [QUERIES] before any key: the first part begins with the sinks."""
    largest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    if HAS_SINKS:
        # Exponentials are to base 2.
        largest = tl.where(is_first, tl.load(of_sinks) * 1.4426950408889634, largest)
        total = tl.where(is_first, total + 1.0, total)
    return largest, total


@triton.jit
def _first_seen(position, WINDOW_LEFT: tl.constexpr, CHUNKED: tl.constexpr):
    """Return the first position that the query at `position` sees."""
    least = 0
    if CHUNKED:
        least = position // (WINDOW_LEFT + 1) * (WINDOW_LEFT + 1)
    elif WINDOW_LEFT >= 0:
        least = tl.maximum(position - WINDOW_LEFT, 0)
    return least


@triton.jit
def _factor(scales, head, SCALED: tl.constexpr):
    """Return by how much what is stored of a KV head has to be multiplied."""
    factor = 1.0
    if SCALED:
        factor = tl.load(scales + head)
    return factor


@triton.jit
def _narrowed(numbers, pool, scales, head, SCALED: tl.constexpr):
    """Return the keys or values of one KV head as `pool` stores them."""
    if SCALED:
        return to_float8(numbers, tl.load(scales + head))
    return numbers.to(pool.dtype.element_ty)


@triton.jit(
    do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["page_table", "rows", "lengths", "positions"]
)
def _decode(
    qkv, keys, values, key_scales, value_scales, outputs, page_table, rows, lengths, partial, weights, counters,
    positions, angles, query_norm, key_norm, epsilon, sinks,
    scale, cap, stride_token_in, stride_page, stride_head, stride_token, stride_table,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, LEAST_PART: tl.constexpr,
    MERGED: tl.constexpr, STORES: tl.constexpr, NORMED: tl.constexpr, WINDOW_LEFT: tl.constexpr,
    CHUNKED: tl.constexpr, CAPPED: tl.constexpr, HAS_SINKS: tl.constexpr, SCALED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    # Of products: keys and values in FP8 are widened for them.
    element: tl.constexpr = outputs.dtype.element_ty if SCALED else keys.dtype.element_ty
    head = tl.program_id(0)
    index = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    length = tl.load(lengths + index)
    table = page_table + tl.load(rows + index).to(tl.int64) * stride_table
    # A program that stores takes the newest token from its input, the others find it in the pool.
    stored = length - 1 if STORES else length
    least = _first_seen(length - 1, WINDOW_LEFT=WINDOW_LEFT, CHUNKED=CHUNKED)
    if PARTS == 1:
        start = least
        end = stored
        parts = 1
    else:
        share = tl.maximum(tl.cdiv(tl.cdiv(stored - least, PARTS), BLOCK) * BLOCK, LEAST_PART)
        parts = tl.maximum(tl.cdiv(stored - least, share), 1)
        start = least + part * share
        end = tl.minimum(start + share, stored)
    if OVERLAPS:
        follow()
    if part < parts:
        group = tl.arange(0, QUERIES)
        columns = tl.arange(0, WIDTH)
        in_group = group < GROUP
        in_head = columns < HEAD_DIM
        of_query = (head * GROUP + group)[:, None] * HEAD_DIM + columns[None, :]
        of_token = qkv + index * stride_token_in
        # Rows of the tile beyond the group repeat its first head.
        of_heads = of_token + (head * GROUP + tl.where(in_group, group, 0))[:, None] * HEAD_DIM
        of_sinks = sinks + head * GROUP + tl.where(in_group, group, 0)
        largest, total = _sinks_or_nothing(of_sinks, part == 0, QUERIES=QUERIES, HAS_SINKS=HAS_SINKS)
        sums = tl.zeros([QUERIES, WIDTH], tl.float32)
        scale *= _factor(key_scales, head, SCALED=SCALED)
        if STORES:
            angle = angles + tl.load(positions + index) * HEAD_DIM
            half = tl.where(columns < HEAD_DIM // 2, columns, columns - HEAD_DIM // 2)
            cosines = tl.load(angle + half, mask=in_head, other=0.0)
            sines = tl.load(angle + HEAD_DIM // 2 + half, mask=in_head, other=0.0)
            query = _turned(
                of_heads, query_norm, epsilon, cosines, sines, columns, in_head, HEAD_DIM=HEAD_DIM, NORMED=NORMED
            )
            query = tl.where(in_head[None, :], query, 0.0).to(element)
            if part == 0:
                one = tl.arange(0, 1)
                of_key = of_token + ((KV_HEADS * GROUP + head + one) * HEAD_DIM)[:, None]
                new_key = _turned(
                    of_key, key_norm, epsilon, cosines, sines, columns, in_head, HEAD_DIM=HEAD_DIM, NORMED=NORMED
                )
                new_key = tl.where(in_head[None, :], new_key, 0.0)
                of_value = of_token + ((KV_HEADS * GROUP + KV_HEADS + head + one) * HEAD_DIM)[:, None]
                new_value = tl.load(of_value + columns[None, :], mask=in_head[None, :], other=0.0)
                new_key = _narrowed(new_key, keys, key_scales, head, SCALED=SCALED)
                new_value = _narrowed(new_value, values, value_scales, head, SCALED=SCALED)
                page = tl.load(table + (length - 1) // PAGE_SIZE).to(tl.int64)
                target = page * stride_page + head * stride_head + ((length - 1) % PAGE_SIZE) * stride_token
                tl.store(keys + target + columns[None, :], new_key, mask=in_head[None, :])
                tl.store(values + target + columns[None, :], new_value, mask=in_head[None, :])
                products = tl.sum(query.to(tl.float32) * new_key.to(tl.float32), axis=1)
                score = _scored(products, scale, cap, CAPPED=CAPPED)
                larger = tl.maximum(largest, score)
                total = total * tl.exp2(largest - larger) + tl.exp2(score - larger)
                sums = tl.exp2(score - larger)[:, None] * new_value.to(tl.float32)
                largest = larger
        else:
            query = tl.load(of_heads + columns[None, :], mask=in_head[None, :], other=0.0).to(element)
        steps = tl.arange(0, BLOCK)
        for at in range(start, end, BLOCK):
            tokens = at + steps
            inside = tokens < end
            page = tl.load(table + tokens // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
            place = page * stride_page + head * stride_head + (tokens % PAGE_SIZE) * stride_token
            key = tl.load(keys + place[None, :] + columns[:, None], mask=inside[None, :] & in_head[:, None], other=0.0)
            value = tl.load(
                values + place[:, None] + columns[None, :], mask=inside[:, None] & in_head[None, :], other=0.0
            )
            scores = _scored(tl.dot(query, key.to(element)), scale, cap, CAPPED=CAPPED)
            scores = tl.where(inside[None, :], scores, -float("inf"))
            larger = tl.maximum(largest, tl.max(scores, axis=1))
            shrink = tl.exp2(largest - larger)
            shares = tl.exp2(scores - larger[:, None])
            total = total * shrink + tl.sum(shares, axis=1)
            sums = sums * shrink[:, None] + tl.dot(shares.to(element), value.to(element))
            largest = larger
        sums *= _factor(value_scales, head, SCALED=SCALED)
        mine = in_group[:, None] & in_head[None, :]
        of_row = index * KV_HEADS * GROUP * HEAD_DIM
        if parts == 1:
            tl.store(outputs + of_row + of_query, (sums / total[:, None]).to(outputs.dtype.element_ty), mask=mine)
        else:
            job = index * KV_HEADS + head
            at_part = (job * PARTS + part) * GROUP
            tl.store(partial + (at_part + group)[:, None] * HEAD_DIM + columns[None, :], sums, mask=mine)
            tl.store(weights + (at_part + group) * 2, largest, mask=in_group)
            tl.store(weights + (at_part + group) * 2 + 1, total, mask=in_group)
            # Every thread's part must be written before the count says so.
            tl.debug_barrier()
            finished = tl.atomic_add(counters + job, 1, sem="acq_rel")
            if finished == parts - 1:
                tl.debug_barrier()
                # All parts at once: one after another, each would wait for memory.
                others = tl.arange(0, PARTS)
                heads = tl.arange(0, MERGED)
                in_job = (heads < GROUP)[:, None] & (others < parts)[None, :]
                cells = (job * PARTS + others)[None, :] * GROUP + heads[:, None]
                peaks = tl.load(weights + cells * 2, mask=in_job, other=-float("inf"), cache_modifier=".cg")
                masses = tl.load(weights + cells * 2 + 1, mask=in_job, other=0.0, cache_modifier=".cg")
                found = tl.load(
                    partial + cells[:, :, None] * HEAD_DIM + columns[None, None, :],
                    mask=in_job[:, :, None] & in_head[None, None, :], other=0.0, cache_modifier=".cg",
                )  # fmt: skip
                peak = tl.max(peaks, axis=1)
                shares_of = tl.where(in_job, tl.exp2(peaks - peak[:, None]), 0.0)
                mass = tl.sum(shares_of * masses, axis=1)
                merged = tl.sum(found * shares_of[:, :, None], axis=1) / mass[:, None]
                target = of_row + (head * GROUP + heads)[:, None] * HEAD_DIM + columns[None, :]
                is_mine = (heads < GROUP)[:, None] & in_head[None, :]
                tl.store(outputs + target, merged.to(outputs.dtype.element_ty), mask=is_mine)
                tl.store(counters + job, 0)


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """How the work is cut: keys per inner step, warps, pipeline stages, and keys below which a part is not worth it."""

    block: int = 64
    warps: int = 2
    stages: int = 3
    least_part: int = 64
    programs: int = 132 * 4
    """Programs that keep the device busy; rows are cut into parts until there are so many."""

    @classmethod
    def of(cls, shape: AttentionShape) -> DecodeTuning:
        """Return the tuning for heads of `shape`: a step's keys and values have to fit into shared memory."""
        return cls(block=min(cls().block, _STEP_COMPONENTS // triton.next_power_of_2(shape.head_dim)))


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """The program that a launch has compiled; it takes all arguments of the source by position, `constants` last."""

    program: Any  # of Triton, which is untyped
    constants: tuple[object, ...]


class DecodeAttention:
    """Attention of one query per row, with scratch memory for rows that are computed in parts."""

    def __init__(
        self, shape: AttentionShape, max_rows: int, device: torch.device, tuning: DecodeTuning | None = None
    ) -> None:
        """Serve up to `max_rows` rows at once."""
        self.tuning = tuning or DecodeTuning.of(shape)
        self._shape = shape
        # Only small batches are cut, so that the scratch is bounded by the number of programs, not by rows.
        jobs = max(max_rows, 1) * shape.kv_heads
        group = shape.query_heads // shape.kv_heads
        cells = max(
            min(rows * shape.kv_heads, jobs) * self.parts_of(rows) for rows in range(1, max_rows + 1)
        ) * group  # fmt: skip
        self._constants = {
            "KV_HEADS": shape.kv_heads, "GROUP": group, "QUERIES": max(triton.next_power_of_2(group), _LEAST_QUERIES),
            "HEAD_DIM": shape.head_dim, "WIDTH": max(triton.next_power_of_2(shape.head_dim), 16),
            "PAGE_SIZE": shape.page_size, "BLOCK": self.tuning.block, "LEAST_PART": self.tuning.least_part,
            "MERGED": triton.next_power_of_2(group),
            "WINDOW_LEFT": -1 if shape.window_left is None else shape.window_left,
            "CHUNKED": shape.is_chunked, "CAPPED": shape.attention_softcap is not None,
        }  # fmt: skip
        # What earlier launches have compiled, by all that Triton compiles a program for.
        self._compiled: dict[tuple[object, ...], CompiledProgram] = {}
        self._partial = torch.zeros(cells * shape.head_dim, dtype=torch.float32, device=device)
        self._weights = torch.zeros(cells * 2, dtype=torch.float32, device=device)
        self._counters = torch.zeros(jobs, dtype=torch.int32, device=device)

    def parts_of(self, rows: int) -> int:
        """Return into how many parts rows of a batch of `rows` are cut at most: a power of two."""
        wanted = self.tuning.programs // (rows * self._shape.kv_heads)
        return min(1 << max(wanted.bit_length() - 1, 0), _MOST_PARTS) if wanted > 1 else 1

    def __call__(
        self, queries: torch.Tensor, layer: KvLayer, page_table: torch.Tensor, rows: torch.Tensor,
        lengths: torch.Tensor, sinks: torch.Tensor | None = None, outputs: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attend with keys and values that are stored already; return [batch, query_heads * head_dim].

        Args:
            queries: [batch, query_heads * head_dim], rows may be strided.
            layer: keys and values [pages, kv_heads, page_size, head_dim].
            page_table: [slots, pages] int32, rows may be strided.
            rows: [batch] int32, the table's row of each query.
            lengths: [batch] int32, keys that each query sees.
            sinks: [query_heads] float32, see `AttentionBackend.attend`.
            outputs: what is filled and returned, contiguous, if that is there already.
        """
        return self._launch(queries, layer, page_table, rows, lengths, None, None, sinks, outputs)

    def store_and_attend(
        self, qkv: torch.Tensor, layer: KvLayer, page_table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor], norms: QkNorm | None, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Do the same from projections [batch, (query_heads + 2 kv_heads) * head_dim] of each row's newest token.

        Its queries and keys are normalised by `norms` and rotated, keys and values stored at the end of its row.
        `rotary` are the positions [batch] int64 of the tokens, and the angles [positions, head_dim] of all positions.
        """
        return self._launch(qkv, layer, page_table, rows, lengths, rotary, norms, sinks)

    def _launch(
        self, inputs: torch.Tensor, layer: KvLayer, page_table: torch.Tensor, rows: torch.Tensor,
        lengths: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor] | None, norms: QkNorm | None,
        sinks: torch.Tensor | None, outputs: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        shape = self._shape
        batch = inputs.shape[0]
        if outputs is None:
            outputs = inputs.new_empty(batch, shape.query_width)
        scales = (self._weights,) * 2 if layer.scales is None else (layer.scales.keys, layer.scales.values)
        cap = (shape.attention_softcap or 0.0) * _LOG2_E
        scale = shape.scale / shape.attention_softcap if shape.attention_softcap else shape.scale * _LOG2_E
        positions, angles = (lengths, inputs) if rotary is None else rotary
        query_norm, key_norm, epsilon = (norms.query, norms.key, norms.epsilon) if norms else (inputs, inputs, 0.0)
        of_sinks = self._weights if sinks is None else sinks
        strides = (inputs.stride(0), *layer.keys.stride()[:3], page_table.stride(0))
        arguments = (
            inputs, layer.keys, layer.values, *scales, outputs, page_table, rows, lengths,
            self._partial, self._weights, self._counters, positions, angles, query_norm, key_norm, epsilon, of_sinks,
            scale, cap, *strides,
        )  # fmt: skip
        given = (inputs, layer.keys, layer.values, *scales, outputs, angles, query_norm, key_norm, of_sinks)
        addresses = 0
        for tensor in given:
            addresses |= tensor.data_ptr()
        is_aligned = addresses % _ALIGNMENT == 0
        key = (
            batch, strides, rotary is None, norms is None, sinks is None, layer.scales is None,
            *[tensor.dtype for tensor in (*given, page_table, rows, lengths, positions)],
        )  # fmt: skip
        grid = (shape.kv_heads, batch, self.parts_of(batch))
        compiled = self._compiled.get(key) if is_aligned else None
        if compiled is not None:
            # A launch through Triton's compiler looks at each argument anew, which takes longer than the launch.
            compiled.program[grid](*arguments, *compiled.constants)
            return outputs
        options = launch_options(batch)
        constants = self._constants | {
            "PARTS": grid[2], "STORES": rotary is not None, "NORMED": norms is not None,
            "HAS_SINKS": sinks is not None, "SCALED": layer.scales is not None, "OVERLAPS": options["OVERLAPS"],
        }  # fmt: skip
        program = _decode[grid](
            *arguments, **constants, num_warps=self.tuning.warps, num_stages=self.tuning.stages,
            **{name: value for name, value in options.items() if name not in constants},
        )  # fmt: skip
        # Triton's interpreter compiles nothing.
        if program is not None and is_aligned:
            in_order = (constants[name] for name in _decode.arg_names[len(arguments) :])
            self._compiled[key] = CompiledProgram(program, tuple(in_order))
        return outputs

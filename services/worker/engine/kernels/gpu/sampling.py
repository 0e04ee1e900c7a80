"""Choosing tokens on the device, without sorting and without asking the host.

The same function as `engine/sampling`: one uniform number per row from Philox keyed by (seed, position), and the
inverse of the cumulative distribution over what the filters keep. The vocabulary is surveyed in chunks (largest entry
and mass of each); then one program per row picks the chunk and the token in it. Filters need one threshold per row,
found by narrowing down the ordered bit patterns of logits, four ways at a time: at most 8 readings of a row as the
model gives it, in 16 bits, and 16 of a processed one, in 32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.worker.engine.kernels.gpu.device_batch import (
    LENGTH,
    MIN_P,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)

CHUNK = 4096
_ORDER_BLOCK = 4096
_LOG2_E = tl.constexpr(1.4426950408889634)
# As in `sampling/table.py`: argmax is used below this.
_LEAST_TEMPERATURE = tl.constexpr(1e-5)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _survey(
    logits, slots, cells, thresholds, peaks, best, masses, vocabulary, chunks, stride_cells,
    FILTERED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row = cells + tl.load(slots + index).to(tl.int64) * stride_cells
    temperature = tl.load(row + TEMPERATURE).to(tl.float32, bitcast=True)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + index * vocabulary + ids, mask=ids < vocabulary, other=-float("inf")).to(tl.float32)
    if FILTERED:
        values = tl.where(values >= tl.load(thresholds + index), values, -float("inf"))
    peak, place = tl.max(values, axis=0, return_indices=True)
    tl.store(peaks + index * chunks + chunk, peak)
    tl.store(best + index * chunks + chunk, chunk * CHUNK + place)
    inverse = _LOG2_E / tl.maximum(temperature, _LEAST_TEMPERATURE)
    shares = tl.where(values > -float("inf"), tl.exp2((values - peak) * inverse), 0.0)
    tl.store(masses + index * chunks + chunk, tl.sum(shares, axis=0))


@triton.jit
def _ordered_bits(values):
    """Map floats to integers from 0 on, in the same order."""
    if values.dtype == tl.float32:
        wide = values.to(tl.uint32, bitcast=True).to(tl.int64)
        ordered = tl.where(wide >= 2147483648, 4294967295 - wide, wide + 2147483648)
    else:
        bits = values.to(tl.uint16, bitcast=True).to(tl.int32)
        ordered = tl.where(bits >= 32768, 65535 - bits, bits + 32768)
    return ordered


@triton.jit
def _from_ordered_bits(key, like):
    if like.dtype.element_ty == tl.float32:
        wide = tl.where(key >= 2147483648, key - 2147483648, 4294967295 - key)
        value = wide.to(tl.uint32).to(tl.float32, bitcast=True)
    else:
        bits = tl.where(key >= 32768, key - 32768, 65535 - key)
        value = bits.to(tl.uint16).to(like.dtype.element_ty, bitcast=True).to(tl.float32)
    return value


@triton.jit
def _amounts(
    logits, vocabulary, first, second, third, floor, peak, inverse, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the amount at or above each of three keys: tokens, or their mass relative to the peak's."""
    steps = tl.arange(0, BLOCK)
    above_first = tl.zeros([BLOCK], tl.float32)
    above_second = tl.zeros([BLOCK], tl.float32)
    above_third = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        inside = start + steps < vocabulary
        raw = tl.load(logits + start + steps, mask=inside, other=-float("inf"))
        keys = _ordered_bits(raw)
        each = tl.exp2((raw.to(tl.float32) - peak) * inverse) if BY_MASS else tl.full([BLOCK], 1.0, tl.float32)
        each = tl.where(inside & (keys >= floor), each, 0.0)
        above_first += tl.where(keys >= first, each, 0.0)
        above_second += tl.where(keys >= second, each, 0.0)
        above_third += tl.where(keys >= third, each, 0.0)
    return tl.sum(above_first, axis=0), tl.sum(above_second, axis=0), tl.sum(above_third, axis=0)


@triton.jit
def _least_key(logits, vocabulary, low, high, wanted, floor, peak, inverse, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest key in [low, high) with at least `wanted` at or above it; `low` is known to have it."""
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        first = low + step
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        one, two, three = _amounts(
            logits, vocabulary, first, second, third, floor, peak, inverse, BY_MASS=BY_MASS, BLOCK=BLOCK
        )
        if one < wanted:
            high = first
        elif two < wanted:
            low = first
            high = second
        elif three < wanted:
            low = second
            high = third
        else:
            low = third
    return low


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _find_thresholds(
    logits, slots, cells, peaks, masses, thresholds, vocabulary, chunks, stride_cells,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = cells + tl.load(slots + index).to(tl.int64) * stride_cells
    temperature = tl.load(row + TEMPERATURE).to(tl.float32, bitcast=True)
    top_k = tl.load(row + TOP_K)
    top_p = tl.load(row + TOP_P).to(tl.float32, bitcast=True)
    min_p = tl.load(row + MIN_P).to(tl.float32, bitcast=True)
    threshold = tl.full([], -float("inf"), tl.float32)
    if temperature >= _LEAST_TEMPERATURE:
        of_row = logits + index * vocabulary
        columns = tl.arange(0, CHUNKS)
        in_row = columns < chunks
        tops = tl.load(peaks + index * chunks + columns, mask=in_row, other=-float("inf"))
        peak = tl.max(tops, axis=0)
        inverse = _LOG2_E / temperature
        high = _ordered_bits(peak.to(logits.dtype.element_ty)) + 1
        lowest = high * 0
        floor = lowest
        if top_k < vocabulary:
            floor = _least_key(
                of_row,
                vocabulary,
                lowest,
                high,
                top_k.to(tl.float32),
                lowest,
                peak,
                inverse,
                BY_MASS=False,
                BLOCK=BLOCK,
            )
        if top_p < 1.0:
            if top_k < vocabulary:
                mass, _, _ = _amounts(
                    of_row, vocabulary, floor, floor, floor, floor, peak, inverse, BY_MASS=True, BLOCK=BLOCK
                )
            else:
                parts = tl.load(masses + index * chunks + columns, mask=in_row, other=0.0)
                mass = tl.sum(tl.where(in_row, parts * tl.exp2((tops - peak) * inverse), 0.0), axis=0)
            # All of the mass reaches any share of it, but for rounding.
            floor = _least_key(
                of_row, vocabulary, floor, high, top_p * mass, floor, peak, inverse, BY_MASS=True, BLOCK=BLOCK
            )
        if floor > 0:
            threshold = _from_ordered_bits(floor, logits)
        if min_p > 0.0:
            threshold = tl.maximum(threshold, peak + tl.log2(min_p) / inverse)
    tl.store(thresholds + index, threshold)


@triton.jit(do_not_specialize_on_alignment=["slots", "token_ids"])
def _choose(
    logits, slots, cells, thresholds, peaks, best, masses, token_ids, vocabulary, chunks, stride_cells,
    FILTERED: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = cells + tl.load(slots + index).to(tl.int64) * stride_cells
    temperature = tl.load(row + TEMPERATURE).to(tl.float32, bitcast=True)
    columns = tl.arange(0, CHUNKS)
    in_row = columns < chunks
    tops = tl.load(peaks + index * chunks + columns, mask=in_row, other=-float("inf"))
    peak, winner = tl.max(tops, axis=0, return_indices=True)
    if temperature < _LEAST_TEMPERATURE:
        tl.store(token_ids + index, tl.load(best + index * chunks + winner))
    else:
        inverse = _LOG2_E / temperature
        parts = tl.load(masses + index * chunks + columns, mask=in_row, other=0.0)
        parts = tl.where(in_row, parts * tl.exp2((tops - peak) * inverse), 0.0)
        sums = tl.cumsum(parts, axis=0)
        total = tl.max(sums, axis=0)
        seed_low = tl.load(row + SEED_LOW).to(tl.uint32, bitcast=True)
        seed_high = tl.load(row + SEED_HIGH).to(tl.uint32, bitcast=True)
        seed = seed_low.to(tl.uint64) | (seed_high.to(tl.uint64) << 32)
        position = tl.load(row + LENGTH).to(tl.uint32, bitcast=True)
        nothing = position * 0
        word, _, _, _ = tl.philox(seed, position, nothing, nothing, nothing, 10)
        target = (word >> 8).to(tl.float32) * (2.0**-24) * total
        # The first chunk whose cumulative mass exceeds the target; rounding may leave none, then the last with mass.
        chunk = tl.minimum(
            tl.sum((in_row & (sums <= target)).to(tl.int32), axis=0),
            tl.sum((in_row & (sums < total)).to(tl.int32), axis=0),
        )
        before = tl.sum(tl.where(columns < chunk, parts, 0.0), axis=0)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        values = tl.load(logits + index * vocabulary + ids, mask=ids < vocabulary, other=-float("inf")).to(tl.float32)
        if FILTERED:
            values = tl.where(values >= tl.load(thresholds + index), values, -float("inf"))
        shares = tl.where(values > -float("inf"), tl.exp2((values - peak) * inverse), 0.0)
        inner = tl.cumsum(shares, axis=0)
        place = tl.minimum(
            tl.sum((inner <= target - before).to(tl.int32), axis=0),
            tl.sum((inner < tl.max(inner, axis=0)).to(tl.int32), axis=0),
        )
        tl.store(token_ids + index, (chunk * CHUNK + place).to(tl.int32))


class TokenChooser:
    """Scratch memory of the sampler for up to `max_rows` rows."""

    def __init__(self, max_rows: int, vocabulary: int, device: torch.device) -> None:
        """Choose among `vocabulary` tokens."""
        self._vocabulary = vocabulary
        self._chunks = triton.cdiv(vocabulary, CHUNK)
        cells = (max_rows, self._chunks)
        self._peaks = torch.empty(cells, dtype=torch.float32, device=device)
        self._best = torch.empty(cells, dtype=torch.int32, device=device)
        self._masses = torch.empty(cells, dtype=torch.float32, device=device)
        self._thresholds = torch.empty(max_rows, dtype=torch.float32, device=device)

    def choose(
        self, logits: torch.Tensor, slots: torch.Tensor, cells: torch.Tensor, token_ids: torch.Tensor, *, filtered: bool
    ) -> None:
        """Choose the next token of each row.

        Args:
            logits: [rows, vocabulary] bfloat16, float16 or float32, contiguous.
            slots: [rows] int32.
            cells: the rows' state.
            token_ids: [rows] int32, filled.
            filtered: whether any row has top-k, top-p or min-p; if not, they are not looked at.
        """
        rows = logits.shape[0]
        stride, chunks = cells.stride(0), triton.next_power_of_2(self._chunks)
        for surveys_kept in (False, True) if filtered else (False,):
            if surveys_kept:
                _find_thresholds[(rows,)](
                    logits, slots, cells, self._peaks, self._masses, self._thresholds, self._vocabulary, self._chunks,
                    stride, CHUNKS=chunks, BLOCK=_ORDER_BLOCK, num_warps=16,
                )  # fmt: skip
            _survey[(rows, self._chunks)](
                logits, slots, cells, self._thresholds, self._peaks, self._best, self._masses, self._vocabulary,
                self._chunks, stride, FILTERED=surveys_kept, CHUNK=CHUNK, num_warps=4,
            )  # fmt: skip
        _choose[(rows,)](
            logits, slots, cells, self._thresholds, self._peaks, self._best, self._masses, token_ids,
            self._vocabulary, self._chunks, stride, FILTERED=filtered, CHUNKS=chunks, CHUNK=CHUNK, num_warps=8,
        )  # fmt: skip

"""Logits processors on the device, equal to those of `engine/sampling/logits_processors.py`.

A row's parameters are a line in tables on the device: how often each token occurs in it, and one bit per token for
masks. A pass in which any row needs a processor is copied to float32 as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from services.worker.engine.kernels.gpu.device_batch import (
    FREQUENCY_PENALTY,
    LENGTH,
    NEEDS,
    PRESENCE_PENALTY,
    REPETITION_PENALTY,
    STOPS_FROM,
)
from services.worker.engine.sampling.table import BANNED_LOGIT, Needs

if TYPE_CHECKING:
    import torch

# Beside a token's number of occurrences in the output: it occurs in the prompt.
IN_PROMPT = 1 << 30

_BLOCK = 2048
_COUNT_BLOCK = 256
_BIAS_BLOCK = 1024

_IN_PROMPT = tl.constexpr(IN_PROMPT)
_RULED_OUT = tl.constexpr(BANNED_LOGIT)
_PENALTIES = tl.constexpr(int(Needs.PENALTIES))
_BIAS = tl.constexpr(int(Needs.BIAS))
_MIN_TOKENS = tl.constexpr(int(Needs.MIN_TOKENS))
_GRAMMAR = tl.constexpr(int(Needs.GRAMMAR))
_CONSTRAINTS = tl.constexpr(int(Needs.CONSTRAINTS))


@dataclass(frozen=True, slots=True)
class LogitsProcessorTables:
    """One line per row slot in each; only lines of rows that need them mean anything.

    Bits are those of 32 tokens in an int32, the lowest first.
    """

    counts: torch.Tensor  # [slots, vocabulary] int32, occurrences in the output, and IN_PROMPT
    allowed: torch.Tensor  # [slots, words] int32, bits of what may be drawn at all
    before_minimum: torch.Tensor  # [slots, words] int32, bits of what may be drawn while the row is too short to stop
    grammar: torch.Tensor  # [slots, words] int32, bits of what the row's grammar allows next
    bias_ids: torch.Tensor  # [slots, biases] int32, -1 after the last one
    bias_values: torch.Tensor  # [slots, biases] float32


@triton.jit
def _has_bit(table, slot, ids, inside, words):
    word = tl.load(table + slot * words + ids // 32, mask=inside, other=0)
    return ((word >> (ids % 32)) & 1) != 0


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _process(
    logits, slots, cells, counts, allowed, before_minimum, grammar, processed, vocabulary, words, stride_cells,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + index).to(tl.int64)
    row = cells + slot * stride_cells
    needs = tl.load(row + NEEDS)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocabulary
    values = tl.load(logits + index * vocabulary + ids, mask=inside, other=0.0).to(tl.float32)
    if (needs & _PENALTIES) != 0:
        counted = tl.load(counts + slot * vocabulary + ids, mask=inside, other=0)
        repetition = tl.load(row + REPETITION_PENALTY).to(tl.float32, bitcast=True)
        presence = tl.load(row + PRESENCE_PENALTY).to(tl.float32, bitcast=True)
        frequency = tl.load(row + FREQUENCY_PENALTY).to(tl.float32, bitcast=True)
        repeated = tl.where(values > 0, values / repetition, values * repetition)
        values = tl.where(counted != 0, repeated, values)
        times = counted & (_IN_PROMPT - 1)
        values = tl.where(times > 0, values - presence - frequency * times.to(tl.float32), values)
    if (needs & _CONSTRAINTS) != 0:
        values = tl.where(_has_bit(allowed, slot, ids, inside, words), values, _RULED_OUT)
    is_short = tl.load(row + LENGTH) < tl.load(row + STOPS_FROM)
    if is_short & ((needs & _MIN_TOKENS) != 0):
        values = tl.where(_has_bit(before_minimum, slot, ids, inside, words), values, -float("inf"))
    if (needs & _GRAMMAR) != 0:
        values = tl.where(_has_bit(grammar, slot, ids, inside, words), values, -float("inf"))
    tl.store(processed + index * vocabulary + ids, values, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _add_bias(slots, cells, bias_ids, bias_values, processed, vocabulary, biases, stride_cells, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + index).to(tl.int64)
    if (tl.load(cells + slot * stride_cells + NEEDS) & _BIAS) != 0:
        for start in range(0, biases, BLOCK):
            at = start + tl.arange(0, BLOCK)
            ids = tl.load(bias_ids + slot * biases + at, mask=at < biases, other=-1)
            values = tl.load(bias_values + slot * biases + at, mask=at < biases, other=0.0)
            place = processed + index * vocabulary + ids
            # A banned token stays banned: a bias does not change BANNED_LOGIT noticeably.
            tl.store(place, tl.load(place, mask=ids >= 0, other=0.0) + values, mask=ids >= 0)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots", "token_ids"])
def _count(slots, cells, token_ids, counts, vocabulary, count, stride_cells, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + at, mask=at < count, other=0).to(tl.int64)
    needs = tl.load(cells + slot * stride_cells + NEEDS, mask=at < count, other=0)
    counts_it = (needs & _PENALTIES) != 0
    place = counts + slot * vocabulary + tl.load(token_ids + at, mask=at < count, other=0)
    tl.store(place, tl.load(place, mask=counts_it, other=0) + 1, mask=counts_it)


def process_logits(
    logits: torch.Tensor,
    slots: torch.Tensor,
    cells: torch.Tensor,
    tables: LogitsProcessorTables,
    processed: torch.Tensor,
) -> None:
    """Fill `processed` with the logits after all processors.

    Args:
        logits: [rows, vocabulary] of any float type, contiguous.
        slots: [rows] int32; padding needs nothing, so that its line is never looked for.
        cells: the rows' state.
        tables: what they ask for.
        processed: [rows, vocabulary] float32.
    """
    rows, vocabulary = logits.shape
    stride, biases = cells.stride(0), tables.bias_ids.shape[1]
    _process[(rows, triton.cdiv(vocabulary, _BLOCK))](
        logits, slots, cells, tables.counts, tables.allowed, tables.before_minimum, tables.grammar, processed,
        vocabulary, tables.allowed.shape[1], stride, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    _add_bias[(rows,)](
        slots, cells, tables.bias_ids, tables.bias_values, processed, vocabulary, biases, stride,
        BLOCK=_BIAS_BLOCK, num_warps=4,
    )  # fmt: skip


def count(slots: torch.Tensor, cells: torch.Tensor, token_ids: torch.Tensor, tables: LogitsProcessorTables) -> None:
    """Count the token that each of `slots` [rows] int32 got in the lines of rows with penalties; each occurs once."""
    rows, vocabulary = slots.shape[0], tables.counts.shape[1]
    _count[(triton.cdiv(rows, _COUNT_BLOCK),)](
        slots, cells, token_ids, tables.counts, vocabulary, rows, cells.stride(0), BLOCK=_COUNT_BLOCK, num_warps=4
    )

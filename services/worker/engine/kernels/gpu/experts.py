"""MoE as two grouped products, planned on the device: a captured pass serves any routing.

Pairs of token and expert are sorted by expert and cut into blocks of one expert each. How many blocks there are depends
on the routing, so as many programs are launched as there can be at most, and those without a block end at once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from services.worker.engine.kernels.gpu.elementwise import activated
from services.worker.engine.kernels.gpu.fp8_linear import quantise_rows
from services.worker.engine.model.config import Activation
from services.worker.engine.quantization.fp8 import FP8, Fp8Matrix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.worker.engine.kernels.interface import ExpertMatrices


@triton.jit
def _grouped_product(
    inputs, weight, input_scales, weight_scales, routing_weights, outputs, order, starts, first_blocks, last_block,
    width, columns, gated_offset, stride_expert, stride_scales,
    PER_TOKEN: tl.constexpr, EXPERTS: tl.constexpr, SEARCH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    IS_FIRST: tl.constexpr, GELU: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Multiply a block of pairs with their expert's matrix.

    The first product takes its inputs from the pairs' tokens and gates them, the second one takes those results, weighs
    them and puts them back to the pairs' places. Both take FP8 on both sides, and scale what comes out, if SCALED.
    """
    block = tl.program_id(1)
    if block >= tl.load(last_block):
        return
    experts = tl.arange(0, SEARCH)
    firsts = tl.load(first_blocks + experts, mask=experts < EXPERTS, other=2147483647)
    expert = (tl.sum((firsts <= block).to(tl.int32), axis=0) - 1).to(tl.int64)
    rows = tl.load(starts + expert) + (block - tl.load(first_blocks + expert)) * ROWS + tl.arange(0, ROWS)
    inside = rows < tl.load(starts + expert + 1)
    pairs = tl.load(order + rows, mask=inside, other=0)
    sources = pairs // PER_TOKEN if IS_FIRST else rows.to(tl.int64)
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = at < columns
    steps = tl.arange(0, DEPTH)
    at_inputs = inputs + sources[:, None] * width + steps[None, :]
    at_weight = weight + expert * stride_expert + at.to(tl.int64)[None, :] * width + steps[:, None]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    gated_sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    # Hopper's own sums of FP8 have 14 bits: after so many they are added to float32.
    imprecise: tl.constexpr = DEPTH if SCALED else 0
    for start in range(0, width, DEPTH):
        in_width = start + steps < width
        given = tl.load(at_inputs + start, mask=inside[:, None] & in_width[None, :], other=0.0)
        mask = in_width[:, None] & in_columns[None, :]
        sums += tl.dot(given, tl.load(at_weight + start, mask=mask, other=0.0), max_num_imprecise_acc=imprecise)
        if IS_FIRST:
            gated = tl.load(at_weight + gated_offset + start, mask=mask, other=0.0)
            gated_sums += tl.dot(given, gated, max_num_imprecise_acc=imprecise)
    if SCALED:
        scales = weight_scales + expert * stride_scales + at
        of_inputs = tl.load(input_scales + sources, mask=inside, other=0.0)[:, None]
        sums *= of_inputs * tl.load(scales, mask=in_columns, other=0.0)[None, :]
        if IS_FIRST:
            gated_sums *= of_inputs * tl.load(scales + columns, mask=in_columns, other=0.0)[None, :]
    element = outputs.dtype.element_ty
    if IS_FIRST:
        # Rounded where the reference rounds.
        bent = activated(sums.to(element).to(tl.float32), GELU=GELU).to(element).to(tl.float32)
        results = bent * gated_sums.to(element).to(tl.float32)
        targets = rows.to(tl.int64)
    else:
        results = (
            sums.to(element).to(tl.float32)
            * tl.load(routing_weights + pairs, mask=inside, other=0.0).to(tl.float32)[:, None]
        )
        targets = pairs
    mask = inside[:, None] & in_columns[None, :]
    tl.store(outputs + targets[:, None] * columns + at[None, :], results.to(element), mask=mask)


@dataclass(frozen=True, slots=True)
class ExpertTuning:
    """How a product is cut: pairs and columns of a block, inputs per step, warps and pipeline stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# By pairs per expert, ascending: few are bound by reading the weights, many by multiplying.
_FEW_PAIRS = ExpertTuning(rows=16, columns=64, depth=128, warps=4, stages=3)
_MANY_PAIRS = ExpertTuning(rows=64, columns=128, depth=64, warps=8, stages=3)
_MANY = 32


def tuning_for(pairs: int, experts: int) -> ExpertTuning:
    """Return how to cut products of `pairs` pairs over `experts` experts."""
    return _MANY_PAIRS if pairs >= _MANY * experts else _FEW_PAIRS


@dataclass(frozen=True, slots=True)
class _Stack:
    """One matrix of each expert, in FP8 if there are scales."""

    values: torch.Tensor  # [experts, out, in]
    scales: torch.Tensor | None  # [experts, out] float32

    @classmethod
    def empty(cls, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, *, scaled: bool) -> _Stack:
        scales = torch.empty(shape[:2], device=device) if scaled else None
        return cls(torch.empty(shape, dtype=FP8 if scaled else dtype, device=device), scales)

    def put(self, expert: int, rows: slice, matrix: torch.Tensor | Fp8Matrix) -> None:
        """Copy a matrix, or one half of a stacked one, to its place."""
        if isinstance(matrix, Fp8Matrix):
            assert self.scales is not None, "experts are held alike"
            self.values[expert, rows].copy_(matrix.values)
            self.scales[expert, rows].copy_(matrix.scales)
        else:
            assert self.scales is None, "experts are held alike"
            self.values[expert, rows].copy_(matrix)


class GpuExperts:
    """All experts' matrices in two tensors; see `Experts`."""

    def __init__(
        self, count: int, matrices: Iterator[ExpertMatrices], activation: Activation, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Copy `count` experts to `device`, one after the other."""
        first = next(matrices)
        columns, width = first.gate.shape
        scaled = isinstance(first.gate, Fp8Matrix)
        # [experts, 2 intermediate, hidden], gate above up; [experts, hidden, intermediate]
        self._gate_up = _Stack.empty((count, 2 * columns, width), dtype, device, scaled=scaled)
        self._down = _Stack.empty((count, width, columns), dtype, device, scaled=scaled)
        for i, expert in enumerate(itertools.chain([first], matrices)):
            self._gate_up.put(i, slice(columns), expert.gate)
            self._gate_up.put(i, slice(columns, None), expert.up)
            self._down.put(i, slice(None), expert.down)
        self._activation = activation
        self._bounds = torch.arange(count + 1, device=device)

    def __call__(self, inputs: torch.Tensor, expert_ids: torch.Tensor, routing_weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum, without waiting for the device."""
        tokens, chosen = expert_ids.shape
        experts, hidden, columns = self._down.values.shape
        if tokens == 0:
            return torch.empty_like(inputs)
        pairs = tokens * chosen
        tuning = tuning_for(pairs, experts)
        expert_of, order = expert_ids.flatten().sort(stable=True)
        starts = torch.searchsorted(expert_of, self._bounds)  # [experts + 1]
        last_blocks = ((starts.diff() + tuning.rows - 1) // tuning.rows).cumsum(0)
        first_blocks = torch.nn.functional.pad(last_blocks, (1, 0))[:-1].contiguous()
        blocks = min(pairs, pairs // tuning.rows + experts)
        gated = inputs.new_empty(pairs, columns)
        outputs = inputs.new_empty(pairs, hidden)
        inputs, plan = inputs.contiguous(), (order, starts, first_blocks, last_blocks[-1:])
        for source, weight, target, is_first in (
            (inputs, self._gate_up, gated, True),
            (gated, self._down, outputs, False),
        ):
            width, wide = weight.values.shape[2], target.shape[1]
            given, scales = (source, source) if weight.scales is None else quantise_rows(source)
            _grouped_product[(triton.cdiv(wide, tuning.columns), blocks)](
                given, weight.values, scales, source if weight.scales is None else weight.scales, routing_weights,
                target, *plan,
                width, wide, wide * width if is_first else 0, weight.values.stride(0), weight.values.shape[1],
                PER_TOKEN=chosen, EXPERTS=experts, SEARCH=triton.next_power_of_2(experts),
                ROWS=tuning.rows, COLUMNS=tuning.columns, DEPTH=tuning.depth,
                IS_FIRST=is_first, GELU=self._activation is Activation.GELU_TANH, SCALED=weight.scales is not None,
                num_warps=tuning.warps, num_stages=tuning.stages,
            )  # fmt: skip
        return outputs.view(tokens, chosen, hidden).sum(dim=1)

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
from services.worker.engine.kernels.gpu.quantised_linear import quantise_groups
from services.worker.engine.kernels.interface import ExpertMatrices
from services.worker.engine.model.config import Activation
from services.worker.engine.quantization.formats import FP8_BLOCK
from services.worker.engine.quantization.fp8 import FP8, Fp8BlockMatrix, Fp8Matrix
from services.worker.engine.quantization.grouped import GroupedMatrix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.worker.engine.quantization.matrices import Matrix


@triton.jit
def _grouped_product(
    inputs, weight, input_scales, weight_scales, routing_weights, outputs, order, starts, first_blocks, last_block,
    width, columns, gated_offset, stride_expert, stride_scales, groups,
    PER_TOKEN: tl.constexpr, EXPERTS: tl.constexpr, SEARCH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    IS_FIRST: tl.constexpr, GELU: tl.constexpr, SCALED: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Multiply a block of pairs with their expert's matrix.

    The first product takes its inputs from the pairs' tokens and gates them, the second one takes those results, weighs
    them and puts them back to the pairs' places. Both take FP8 on both sides, and scale what comes out, if SCALED; if
    GROUPED, both sides have a scale for each of `groups` parts of the width, DEPTH inputs wide.
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
        part = tl.dot(given, tl.load(at_weight + start, mask=mask, other=0.0), max_num_imprecise_acc=imprecise)
        if GROUPED:
            group = start // DEPTH
            of_inputs = tl.load(input_scales + sources * groups + group, mask=inside, other=0.0)[:, None]
            at_scales = weight_scales + expert * stride_scales + at * groups + group
            part *= of_inputs * tl.load(at_scales, mask=in_columns, other=0.0)[None, :]
        sums += part
        if IS_FIRST:
            gated = tl.load(at_weight + gated_offset + start, mask=mask, other=0.0)
            gated_part = tl.dot(given, gated, max_num_imprecise_acc=imprecise)
            if GROUPED:
                of_gated = tl.load(at_scales + columns * groups, mask=in_columns, other=0.0)
                gated_part *= of_inputs * of_gated[None, :]
            gated_sums += gated_part
    if SCALED and not GROUPED:
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


class _Stack:
    """One matrix of each expert: as wide as activations, or in FP8 with scales for rows or for blocks of inputs."""

    def __init__(self, like: Matrix, experts: int, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make room for `experts` matrices [rows, in] that are held as `like` is."""
        self.groups = 0
        # [experts, out] or [experts, out, groups] float32
        self.scales: torch.Tensor | None = None
        # [1] float32: one program quantises the inputs of all experts.
        self.input_scale: torch.Tensor | None = None
        width = like.shape[1]
        match like:
            case Fp8Matrix():
                dtype, self.scales = FP8, torch.empty(experts, rows, device=device)
                self.input_scale = None if like.input_scale is None else torch.zeros(1, device=device)
            case Fp8BlockMatrix():
                dtype, width, self.groups = FP8, like.values.shape[1], like.scales.shape[1]
                self.scales = torch.empty(experts, rows, self.groups, device=device)
            case _:
                assert isinstance(like, torch.Tensor), "experts in other formats are refused"
        self.values = torch.empty(experts, rows, width, dtype=dtype, device=device)  # [experts, out, in]

    def put(self, expert: int, rows: slice, matrix: Matrix) -> None:
        """Copy a matrix, or one half of a stacked one, to its place."""
        if isinstance(matrix, torch.Tensor):
            assert self.scales is None, "experts are held alike"
            self.values[expert, rows].copy_(matrix)
            return
        assert self.scales is not None, "experts are held alike"
        assert isinstance(matrix, Fp8Matrix | Fp8BlockMatrix), "experts in other formats are refused"
        self.values[expert, rows].copy_(matrix.values)
        self.scales[expert, rows].copy_(matrix.scales)
        if isinstance(matrix, Fp8Matrix) and matrix.input_scale is not None:
            assert self.input_scale is not None, "experts are held alike"
            torch.maximum(self.input_scale, matrix.input_scale.to(self.input_scale.device), out=self.input_scale)

    def quantised(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs [rows, in] as they are multiplied, and their scales, if there are any."""
        if self.groups:
            return quantise_groups(inputs)
        return (inputs, inputs) if self.scales is None else quantise_rows(inputs, self.input_scale)


class GpuExperts:
    """All experts' matrices in two tensors; see `Experts`."""

    def __init__(
        self, count: int, matrices: Iterator[ExpertMatrices], activation: Activation, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Copy `count` experts to `device`, one after the other."""
        # Packed integers are widened: no program here unpacks them.
        widened = (_widened(each, dtype) for each in matrices)
        first = next(widened)
        columns, self._hidden = first.gate.shape
        # [experts, 2 intermediate, hidden], gate above up; [experts, hidden, intermediate]
        self._gate_up = _Stack(first.gate, count, 2 * columns, dtype, device)
        self._down = _Stack(first.down, count, self._hidden, dtype, device)
        for i, expert in enumerate(itertools.chain([first], widened)):
            self._gate_up.put(i, slice(columns), expert.gate)
            self._gate_up.put(i, slice(columns, None), expert.up)
            self._down.put(i, slice(None), expert.down)
        self._activation = activation
        self._bounds = torch.arange(count + 1, device=device)

    def __call__(self, inputs: torch.Tensor, expert_ids: torch.Tensor, routing_weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum, without waiting for the device."""
        tokens, chosen = expert_ids.shape
        experts, columns = self._gate_up.values.shape[0], self._gate_up.values.shape[1] // 2
        hidden = self._hidden
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
            given, scales = weight.quantised(source)
            _grouped_product[(triton.cdiv(wide, tuning.columns), blocks)](
                given, weight.values, scales, source if weight.scales is None else weight.scales, routing_weights,
                target, *plan,
                width, wide, wide * width if is_first else 0, weight.values.stride(0),
                weight.values.shape[1] * max(weight.groups, 1), weight.groups,
                PER_TOKEN=chosen, EXPERTS=experts, SEARCH=triton.next_power_of_2(experts),
                ROWS=tuning.rows, COLUMNS=tuning.columns, DEPTH=FP8_BLOCK if weight.groups else tuning.depth,
                IS_FIRST=is_first, GELU=self._activation is Activation.GELU_TANH, SCALED=weight.scales is not None,
                GROUPED=weight.groups > 0, num_warps=tuning.warps, num_stages=tuning.stages,
            )  # fmt: skip
        return outputs.view(tokens, chosen, hidden).sum(dim=1)


def _widened(expert: ExpertMatrices, dtype: torch.dtype) -> ExpertMatrices:
    """Return an expert whose packed integers are `dtype`."""
    return ExpertMatrices(
        *(
            each.plain(dtype) if isinstance(each, GroupedMatrix) else each
            for each in (expert.gate, expert.up, expert.down)
        )
    )

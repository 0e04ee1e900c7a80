"""MoE as two grouped products, planned on the device: a captured pass serves any routing.

Pairs of token and expert are sorted by expert and cut into blocks of one expert each. How many blocks there are depends
on the routing, so as many programs are launched as there can be at most, and those without a block end at once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
import triton
import triton.language as tl

from services.worker.engine.kernels.gpu.elementwise import ACTIVATIONS, gated
from services.worker.engine.kernels.gpu.fp8_rows import quantise_rows
from services.worker.engine.kernels.gpu.grouped_product import (
    can_pack,
    half_of_weights,
    pack_of,
    packed,
    scales_on_device,
    widen,
)
from services.worker.engine.kernels.gpu.quantised_linear import quantise_groups, quantise_rows_to_int8
from services.worker.engine.quantization.formats import FP8_BLOCK
from services.worker.engine.quantization.fp8 import FP8, Fp8BlockMatrix, Fp8Matrix
from services.worker.engine.quantization.grouped import GroupedMatrix, Numbers
from services.worker.engine.quantization.int8 import Int8Matrix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.worker.engine.kernels.interface import ExpertMatrices
    from services.worker.engine.model.config import Activation
    from services.worker.engine.quantization.matrices import Matrix


@triton.jit
def _find(starts, first_blocks, order, block, EXPERTS: tl.constexpr, SEARCH: tl.constexpr, ROWS: tl.constexpr):
    """Return a block's expert, its rows, which of them there are, and their pairs."""
    experts = tl.arange(0, SEARCH)
    firsts = tl.load(first_blocks + experts, mask=experts < EXPERTS, other=2147483647)
    expert = (tl.sum((firsts <= block).to(tl.int32), axis=0) - 1).to(tl.int64)
    rows = tl.load(starts + expert) + (block - tl.load(first_blocks + expert)) * ROWS + tl.arange(0, ROWS)
    inside = rows < tl.load(starts + expert + 1)
    return expert, rows, inside, tl.load(order + rows, mask=inside, other=0)


@triton.jit
def _finish(
    sums, gated_sums, bias, routing_weights, outputs, rows, inside, pairs, at, in_columns, columns,
    HAS_BIAS: tl.constexpr, IS_FIRST: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Store the first product, gated, in its rows; the second one, weighted, at the pairs' places.

    `bias` is the expert's, that of the gate before that of up.
    """
    element = outputs.dtype.element_ty
    if HAS_BIAS:
        sums += tl.load(bias + at, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        if IS_FIRST:
            gated_sums += tl.load(bias + columns + at, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    # Rounded where the reference rounds.
    sums = sums.to(element).to(tl.float32)
    if IS_FIRST:
        up = gated_sums.to(element).to(tl.float32)
        results = gated(sums, up, ELEMENT=element, ACTIVATION=ACTIVATION)
        targets = rows.to(tl.int64)
    else:
        results = sums * tl.load(routing_weights + pairs, mask=inside, other=0.0).to(tl.float32)[:, None]
        targets = pairs
    mask = inside[:, None] & in_columns[None, :]
    tl.store(outputs + targets[:, None] * columns + at[None, :], results.to(element), mask=mask)


@triton.jit
def _grouped_product(
    inputs, weight, input_scales, weight_scales, bias, routing_weights, outputs, order, starts, first_blocks,
    last_block, width, columns, gated_offset, stride_expert, stride_scales, stride_bias, groups,
    PER_TOKEN: tl.constexpr, EXPERTS: tl.constexpr, SEARCH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_FIRST: tl.constexpr, ACTIVATION: tl.constexpr, SCALED: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Multiply a block of pairs with their expert's matrix.

    The first product takes its inputs from the pairs' tokens and gates them, the second one takes those results, weighs
    them and puts them back to the pairs' places. Both take FP8 or INT8 on both sides, and scale what comes out, if
    SCALED; if GROUPED, both sides have a scale for each of `groups` parts of the width, DEPTH inputs wide. Sums of INT8
    are exact.
    """
    block = tl.program_id(1)
    if block >= tl.load(last_block):
        return
    expert, rows, inside, pairs = _find(starts, first_blocks, order, block, EXPERTS=EXPERTS, SEARCH=SEARCH, ROWS=ROWS)
    sources = pairs // PER_TOKEN if IS_FIRST else rows.to(tl.int64)
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = at < columns
    steps = tl.arange(0, DEPTH)
    at_inputs = inputs + sources[:, None] * width + steps[None, :]
    at_weight = weight + expert * stride_expert + at.to(tl.int64)[None, :] * width + steps[:, None]
    is_int8: tl.constexpr = weight.dtype.element_ty == tl.int8
    of_sums: tl.constexpr = tl.int32 if is_int8 else tl.float32
    sums = tl.zeros([ROWS, COLUMNS], of_sums)
    gated_sums = tl.zeros([ROWS, COLUMNS], of_sums)
    # Hopper's own sums of FP8 have 14 bits: after so many they are added to float32.
    imprecise: tl.constexpr = DEPTH if SCALED and not is_int8 else 0
    for start in range(0, width, DEPTH):
        in_width = start + steps < width
        given = tl.load(at_inputs + start, mask=inside[:, None] & in_width[None, :], other=0.0)
        mask = in_width[:, None] & in_columns[None, :]
        factors = tl.load(at_weight + start, mask=mask, other=0.0)
        part = tl.dot(given, factors, max_num_imprecise_acc=imprecise, out_dtype=of_sums)
        if GROUPED:
            group = start // DEPTH
            of_inputs = tl.load(input_scales + sources * groups + group, mask=inside, other=0.0)[:, None]
            at_scales = weight_scales + expert * stride_scales + at * groups + group
            part *= of_inputs * tl.load(at_scales, mask=in_columns, other=0.0)[None, :]
        sums += part
        if IS_FIRST:
            gated = tl.load(at_weight + gated_offset + start, mask=mask, other=0.0)
            gated_part = tl.dot(given, gated, max_num_imprecise_acc=imprecise, out_dtype=of_sums)
            if GROUPED:
                of_gated = tl.load(at_scales + columns * groups, mask=in_columns, other=0.0)
                gated_part *= of_inputs * of_gated[None, :]
            gated_sums += gated_part
    if SCALED and not GROUPED:
        scales = weight_scales + expert * stride_scales + at
        of_inputs = tl.load(input_scales + sources, mask=inside, other=0.0)[:, None]
        # In the reference's order: INT8's results are its own but for the last rounding.
        sums = sums.to(tl.float32) * of_inputs * tl.load(scales, mask=in_columns, other=0.0)[None, :]
        if IS_FIRST:
            of_gated = tl.load(scales + columns, mask=in_columns, other=0.0)[None, :]
            gated_sums = gated_sums.to(tl.float32) * of_inputs * of_gated
    _finish(
        sums, gated_sums, bias + expert * stride_bias, routing_weights, outputs, rows, inside, pairs, at, in_columns,
        columns, HAS_BIAS=HAS_BIAS, IS_FIRST=IS_FIRST, ACTIVATION=ACTIVATION,
    )  # fmt: skip


@triton.jit
def _packed_product(
    inputs, low_bits, high_bits, scales, shifts, bias, routing_weights, outputs, order, starts, first_blocks,
    last_block, width, columns, stride_low, stride_high, stride_scales, stride_bias,
    PER_TOKEN: tl.constexpr, EXPERTS: tl.constexpr, SEARCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BITS: tl.constexpr, PACK: tl.constexpr, GROUP: tl.constexpr, HAS_SHIFTS: tl.constexpr, IS_E2M1: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_FIRST: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Do the same with packed weights, which are unpacked and scaled in the product."""
    block = tl.program_id(1)
    if block >= tl.load(last_block):
        return
    expert, rows, inside, pairs = _find(starts, first_blocks, order, block, EXPERTS=EXPERTS, SEARCH=SEARCH, ROWS=ROWS)
    sources = pairs // PER_TOKEN if IS_FIRST else rows.to(tl.int64)
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = at < columns
    height = 2 * columns if IS_FIRST else columns
    low_bits += expert * stride_low
    high_bits += expert * stride_high
    scales += expert * stride_scales
    shifts += expert * stride_scales
    half_pack: tl.constexpr = PACK // 2
    at_inputs = inputs + sources[:, None] * width + tl.arange(0, half_pack)[None, :]
    element = inputs.dtype.element_ty
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    gated_sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for pack in range(0, width // PACK):
        for half in tl.static_range(2):
            given = tl.load(at_inputs + pack * PACK + half * half_pack, mask=inside[:, None], other=0.0)
            factors = half_of_weights(
                low_bits, high_bits, scales, shifts, at, height, width, pack, in_columns,
                HALF=half, BITS=BITS, PACK=PACK, GROUP=GROUP, HAS_SHIFTS=HAS_SHIFTS, IS_E2M1=IS_E2M1,
            )  # fmt: skip
            sums += tl.dot(given, factors.to(element))
            if IS_FIRST:
                factors = half_of_weights(
                    low_bits, high_bits, scales, shifts, at + columns, height, width, pack, in_columns,
                    HALF=half, BITS=BITS, PACK=PACK, GROUP=GROUP, HAS_SHIFTS=HAS_SHIFTS, IS_E2M1=IS_E2M1,
                )  # fmt: skip
                gated_sums += tl.dot(given, factors.to(element))
    _finish(
        sums, gated_sums, bias + expert * stride_bias, routing_weights, outputs, rows, inside, pairs, at, in_columns,
        columns, HAS_BIAS=HAS_BIAS, IS_FIRST=IS_FIRST, ACTIVATION=ACTIVATION,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExpertTuning:
    """Division of a product: pairs and columns of a block, inputs per step, warps and pipeline stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# By pairs per expert, ascending: few are bound by reading the weights, many by multiplying.
_FEW_PAIRS = ExpertTuning(rows=16, columns=64, depth=128, warps=4, stages=3)
_MANY_PAIRS = ExpertTuning(rows=64, columns=128, depth=64, warps=8, stages=3)
_MANY = 32
# Of packed weights, which are unpacked for each block; their packs determine the inputs per step.
_FEW_PACKED = ExpertTuning(rows=16, columns=32, depth=64, warps=4, stages=4)
_SOME_PACKED = ExpertTuning(rows=32, columns=32, depth=64, warps=4, stages=4)
_MANY_PACKED = ExpertTuning(rows=64, columns=64, depth=64, warps=4, stages=3)
# Of any number of pairs, with sums in one order: other blocks would use another matrix instruction.
ORDERED_PAIRS = ExpertTuning(rows=64, columns=64, depth=64, warps=4, stages=4)
# From so many pairs per expert on, packed weights are widened first, if that takes no more memory than this.
_WIDENED = 128
_WIDENED_BYTES = 2 * 1024**3


def tuning_for(pairs: int, experts: int, *, is_packed: bool = False) -> ExpertTuning:
    """Return the tuning of products of `pairs` pairs over `experts` experts."""
    if not is_packed:
        return _MANY_PAIRS if pairs >= _MANY * experts else _FEW_PAIRS
    if pairs <= 8 * experts:
        return _FEW_PACKED
    return _SOME_PACKED if pairs <= 24 * experts else _MANY_PACKED


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where the pairs of one pass go; the same for both products."""

    tuning: ExpertTuning
    is_widened: bool
    blocks: int
    chosen: int
    order: torch.Tensor  # [pairs] sorted by expert
    starts: torch.Tensor  # [experts + 1]
    first_blocks: torch.Tensor  # [experts]
    last_block: torch.Tensor  # [1]
    routing_weights: torch.Tensor  # [tokens, chosen]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.order, self.starts, self.first_blocks, self.last_block


class _Stack:
    """One matrix of each expert: as wide as activations, in INT8, or in FP8 with scales for rows or blocks of them."""

    def __init__(self, like: Matrix, experts: int, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make room for `experts` matrices [rows, in] that are held as `like` is."""
        self.rows = rows
        self._groups = 0
        # [experts, out] or [experts, out, groups] float32
        self._scales: torch.Tensor | None = None
        # [1] float32: one program quantises the inputs of all experts.
        self._input_scale: torch.Tensor | None = None
        width = like.shape[1]
        match like:
            case Fp8Matrix():
                dtype, self._scales = FP8, torch.empty(experts, rows, device=device)
                self._input_scale = None if like.input_scale is None else torch.zeros(1, device=device)
            case Fp8BlockMatrix():
                dtype, width, self._groups = FP8, like.values.shape[1], like.scales.shape[1]
                self._scales = torch.empty(experts, rows, self._groups, device=device)
            case Int8Matrix():
                dtype, self._scales = torch.int8, torch.empty(experts, rows, device=device)
            case _:
                assert isinstance(like, torch.Tensor), "experts in other formats are refused"
        self._values = torch.empty(experts, rows, width, dtype=dtype, device=device)  # [experts, out, in]

    def put(self, expert: int, rows: slice, matrix: Matrix) -> None:
        """Copy a matrix, or one half of a stacked one, to its place."""
        if isinstance(matrix, torch.Tensor):
            assert self._scales is None, "experts are held alike"
            self._values[expert, rows].copy_(matrix)
            return
        assert self._scales is not None, "experts are held alike"
        assert isinstance(matrix, Fp8Matrix | Fp8BlockMatrix | Int8Matrix), "experts in other formats are refused"
        assert matrix.values.dtype == self._values.dtype, "experts are held alike"
        self._values[expert, rows].copy_(matrix.values)
        self._scales[expert, rows].copy_(matrix.scales)
        if isinstance(matrix, Fp8Matrix) and matrix.input_scale is not None:
            assert self._input_scale is not None, "experts are held alike"
            torch.maximum(self._input_scale, matrix.input_scale.to(self._input_scale.device), out=self._input_scale)

    def write(
        self, inputs: torch.Tensor, bias: torch.Tensor | None, outputs: torch.Tensor, plan: _Plan,
        activation: Activation | None,
    ) -> None:  # fmt: skip
        """Write the product to `outputs` [pairs, columns]; the first one, which is gated, has an activation."""
        given, scales = self._quantised(inputs)
        _multiply(
            given, self._values, inputs if bias is None else bias, outputs, plan,
            _constants(plan, bias, activation), scales=None if self._scales is None else (scales, self._scales),
            groups=self._groups,
        )  # fmt: skip

    def _quantised(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs [rows, in] as they are multiplied, and their scales, if there are any."""
        if self._groups:
            return quantise_groups(inputs)
        if self._values.dtype == torch.int8:
            return quantise_rows_to_int8(inputs)
        return (inputs, inputs) if self._scales is None else quantise_rows(inputs, self._input_scale)


class _PackedStack:
    """One packed matrix of each expert, laid out as `GroupedProduct` has them."""

    def __init__(self, like: GroupedMatrix, experts: int, rows: int, device: torch.device) -> None:
        """Make room for `experts` matrices [rows, in] that are held as `like` is."""
        self.rows, self._width = rows, like.values.shape[1]
        self._bits, self._group, self._numbers = like.bits, like.group, like.numbers
        self._pack = pack_of(self._width, self._group)

        def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
            return torch.empty(experts, *shape, dtype=dtype, device=device)

        extra = self._bits - 4 if self._bits in (5, 6) else 0
        self._low = empty(rows, self._width if self._bits == 8 else self._width // 2)
        self._high = empty(rows, self._width * extra // 8) if extra else self._low
        dtype = torch.uint8 if self._numbers is Numbers.E2M1 else torch.float32
        self._scales = empty(self._width // self._group, rows, dtype=dtype)  # [experts, groups, out]
        self._shifts: torch.Tensor | None = None

    def put(self, expert: int, rows: slice, matrix: Matrix) -> None:
        """Pack a matrix, or one half of a stacked one, at its place."""
        assert isinstance(matrix, GroupedMatrix), "experts are held alike"
        assert (matrix.bits, matrix.numbers) == (self._bits, self._numbers), "experts are held alike"
        moved = matrix.to(self._low.device).regrouped(self._group)
        low, high = packed(moved.values, self._bits, self._pack)
        self._low[expert, rows].copy_(low)
        if self._high is not self._low:
            self._high[expert, rows].copy_(high)
        if moved.shifts is not None and self._shifts is None:
            # Those before had the zero point in the middle.
            self._shifts = self._scales * -(2 ** (self._bits - 1))
        self._scales[expert, :, rows].copy_(scales_on_device(moved).t())
        if self._shifts is not None:
            self._shifts[expert, :, rows].copy_(moved.explicit_shifts().t())

    def write(
        self, inputs: torch.Tensor, bias: torch.Tensor | None, outputs: torch.Tensor, plan: _Plan,
        activation: Activation | None,
    ) -> None:  # fmt: skip
        """Write the product, as `_Stack.write` does."""
        columns = outputs.shape[1]
        if plan.is_widened:
            _multiply(
                inputs, self._widened(inputs.dtype), inputs if bias is None else bias, outputs, plan,
                _constants(plan, bias, activation),
            )  # fmt: skip
            return
        _packed_product[(triton.cdiv(columns, plan.tuning.columns), plan.blocks)](
            inputs, self._low, self._high, self._scales, self._scales if self._shifts is None else self._shifts,
            inputs if bias is None else bias, plan.routing_weights, outputs, *plan.tensors,
            self._width, columns, self._low.stride(0), self._high.stride(0), self._scales.stride(0), self.rows,
            **_constants(plan, bias, activation), **self._packing,
        )  # fmt: skip

    @property
    def widened_bytes(self) -> int:
        """Memory that the widened weights of all experts take."""
        return 2 * self._low.shape[0] * self.rows * self._width

    def _widened(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights of all experts [experts, out, in]."""
        experts, columns = self._low.shape[0], 32
        weights = torch.empty(experts, self.rows, self._width, dtype=dtype, device=self._low.device)
        widen[(triton.cdiv(self.rows, columns), self._width // self._pack, experts)](
            self._low, self._high, self._scales, self._scales if self._shifts is None else self._shifts, weights,
            0, self.rows, self.rows, self._width, self._low.stride(0), self._high.stride(0), self._scales.stride(0),
            weights.stride(0), COLUMNS=columns, num_warps=4, **self._packing, OVERLAPS=False,
        )  # fmt: skip
        return weights

    @property
    def _packing(self) -> dict[str, int | bool]:
        return {
            "BITS": self._bits, "PACK": self._pack, "GROUP": self._group, "HAS_SHIFTS": self._shifts is not None,
            "IS_E2M1": self._numbers is Numbers.E2M1,
        }  # fmt: skip


def _multiply(
    given: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor, outputs: torch.Tensor, plan: _Plan,
    constants: dict[str, int | bool], *, scales: tuple[torch.Tensor, torch.Tensor] | None = None, groups: int = 0,
) -> None:  # fmt: skip
    """Write the product with `weights` [experts, out, in] to `outputs`; `scales` are those of inputs and weights."""
    (_, rows, width), columns, tuning = weights.shape, outputs.shape[1], plan.tuning
    _grouped_product[(triton.cdiv(columns, tuning.columns), plan.blocks)](
        given, weights, *(scales or (outputs, outputs)), bias, plan.routing_weights, outputs, *plan.tensors,
        width, columns, columns * width if constants["IS_FIRST"] else 0, weights.stride(0),
        rows * max(groups, 1), rows, groups, **constants, DEPTH=FP8_BLOCK if groups else tuning.depth,
        SCALED=scales is not None, GROUPED=groups > 0,
    )  # fmt: skip


def _constants(plan: _Plan, bias: torch.Tensor | None, activation: Activation | None) -> dict[str, int | bool]:
    """Return the constants that both programs take."""
    tuning, experts = plan.tuning, plan.first_blocks.shape[0]
    return {
        "PER_TOKEN": plan.chosen, "EXPERTS": experts, "SEARCH": triton.next_power_of_2(experts), "ROWS": tuning.rows,
        "COLUMNS": tuning.columns, "HAS_BIAS": bias is not None, "IS_FIRST": activation is not None,
        "ACTIVATION": 0 if activation is None else ACTIVATIONS[activation], "num_warps": tuning.warps,
        "num_stages": tuning.stages,
    }  # fmt: skip


class PairChanges(Protocol):
    """Products that adapters add to those of pairs of a token and an expert."""

    def gate(self, inputs: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
        """Return the gated product [pairs, intermediate] of inputs [pairs, hidden].

        `both` [pairs, 2 intermediate] is the product of both halves without what is added; it may be overwritten.
        """

    def add(self, inner: torch.Tensor, outputs: torch.Tensor) -> None:
        """Add to `outputs` [pairs, hidden], the second product of `inner` [pairs, intermediate], in place."""


class GpuExperts:
    """All experts' matrices in two stacks; see `Experts`."""

    def __init__(
        self, count: int, matrices: Iterator[ExpertMatrices], activation: Activation, dtype: torch.dtype,
        device: torch.device, *, are_all: bool = True, tuning: ExpertTuning | None = None,
    ) -> None:  # fmt: skip
        """Copy `count` experts to `device`, one after the other; see `Kernels.experts`.

        Without a `tuning` for all passes, it is chosen by the number of pairs.
        """
        self._are_all = are_all
        self._tuning = tuning
        prepared = (_prepared(each, dtype) for each in matrices)
        first = next(prepared)
        self._columns, self._hidden = first.gate.shape
        # [experts, 2 intermediate, hidden], gate above up; [experts, hidden, intermediate]
        self._gate_up = _stack(first.gate, count, 2 * self._columns, dtype, device)
        self._down = _stack(first.down, count, self._hidden, dtype, device)

        def biases(rows: int) -> torch.Tensor:
            return torch.empty(count, rows, dtype=dtype, device=device)

        self._gate_up_bias = None if first.gate_up_biases is None else biases(2 * self._columns)
        self._down_bias = None if first.down_bias is None else biases(self._hidden)
        for i, expert in enumerate(itertools.chain([first], prepared)):
            self._gate_up.put(i, slice(self._columns), expert.gate)
            self._gate_up.put(i, slice(self._columns, None), expert.up)
            self._down.put(i, slice(None), expert.down)
            if self._gate_up_bias is not None and expert.gate_up_biases is not None:
                self._gate_up_bias[i].copy_(torch.cat(expert.gate_up_biases))
            if self._down_bias is not None and expert.down_bias is not None:
                self._down_bias[i].copy_(expert.down_bias)
        self._activation = activation
        self._bounds = torch.arange(count + 1, device=device)

    def __call__(self, inputs: torch.Tensor, expert_ids: torch.Tensor, routing_weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum, without waiting for the device."""
        tokens, chosen = expert_ids.shape
        if tokens == 0:
            return torch.empty_like(inputs)
        plan = self._plan(expert_ids, routing_weights)
        gated_pairs = inputs.new_empty(tokens * chosen, self._columns)
        # No block has the pairs of experts on other ranks.
        make = inputs.new_empty if self._are_all else inputs.new_zeros
        outputs = make(tokens * chosen, self._hidden)
        self._gate_up.write(inputs.contiguous(), self._gate_up_bias, gated_pairs, plan, self._activation)
        self._down.write(gated_pairs, self._down_bias, outputs, plan, None)
        return outputs.view(tokens, chosen, self._hidden).sum(dim=1)

    def changed(
        self, inputs: torch.Tensor, expert_ids: torch.Tensor, routing_weights: torch.Tensor, changes: PairChanges
    ) -> torch.Tensor:
        """Return the weighted sum with `changes` of each pair's products, without waiting for the device.

        Pairs are those of a token and the experts that it has chosen, token by token. Without changes to any pair of a
        token, it gets the bits that it has otherwise.
        """
        assert self._are_all, "experts on other ranks take no changes"
        tokens, chosen = expert_ids.shape
        if tokens == 0:
            return torch.empty_like(inputs)
        # Both products in the form of the second one: of rows by expert, and neither gated nor weighted.
        of_pairs = torch.ones_like(routing_weights)
        plan = replace(self._plan(expert_ids, routing_weights), routing_weights=of_pairs)
        repeated = inputs.repeat_interleave(chosen, dim=0)
        both = inputs.new_empty(tokens * chosen, 2 * self._columns)
        self._gate_up.write(repeated[plan.order], self._gate_up_bias, both, plan, None)
        inner = changes.gate(repeated, both)
        outputs = inputs.new_empty(tokens * chosen, self._hidden)
        self._down.write(inner[plan.order], self._down_bias, outputs, plan, None)
        changes.add(inner, outputs)
        return (outputs.view(tokens, chosen, self._hidden) * routing_weights[:, :, None]).sum(dim=1)

    def _plan(self, expert_ids: torch.Tensor, routing_weights: torch.Tensor) -> _Plan:
        pairs, experts = expert_ids.numel(), self._bounds.shape[0] - 1
        stacks = [stack for stack in (self._gate_up, self._down) if isinstance(stack, _PackedStack)]
        has_memory = all(stack.widened_bytes <= _WIDENED_BYTES for stack in stacks)
        is_widened = bool(stacks) and has_memory and pairs >= _WIDENED * experts
        tuning = self._tuning or tuning_for(pairs, experts, is_packed=bool(stacks) and not is_widened)
        expert_of, order = expert_ids.flatten().sort(stable=True)
        starts = torch.searchsorted(expert_of, self._bounds)  # [experts + 1]
        last_blocks = ((starts.diff() + tuning.rows - 1) // tuning.rows).cumsum(0)
        first_blocks = torch.nn.functional.pad(last_blocks, (1, 0))[:-1].contiguous()
        blocks = min(pairs, pairs // tuning.rows + experts)
        return _Plan(
            tuning,
            is_widened,
            blocks,
            expert_ids.shape[1],
            order,
            starts,
            first_blocks,
            last_blocks[-1:],
            routing_weights,
        )


def _stack(like: Matrix, experts: int, rows: int, dtype: torch.dtype, device: torch.device) -> _Stack | _PackedStack:
    if isinstance(like, GroupedMatrix):
        return _PackedStack(like, experts, rows, device)
    return _Stack(like, experts, rows, dtype, device)


def _prepared(expert: ExpertMatrices, dtype: torch.dtype) -> ExpertMatrices:
    """Return an expert whose packed matrices are `dtype` where no program here unpacks them.

    Inputs are put in no order (act-order) that could differ between experts, and gate and up are packed alike.
    """
    gate, up, down = (
        each.plain(dtype)
        if isinstance(each, GroupedMatrix) and (each.order is not None or not can_pack(each))
        else each
        for each in (expert.gate, expert.up, expert.down)
    )
    if isinstance(gate, GroupedMatrix) and isinstance(up, GroupedMatrix) and gate.bits != up.bits:
        gate, up = gate.plain(dtype), up.plain(dtype)
    return replace(expert, gate=gate, up=up, down=down)

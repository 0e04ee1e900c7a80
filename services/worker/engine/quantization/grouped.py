"""Matrices of numbers of a few bits with a scale for each group of inputs; activations stay wide.

AWQ, GPTQ, compressed-tensors' packed weights, MXFP4 and the blocks of GGUF files are all read into this form. Numbers
take a byte each until kernels lay them out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from collections.abc import Sequence

# What kernels can unpack, and the groups that they expect: powers of two.
BITS = (4, 5, 6, 8)
SMALLEST_GROUP, LARGEST_GROUP = 16, 128


# FP4: what each of 16 codes stands for. The sign bit comes first, then two of the exponent and one of the mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Numbers(Enum):
    """The number format of a matrix's values."""

    INTEGERS = "integers"
    """Themselves."""
    E2M1 = "e2m1"
    """FP4; such matrices have no shifts, and scales that are powers of two."""


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """A matrix [out, in]: weight (i, j) is `values[i, j] * scales[i, j // group] + shifts[i, j // group]`.

    `group` = in / groups is a power of two from 16 to 128. Input column j of the matrix takes component `order[j]` of
    the inputs; where `order` says `input_width`, which no input has, it takes 0.
    """

    values: torch.Tensor  # [out, in] uint8, below 2^bits
    bits: int
    scales: torch.Tensor  # [out, groups] float16 or float32
    shifts: torch.Tensor | None  # as scales; None: -2^(bits - 1) * scales
    order: torch.Tensor | None = None  # [in] int64; None: in order
    input_width: int | None = None
    """Components of the inputs, if there is an order."""
    numbers: Numbers = Numbers.INTEGERS

    @property
    def shape(self) -> torch.Size:
        """Outputs, and inputs before they are put in order."""
        return torch.Size((self.values.shape[0], self.input_width or self.values.shape[1]))

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.values.shape[1] // self.scales.shape[1]

    def columns(self, part: slice) -> GroupedMatrix:
        """Return some of the inputs' columns of a matrix in order."""
        assert self.order is None, "readers order the columns that they keep"
        cut = self.regrouped(math.gcd(self.group, part.start, part.stop))
        groups = slice(part.start // cut.group, part.stop // cut.group)
        return replace(
            cut,
            values=cut.values[:, part].contiguous(),
            scales=cut.scales[:, groups].contiguous(),
            shifts=None if cut.shifts is None else cut.shifts[:, groups].contiguous(),
        )

    def rows(self, part: slice | torch.Tensor) -> GroupedMatrix:
        """Return some of the outputs, or all in another order."""
        shifts = None if self.shifts is None else self.shifts[part]
        return replace(self, values=self.values[part], scales=self.scales[part], shifts=shifts)

    def regrouped(self, group: int) -> GroupedMatrix:
        """Return the same matrix in groups of `group` inputs, which divides the present ones."""
        assert self.group % group == 0, "groups are only divided"
        times = self.group // group
        if times == 1:
            return self
        shifts = None if self.shifts is None else self.shifts.repeat_interleave(times, dim=1)
        return replace(self, scales=self.scales.repeat_interleave(times, dim=1), shifts=shifts)

    def explicit_shifts(self) -> torch.Tensor:
        """Return the shifts, also of symmetric weights: these are exact in the scales' type."""
        return self.scales * -(2 ** (self.bits - 1)) if self.shifts is None else self.shifts

    def to(self, device: torch.device) -> GroupedMatrix:
        """Return the matrix on `device`."""
        return replace(
            self,
            values=self.values.to(device).contiguous(),
            scales=self.scales.to(device).contiguous(),
            shifts=None if self.shifts is None else self.shifts.to(device).contiguous(),
            order=None if self.order is None else self.order.to(device),
        )

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights, computed in float32, in `dtype`; columns as they are stored, in `order`."""
        outputs, groups = self.scales.shape
        scales, values = self.scales.float()[:, :, None], self.values.view(outputs, groups, -1)
        if self.numbers is Numbers.E2M1:
            return (torch.tensor(E2M1, device=values.device)[values.int()] * scales).to(dtype).view(outputs, -1)
        shifts = self.explicit_shifts().float()[:, :, None]
        return (values.float() * scales + shifts).to(dtype).view(outputs, -1)

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights [out, in] in `dtype`, columns as the inputs are."""
        widened = self.widened(dtype)
        if self.order is None:
            return widened
        width = self.shape[1]
        inputs = widened.new_zeros(widened.shape[0], width + 1)
        inputs[:, self.order] = widened
        return inputs[:, :width].contiguous()

    def ordered_inputs(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs [tokens, in] as the matrix's columns take them."""
        return in_order(inputs, self.order)


def in_order(inputs: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Return components `order` of inputs [tokens, in]; those beyond the last are 0."""
    if order is None:
        return inputs
    if order.shape[0] != inputs.shape[1]:
        inputs = pad(inputs, (0, 1))
    return inputs.index_select(1, order)


def grouped_matrix(
    values: torch.Tensor, bits: int, scales: torch.Tensor, zero_points: torch.Tensor | None, group: int, start: int = 0
) -> GroupedMatrix:
    """Return the matrix with weights (values - zero_points) * scales.

    Args:
        values: [out, in] uint8.
        bits: of a value.
        scales: [out, groups], of the inputs from the first one on.
        zero_points: [out, groups] integers; None: 2^(bits - 1).
        group: inputs that share a scale; the last group may be cut off.
        start: the first input that `values` has, where it has a part of them.
    """
    stop = start + values.shape[1]
    unit = math.gcd(group, start, stop, LARGEST_GROUP)
    matrix = GroupedMatrix(values, bits, scales.float(), _shifts(scales, zero_points, bits))
    times, part = group // unit, slice(start // unit, stop // unit)
    shifts = None if matrix.shifts is None else matrix.shifts.repeat_interleave(times, dim=1)[:, part].contiguous()
    scales = matrix.scales.repeat_interleave(times, dim=1)[:, part].contiguous()
    return narrowed(replace(matrix, scales=scales, shifts=shifts))


def sorted_matrix(
    values: torch.Tensor, bits: int, scales: torch.Tensor, zero_points: torch.Tensor | None, groups: torch.Tensor,
    group: int,
) -> GroupedMatrix:  # fmt: skip
    """Return a matrix whose inputs belong to groups in any order (act-order), its columns sorted by group.

    Where a rank holds only some columns of a group, columns of zeros fill it up.

    Args:
        values: [out, in] uint8.
        bits: of a value.
        scales: [out, all groups].
        zero_points: as scales, or None, as `grouped_matrix` takes them.
        groups: [in] the group of each input.
        group: inputs that share a scale.
    """
    device, count = values.device, values.shape[1]
    groups = groups.to(device).long()
    order = groups.argsort(stable=True)
    counts = torch.bincount(groups, minlength=scales.shape[1])
    unit = math.gcd(group, LARGEST_GROUP)
    if bool((counts % unit).any()):
        unit = math.gcd(unit, 2 * SMALLEST_GROUP)
    padded = (counts + unit - 1) // unit * unit
    total = int(padded.sum())
    # Where each sorted column goes.
    moves = padded.cumsum(0) - padded - counts.cumsum(0) + counts
    places = torch.arange(count, device=device) + moves[groups[order]]
    filled = values.new_zeros(values.shape[0], total)
    filled[:, places] = values[:, order]
    taken = torch.full((total,), count, device=device)
    taken[places] = order
    of_units = torch.repeat_interleave(torch.arange(padded.shape[0], device=device), padded // unit)
    shifts = _shifts(scales, zero_points, bits)
    in_place = total == count and bool((taken == torch.arange(count, device=device)).all())
    return narrowed(
        GroupedMatrix(
            filled,
            bits,
            scales.float()[:, of_units].contiguous(),
            None if shifts is None else shifts[:, of_units].contiguous(),
            order=None if in_place else taken,
            input_width=None if in_place else count,
        )
    )


def _shifts(scales: torch.Tensor, zero_points: torch.Tensor | None, bits: int) -> torch.Tensor | None:
    """Compute the offsets that are added to scaled values; None for weights with the zero point in the middle."""
    if zero_points is None or bool((zero_points == 2 ** (bits - 1)).all()):
        return None
    return -(zero_points.float() * scales.float())


def narrowed(matrix: GroupedMatrix) -> GroupedMatrix:
    """Return the matrix with scales and shifts in float16 if that is exact."""
    present = [each for each in (matrix.scales, matrix.shifts) if each is not None]
    if not all(bool((each.half().float() == each).all()) for each in present):
        return matrix
    return replace(matrix, scales=matrix.scales.half(), shifts=None if matrix.shifts is None else matrix.shifts.half())


def stacked(matrices: Sequence[GroupedMatrix]) -> GroupedMatrix:
    """Return matrices of the same inputs, in the same order, as one: the widest integers, the smallest groups."""
    bits, group = max(each.bits for each in matrices), min(each.group for each in matrices)
    is_symmetric = all(each.shifts is None and each.bits == bits for each in matrices)
    dtype = torch.float32 if any(each.scales.dtype == torch.float32 for each in matrices) else torch.float16
    regrouped = [each.regrouped(group) for each in matrices]
    return replace(
        matrices[0],
        values=torch.cat([each.values for each in matrices]),
        bits=bits,
        scales=torch.cat([each.scales.to(dtype) for each in regrouped]),
        shifts=None if is_symmetric else torch.cat([each.explicit_shifts().to(dtype) for each in regrouped]),
    )


def same_order(matrices: Sequence[GroupedMatrix]) -> bool:
    """Return whether all matrices take the inputs' components in the same order."""
    first = matrices[0].order
    if first is None:
        return all(each.order is None for each in matrices)
    return all(each.order is not None and torch.equal(each.order, first) for each in matrices)


def same_numbers(matrices: Sequence[GroupedMatrix]) -> bool:
    """Return whether the values of all matrices stand for the same."""
    return len({each.numbers for each in matrices}) == 1


def quantise(weight: torch.Tensor, bits: int, group: int | None, *, has_zero_points: bool) -> GroupedMatrix:
    """Return a matrix [out, in] rounded to nearest, scaled by the range of each `group` of inputs (None: of all).

    Where groups do not divide the inputs they are smaller.
    """
    outputs, inputs = weight.shape
    size = math.gcd(group or inputs, inputs)
    groups = weight.float().view(outputs, -1, size)
    largest = 2**bits - 1
    if has_zero_points:
        low, high = groups.amin(dim=2).clamp_max(0.0), groups.amax(dim=2).clamp_min(0.0)
        scales = ((high - low) / largest).clamp_min(1e-8).half().float()
        zero_points = (-low / scales).round().clamp(0, largest)
    else:
        scales = (groups.abs().amax(dim=2) / (largest / 2)).clamp_min(1e-8).half().float()
        zero_points = torch.full_like(scales, 2 ** (bits - 1))
    # A scale may have been rounded to zero.
    scales = torch.where(scales == 0, 6e-8, scales)
    values = (groups / scales[:, :, None] + zero_points[:, :, None]).round_().clamp_(0, largest).to(torch.uint8)
    return grouped_matrix(values.view(outputs, inputs), bits, scales, zero_points, size)

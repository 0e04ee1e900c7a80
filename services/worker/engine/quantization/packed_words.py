"""Reads matrices of 4- and 8-bit integers that AWQ, GPTQ and compressed-tensors pack into words of 32 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from common.errors import ConfigurationError
from services.worker.engine.quantization.formats import GroupedLayout
from services.worker.engine.quantization.grouped import grouped_matrix, sorted_matrix

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.worker.engine.quantization.formats import GroupedFormat
    from services.worker.engine.quantization.grouped import GroupedMatrix

    Read = Callable[[str, slice | None, slice | None], torch.Tensor]

_WORD = 32
# The output that each place of a word of AWQ's holds.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
# The tensor that holds the integers of a matrix.
_WORDS = {
    GroupedLayout.AWQ: "qweight",
    GroupedLayout.GPTQ: "qweight",
    GroupedLayout.GPTQ_V2: "qweight",
    GroupedLayout.COMPRESSED: "weight_packed",
}


@dataclass(frozen=True, slots=True)
class PackedReader:
    """Reads blocks of packed matrices by the names that each layout gives their tensors."""

    stored: GroupedFormat
    read: Read
    """Returns rows and columns of a stored tensor."""
    device: torch.device
    """Where words are unpacked."""

    def words_of(self, stem: str) -> str:
        """Return the name of the tensor with the integers of `stem`, the matrix's name without its last part."""
        return f"{stem}.{_WORDS[self.stored.layout]}"

    def matrix(self, stem: str, shape: tuple[int, int], rows: slice, columns: slice) -> GroupedMatrix:
        """Return a block of the matrix `stem`, which has the `shape` [out, in] as a whole.

        Raises:
            ConfigurationError: a tensor is missing or has another shape, or words would be cut.
        """
        stored, group = self.stored, self.stored.group_size or shape[1]
        for part, what in ((rows, "outputs"), (columns, "inputs")):
            if part.start % (_WORD // stored.bits) or part.stop % (_WORD // stored.bits):
                raise ConfigurationError(f"matrix {stem!r}: a rank's {what} {part.start} to {part.stop} cut a word")
        values = self._values(stem, rows, columns)
        scales, zero_points = self._scales(stem, rows), self._zero_points(stem, rows)
        groups = -(-shape[1] // group)
        height, width = rows.stop - rows.start, columns.stop - columns.start
        for name, tensor, expected in (
            ("integers", values, (height, width)),
            ("scales", scales, (height, groups)),
            ("zero points", zero_points, (height, groups)),
        ):
            if tensor is not None and tuple(tensor.shape) != expected:
                raise ConfigurationError(
                    f"matrix {stem!r} has {name} of the shape {tuple(tensor.shape)} where {expected} belongs"
                )
        if not bool(torch.isfinite(scales).all()):
            raise ConfigurationError(f"matrix {stem!r} has scales that are no numbers")
        if stored.has_group_index and stored.group_size is not None:
            index = self._group_index(stem, shape[1], groups)[columns]
            return sorted_matrix(values, stored.bits, scales, zero_points, index, group)
        return grouped_matrix(values, stored.bits, scales, zero_points, group, columns.start)

    def _values(self, stem: str, rows: slice, columns: slice) -> torch.Tensor:
        """Return [out, in] uint8."""
        bits = self.stored.bits
        words = self.words_of(stem)
        match self.stored.layout:
            case GroupedLayout.AWQ:
                return _awq_order(unpacked(self._read(words, columns, _words(rows, bits)), bits, 1)).t().contiguous()
            case GroupedLayout.GPTQ | GroupedLayout.GPTQ_V2:
                return unpacked(self._read(words, _words(columns, bits), rows), bits, 0).t().contiguous()
            case GroupedLayout.COMPRESSED:
                return unpacked(self._read(words, rows, _words(columns, bits)), bits, 1)

    def _scales(self, stem: str, rows: slice) -> torch.Tensor:
        """Return [out, groups]."""
        if self.stored.layout is GroupedLayout.COMPRESSED:
            return self._read(f"{stem}.weight_scale", rows, None)
        return self._read(f"{stem}.scales", None, rows).t()

    def _zero_points(self, stem: str, rows: slice) -> torch.Tensor | None:
        """Return [out, groups] integers, or None if the format has none."""
        bits = self.stored.bits
        if not self.stored.has_zero_points:
            return None
        if self.stored.layout is GroupedLayout.COMPRESSED:
            name = f"{stem}.weight_zero_point"
            return unpacked(self._read(name, _words(rows, bits), None), bits, 0)
        zeros = unpacked(self._read(f"{stem}.qzeros", None, _words(rows, bits)), bits, 1)
        if self.stored.layout is GroupedLayout.AWQ:
            return _awq_order(zeros).t()
        return (zeros.int() + (self.stored.layout is GroupedLayout.GPTQ)).t()

    def _group_index(self, stem: str, width: int, groups: int) -> torch.Tensor:
        """Return [in], the group of every input."""
        is_compressed = self.stored.layout is GroupedLayout.COMPRESSED
        name = f"{stem}.weight_g_idx" if is_compressed else f"{stem}.g_idx"
        index = self._read(name, None, None)
        if tuple(index.shape) != (width,) or int(index.min()) < 0 or int(index.max()) >= groups:
            raise ConfigurationError(f"tensor {name!r} does not assign {width} inputs to {groups} groups")
        return index

    def _read(self, name: str, rows: slice | None, columns: slice | None) -> torch.Tensor:
        return self.read(name, rows, columns).to(self.device)


def unpacked(words: torch.Tensor, bits: int, dimension: int) -> torch.Tensor:
    """Return the integers of int32 words [rows, columns] as uint8, lowest bits first, along one dimension."""
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32, device=words.device)
    spread = words[:, None, :] >> shifts[None, :, None] if dimension == 0 else words[:, :, None] >> shifts
    integers: torch.Tensor = (spread & (2**bits - 1)).to(torch.uint8)
    return integers.flatten(0, 1) if dimension == 0 else integers.flatten(1)


def _awq_order(values: torch.Tensor) -> torch.Tensor:
    """Return [rows, outputs] with the outputs of each word in order."""
    places = torch.tensor(_AWQ_PLACES, device=values.device)
    return values.view(values.shape[0], -1, len(_AWQ_PLACES))[:, :, places].flatten(1)


def _words(part: slice, bits: int) -> slice:
    per_word = _WORD // bits
    return slice(part.start // per_word, part.stop // per_word)

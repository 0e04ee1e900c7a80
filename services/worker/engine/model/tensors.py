"""Reads a rank's tensors from a checkpoint, checks their shapes, and quantises matrices where that is configured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from common.errors import ConfigurationError
from services.worker.engine.checkpoints.tensor_names import split_expert
from services.worker.engine.checkpoints.tensor_shapes import block_shape, tensor_shape
from services.worker.engine.quantization.formats import (
    FP8_BLOCK,
    Fp8Format,
    GroupedFormat,
    Int8Format,
    Mxfp4Format,
    StoredScales,
)
from services.worker.engine.quantization.fp8 import FP8, Fp8Matrix, block_matrix
from services.worker.engine.quantization.grouped import GroupedMatrix, Numbers
from services.worker.engine.quantization.int8 import Int8Matrix
from services.worker.engine.quantization.matrices import are_alike, dequantised
from services.worker.engine.quantization.mxfp4 import read_mxfp4
from services.worker.engine.quantization.packed_words import PackedReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.worker.engine.checkpoints.interface import Checkpoint
    from services.worker.engine.quantization.gguf_blocks import RowBlocks
    from services.worker.engine.quantization.matrices import Matrix, QuantisedMatrix


# Matrices that some families store above each other, as one.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True, slots=True)
class CheckedTensors:
    """Reads and checks."""

    checkpoint: Checkpoint
    device: torch.device
    """Where the model computes, and matrices are quantised or unpacked."""
    quantise: Callable[[torch.Tensor], QuantisedMatrix] | None = None
    """Quantises matrices that are stored in a wider type; None: they are used unchanged."""

    def plain(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """Return a tensor, or a block of a matrix, that is never held quantised.

        Raises:
            ConfigurationError: it is missing, of another shape than the configuration says, or stored quantised.
        """
        tensor = self._read(name, rows, columns)
        if tensor.dtype.itemsize == 1:
            kind = "FP8" if tensor.dtype == FP8 else "INT8"
            raise ConfigurationError(
                f"tensor {name!r} is stored in {kind}, which is supported of projections and experts only"
            )
        return tensor

    def head(self, name: str, rows: slice) -> Matrix:
        """Return rows of the head's matrix, which is quantised only if a GGUF file stores it so.

        Raises:
            ConfigurationError: as `plain`.
        """
        packed = self.checkpoint.packed(name, rows) if self.quantise is None else None
        return self.plain(name, rows) if packed is None else packed

    def row_blocks(self, name: str, rows: slice) -> RowBlocks | None:
        """Return rows of a matrix in a GGUF file's blocks; None: it is stored otherwise.

        Raises:
            ConfigurationError: it is missing, or of another shape than the configuration says.
        """
        blocks, expected = self.checkpoint.row_blocks(name, rows), block_shape(name, self.checkpoint.config, rows, None)
        if blocks is not None and blocks.shape != expected:
            raise _shape_error(name, blocks.shape, expected)
        return blocks

    def matrix(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Matrix:
        """Return a projection's matrix `name`, which ends with `.weight`, or a block of it.

        A row is quantised as a whole, whichever columns are wanted: so every number of ranks holds the same values.

        Raises:
            ConfigurationError: as `plain`, or its scales are wrong.
        """
        name, rows = self._located(name, rows)
        stored = self.checkpoint.config.stored_format
        is_expert = split_expert(name)[1] is not None
        if self.quantise is not None and (is_expert or not isinstance(stored, Mxfp4Format)):
            matrix = self.quantise(self.plain(name, rows).to(self.device))
            return matrix if columns is None else matrix.columns(columns)
        if isinstance(stored, GroupedFormat):
            reader, stem = PackedReader(stored, self.checkpoint.read, self.device), name.removesuffix(".weight")
            if self.checkpoint.has(reader.words_of(stem)):
                height, width = tensor_shape(name, self.checkpoint.config)
                return reader.matrix(stem, (height, width), rows or slice(0, height), columns or slice(0, width))
        if (
            isinstance(stored, Mxfp4Format)
            and is_expert
            and self.checkpoint.has(f"{name.removesuffix('weight')}blocks")
        ):
            height, width = tensor_shape(name, self.checkpoint.config)
            whole = rows or slice(0, height), columns or slice(0, width)
            return read_mxfp4(self.checkpoint.read, name.removesuffix(".weight"), (height, width), *whole, self.device)
        packed = self.checkpoint.packed(name, rows, columns)
        if packed is not None:
            return packed
        tensor = self._read(name, rows, columns)
        if isinstance(stored, Int8Format) and tensor.dtype == torch.int8:
            return Int8Matrix(tensor, self._scales(f"{name}_scale", rows, tensor.shape[0]))
        if isinstance(stored, Fp8Format) and tensor.dtype == FP8:
            return self._fp8(name, tensor, stored, rows, columns)
        return tensor

    def dequantised(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """Return a projection's matrix, or rows of it, that is used in other ways than a `Linear`.

        Raises:
            ConfigurationError: as `matrix`.
        """
        return self.plain(name, rows) if self.quantise is not None else dequantised(self.matrix(name, rows))

    def alike(
        self, parts: Sequence[tuple[str, slice | None, slice | None]], together: int | None = None
    ) -> list[Matrix]:
        """Return matrices (name, rows, columns) that are held alike: all quantised in one format, or none.

        The first `together` of them, by default all, have the same inputs and can be stacked.

        Raises:
            ConfigurationError: as `matrix`, or they are stored differently.
        """
        matrices = [self.matrix(*part) for part in parts]
        names = ", ".join(name for name, _, _ in parts)
        kinds = {_kind(matrix) for matrix in matrices}
        if len(kinds) > 1 and self.checkpoint.config.stored_format is None:
            # Of GGUF files, where each tensor has a type of its own.
            return [each.widened(torch.float32) if isinstance(each, GroupedMatrix) else each for each in matrices]
        if len(kinds) > 1:
            raise ConfigurationError(f"tensors {names}: that only some are stored quantised is not supported")
        if not are_alike(matrices[:together]):
            raise ConfigurationError(f"tensors {names}: different orders of inputs (g_idx) are not supported")
        return matrices

    def _located(self, name: str, rows: slice | None) -> tuple[str, slice | None]:
        """Return where rows of a matrix are: in itself, or in one that contains it and others (Phi-3, GLM)."""
        stem, _, part = name.removesuffix(".weight").rpartition(".")
        for whole, parts in _FUSED.items():
            if part not in parts or self._is_stored(f"{stem}.{parts[0]}") or not self._is_stored(f"{stem}.{whole}"):
                continue
            config = self.checkpoint.config
            heights = [tensor_shape(f"{stem}.{each}.weight", config)[0] for each in parts[: parts.index(part) + 1]]
            start = sum(heights[:-1])
            rows = rows or slice(0, heights[-1])
            return f"{stem}.{whole}.weight", slice(start + rows.start, start + rows.stop)
        return name, rows

    def _is_stored(self, stem: str) -> bool:
        stored = self.checkpoint.config.stored_format
        names = [f"{stem}.weight"]
        if isinstance(stored, GroupedFormat):
            names.append(PackedReader(stored, self.checkpoint.read, self.device).words_of(stem))
        return any(map(self.checkpoint.has, names))

    def _read(self, name: str, rows: slice | None, columns: slice | None) -> torch.Tensor:
        # The rows are passed even if they are all rows: every format checks them.
        tensor, config = self.checkpoint.read(name, rows, columns), self.checkpoint.config
        expected = block_shape(name, config, rows, columns)
        if tuple(tensor.shape) != expected:
            raise _shape_error(name, tuple(tensor.shape), expected)
        is_narrow = tensor.dtype == FP8
        is_integer = tensor.dtype == torch.int8 and isinstance(config.stored_format, Int8Format)
        if not is_integer and (not tensor.is_floating_point() or (tensor.dtype.itemsize == 1 and not is_narrow)):
            raise ConfigurationError(f"tensor {name!r} is stored as {tensor.dtype}, which is not supported")
        if is_narrow and not isinstance(config.stored_format, Fp8Format):
            raise ConfigurationError(
                f"tensor {name!r} is stored in FP8, but config.json has no quantization_config that says how"
            )
        # What a CPU computes with must not be a mapping of the file, which may be overwritten while the model serves.
        return tensor.clone() if self.device.type == "cpu" else tensor

    def _fp8(
        self, name: str, values: torch.Tensor, stored: Fp8Format, rows: slice | None, columns: slice | None
    ) -> QuantisedMatrix:
        if stored.scales is StoredScales.BLOCK:
            return block_matrix(values, self._block_scales(f"{name}{stored.scale_suffix}", name, rows, columns))
        scales = self._scales(
            f"{name}{stored.scale_suffix}", rows, values.shape[0], is_one=stored.scales is StoredScales.TENSOR
        )
        if not stored.has_input_scales:
            return Fp8Matrix(values, scales)
        input_scale = self._scales(f"{name.removesuffix('weight')}input_scale", None, 1, is_one=True)
        if not bool((input_scale > 0).all()):
            raise ConfigurationError(f"tensor {name!r} has an input_scale that is not above 0")
        return Fp8Matrix(values, scales, input_scale)

    def _scales(self, name: str, rows: slice | None, height: int, *, is_one: bool = False) -> torch.Tensor:
        """Return [height] float32; a single one is that of all rows."""
        scales, expected = (self.checkpoint.read(name), 1) if is_one else (self.checkpoint.read(name, rows), height)
        if scales.numel() != expected:
            raise ConfigurationError(f"tensor {name!r} has {scales.numel()} scales where {expected} belong")
        return _finite(name, scales).flatten().expand(height).contiguous()

    def _block_scales(self, name: str, matrix: str, rows: slice | None, columns: slice | None) -> torch.Tensor:
        """Return the scales of each row of a block, [rows, ceil(columns / 128)] float32."""
        height, width = tensor_shape(matrix, self.checkpoint.config)
        rows, columns = rows or slice(0, height), columns or slice(0, width)
        in_blocks = [slice(part.start // FP8_BLOCK, -(-part.stop // FP8_BLOCK)) for part in (rows, columns)]
        scales = self.checkpoint.read(name, *in_blocks)
        expected = tuple(part.stop - part.start for part in in_blocks)
        if tuple(scales.shape) != expected:
            raise ConfigurationError(f"tensor {name!r} has scales of the shape {tuple(scales.shape)}, not {expected}")
        first = rows.start - in_blocks[0].start * FP8_BLOCK
        spread = _finite(name, scales).repeat_interleave(FP8_BLOCK, dim=0)
        return spread[first : first + rows.stop - rows.start]


def _shape_error(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> ConfigurationError:
    return ConfigurationError(f"tensor {name!r} has the shape {shape} where the model's configuration says {expected}")


def _kind(matrix: Matrix) -> tuple[type, Numbers | None]:
    return type(matrix), matrix.numbers if isinstance(matrix, GroupedMatrix) else None


def _finite(name: str, scales: torch.Tensor) -> torch.Tensor:
    """Return scales as float32."""
    wide = scales.float()
    if not bool(torch.isfinite(wide).all()):
        raise ConfigurationError(f"tensor {name!r} has scales that are no numbers")
    return wide

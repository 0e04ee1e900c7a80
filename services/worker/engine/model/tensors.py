"""A rank's tensors as they come out of a checkpoint: of the right shape, and matrices in FP8 where they shall be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from common.errors import ConfigurationError
from services.worker.engine.checkpoints.tensor_shapes import block_shape
from services.worker.engine.model.config import StoredScales
from services.worker.engine.quantization.fp8 import FP8, Fp8Matrix, quantise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.worker.engine.checkpoints.interface import Checkpoint


@dataclass(frozen=True, slots=True)
class Tensors:
    """Reads and checks."""

    checkpoint: Checkpoint
    device: torch.device
    """Where matrices are quantised."""
    quantises: bool = False
    """Whether matrices that are stored in a wider type become FP8."""

    def plain(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """Return a tensor, or a block of a matrix, that is never held in FP8.

        Raises:
            ConfigurationError: it is missing, of another shape than the configuration says, or stored quantised.
        """
        tensor = self._read(name, rows, columns)
        if tensor.dtype == FP8:
            raise ConfigurationError(
                f"tensor {name!r} is stored in FP8, which is supported of projections and experts only"
            )
        return tensor

    def matrix(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor | Fp8Matrix:
        """Return a projection's matrix `name`, which ends with `.weight`, or a block of it.

        A row is quantised as a whole, whichever columns are wanted: so every number of ranks holds the same values.

        Raises:
            ConfigurationError: as `plain`, or its scales are wrong.
        """
        if self.quantises:
            matrix = quantise(self.plain(name, rows).to(self.device))
            return matrix if columns is None else matrix.columns(columns)
        tensor = self._read(name, rows, columns)
        if tensor.dtype != FP8:
            return tensor
        return Fp8Matrix(tensor, self._scales(f"{name}_scale", rows, tensor.shape[0]))

    def alike(self, parts: Sequence[tuple[str, slice | None, slice | None]]) -> list[torch.Tensor | Fp8Matrix]:
        """Return matrices (name, rows, columns) that are multiplied together: all in FP8, or none.

        Raises:
            ConfigurationError: as `matrix`, or they are stored differently.
        """
        matrices = [self.matrix(*part) for part in parts]
        if len({isinstance(matrix, Fp8Matrix) for matrix in matrices}) > 1:
            names = ", ".join(name for name, _, _ in parts)
            raise ConfigurationError(f"tensors {names}: that only some are stored in FP8 is not supported")
        return matrices

    def _read(self, name: str, rows: slice | None, columns: slice | None) -> torch.Tensor:
        # The rows are passed even if they are all rows: every format checks them.
        tensor, config = self.checkpoint.read(name, rows, columns), self.checkpoint.config
        expected = block_shape(name, config, rows, columns)
        if tuple(tensor.shape) != expected:
            raise ConfigurationError(
                f"tensor {name!r} has the shape {tuple(tensor.shape)} where the model's configuration says {expected}"
            )
        is_narrow = tensor.dtype == FP8
        if not tensor.is_floating_point() or (tensor.dtype.itemsize == 1 and not is_narrow):
            raise ConfigurationError(f"tensor {name!r} is stored as {tensor.dtype}, which is not supported")
        if is_narrow and config.stored_scales is None:
            raise ConfigurationError(
                f"tensor {name!r} is stored in FP8, but config.json has no quantization_config that says how"
            )
        return tensor

    def _scales(self, name: str, rows: slice | None, height: int) -> torch.Tensor:
        """Return [height] float32."""
        if self.checkpoint.config.stored_scales is StoredScales.TENSOR:
            scales, expected = self.checkpoint.read(name), 1
        else:
            scales, expected = self.checkpoint.read(name, rows), height
        if scales.numel() != expected:
            raise ConfigurationError(f"tensor {name!r} has {scales.numel()} scales where {expected} belong")
        wide = scales.float().flatten()
        if not bool(torch.isfinite(wide).all()):
            raise ConfigurationError(f"tensor {name!r} has scales that are no numbers")
        return wide.expand(height).contiguous()

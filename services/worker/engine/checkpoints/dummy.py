"""Random weights, for performance work on any config.json."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch

from services.worker.engine.checkpoints.tensor_shapes import tensor_shape

if TYPE_CHECKING:
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.quantization.gguf_blocks import RowBlocks
    from services.worker.engine.quantization.grouped import GroupedMatrix

# A prime, so that rows of a matrix never repeat each other exactly and no two logits tie.
_PERIOD = 1_048_573
_DEVIATION = 0.02
# The types of checkpoints in which dummy weights are made, too; in others they are float32.
_NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class DummyCheckpoint:
    """Random weights by seed, tensor name and element: the same whichever parts a rank reads.

    A block of `_PERIOD` normal values is repeated, which keeps reading 8 billion of them a matter of seconds. It is the
    same for all tensors, which begin at different places of it: an MoE model has ten thousands of them.
    """

    def __init__(self, config: ModelConfig, seed: int = 0, device: torch.device | None = None) -> None:
        """Make weights for `config`, the same on any device, where they are spread out."""
        self.config = config
        self._seed = seed
        generator = torch.Generator().manual_seed(seed)
        block = torch.randn(_PERIOD, generator=generator).mul_(_DEVIATION)
        dtype = _NARROW.get(config.dtype, torch.float32)
        self._identity = hashlib.sha256(f"dummy {seed} {dtype} ".encode() + block.numpy().tobytes()).hexdigest()
        self._block = block.to(device, dtype)

    def identity(self) -> str:
        """Return the digest of the values that all tensors repeat, and of the seed, which says from where on."""
        return self._identity

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name: a matrix in its plain form."""
        return name.endswith((".weight", ".bias", ".A_log", ".dt_bias"))

    def packed(self, name: str, rows: slice | None = None, columns: slice | None = None) -> GroupedMatrix | None:
        """Return None: weights are made as floats."""
        return None

    def row_blocks(self, name: str, rows: slice) -> RowBlocks | None:
        """Return None: weights are made as floats."""
        return None

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """Return a tensor or a block of a matrix; see `Checkpoint.read`."""
        shape = tensor_shape(name, self.config)
        if name.endswith("norm.weight"):
            return torch.full(shape, 1.0 - self.config.norm_offset)
        if name.endswith("_scale.weight"):
            return torch.ones(shape)
        values = self._values(name, shape, rows or slice(0, shape[0]))
        return values if columns is None else values[:, columns].contiguous()

    def has_beside(self, name: str) -> bool:
        """Return whether there is a tensor of this name: a matrix in its plain form."""
        return self.has(name)

    def read_beside(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor of a part beside the decoder; see `Checkpoint.read_beside`."""
        if len(shape) == 1 and name.endswith(".weight"):  # of a norm
            return torch.ones(shape)
        return self._values(name, shape, slice(0, shape[0]))

    def _values(self, name: str, shape: tuple[int, ...], rows: slice) -> torch.Tensor:
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        width = math.prod(shape[1:])
        start, count = rows.start * width, (rows.stop - rows.start) * width
        offset = (int.from_bytes(digest[:8], "little") + start) % _PERIOD
        repeated = self._block.repeat(-(-(offset + count) // _PERIOD))[offset : offset + count]
        # In memory of its own: libraries multiply several times slower what begins at any odd address.
        return repeated.clone().reshape(rows.stop - rows.start, *shape[1:])

"""Where weights come from: one interface over every file format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.quantization.gguf_blocks import RowBlocks
    from services.worker.engine.quantization.grouped import GroupedMatrix


class Checkpoint(Protocol):
    """Random access to a model's tensors under the names that `transformers` gives them.

    A reader holds at most what one call returns, so that a tensor-parallel rank reads its share only. Files are not
    mapped: touching a mapping of a file that another process has truncated would end this one.
    """

    config: ModelConfig

    def identity(self) -> str:
        """Return a SHA-256 digest of all weights that have been read so far; waits until they have been hashed."""
        ...

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""
        ...

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """Return a tensor, or a block of a matrix, on the CPU in the file's own (or a wider) float type.

        Raises:
            ConfigurationError: the checkpoint has no such tensor.
        """
        ...

    def packed(self, name: str, rows: slice | None = None, columns: slice | None = None) -> GroupedMatrix | None:
        """Return a matrix, or a block of it, that is stored in blocks of a few bits; None: it is stored otherwise.

        Raises:
            ConfigurationError: the checkpoint has no such tensor.
        """
        ...

    def row_blocks(self, name: str, rows: slice) -> RowBlocks | None:
        """Return rows of a matrix in the blocks that it is stored in, as they are; None: it is stored otherwise.

        Raises:
            ConfigurationError: the checkpoint has no such tensor.
        """
        ...

    def has_beside(self, name: str) -> bool:
        """Return whether there is a tensor of this very name, which belongs to a part beside the decoder."""
        ...

    def read_beside(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor of a part beside the decoder, such as a vision encoder, on the CPU.

        Raises:
            ConfigurationError: there is none, or it has another shape or no float type.
        """
        ...

"""The embedding of tokens: a matrix of floats, or blocks of a GGUF file whose rows are widened when they are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    import torch

    from services.worker.engine.quantization.gguf_blocks import RowBlocks

# On a CPU, larger ones stay packed: 1 GB in bfloat16 for Llama 3.1 8B, a fifth of a file in Q4_K. Looking up a token in
# a smaller one would save little, and takes 20 microseconds or more instead of 3.
PACKED_FROM_BYTES: Final = 256 << 20


class Embedding(Protocol):
    """This rank's rows of the embedding."""

    def look_up(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [tokens] int64 as [tokens, hidden]."""
        ...


@dataclass(frozen=True, slots=True)
class WideEmbedding:
    """Floats."""

    table: torch.Tensor  # [rows, hidden]

    def look_up(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows; see `Embedding`."""
        return self.table[rows]


@dataclass(frozen=True, slots=True)
class PackedEmbedding:
    """Blocks in the memory of the host."""

    blocks: RowBlocks
    dtype: torch.dtype

    def look_up(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows; see `Embedding`."""
        return self.blocks.widened(rows).to(self.dtype)

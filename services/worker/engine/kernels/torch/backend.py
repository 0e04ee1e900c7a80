"""The back end of plain torch, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.worker.engine.kernels.torch.attention import TorchAttention
from services.worker.engine.kernels.torch.kernels import TorchKernels

if TYPE_CHECKING:
    import torch

    from services.worker.engine.kernels.interface import AttentionBackend, AttentionShape, Kernels


class TorchBackend:
    """Plain torch, on any device."""

    name = "torch"

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """Compute in `dtype` on `device`."""
        self.kernels: Kernels = TorchKernels(dtype, device)

    def prepare(self, most_tokens: int) -> None:
        """Do nothing: products are complete when weights are laid out."""

    def attention(self, shape: AttentionShape, rotary: torch.Tensor) -> AttentionBackend:
        """Return the reference attention."""
        return TorchAttention(shape, rotary)

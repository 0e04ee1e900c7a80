"""The back end of compiled operators, on CPUs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from services.worker.engine.kernels.cpu.attention import CpuAttention, fits
from services.worker.engine.kernels.cpu.kernels import CpuKernels
from services.worker.engine.kernels.cpu.products import Products
from services.worker.engine.kernels.torch.attention import TorchAttention

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.worker.engine.kernels.cpu.library import CpuLibrary
    from services.worker.engine.kernels.cpu.onednn import BlockFunctions
    from services.worker.engine.kernels.interface import AttentionBackend, AttentionShape, Kernels

log = logging.getLogger(__name__)


class CpuBackend:
    """Compiled operators, on CPUs."""

    name = "compiled"

    def __init__(
        self, library: CpuLibrary, dtype: torch.dtype, threads: int, blocks: BlockFunctions | None = None
    ) -> None:
        """Hold weights as `dtype`, compute on `threads` threads; `blocks`: with oneDNN's products."""
        self.kernels: Kernels = CpuKernels(library, dtype, threads, blocks)
        self.products = Products.OWN if blocks is None else Products.ONEDNN
        self._library = library
        self._dtype = dtype
        self._threads = threads

    def with_own_products(self) -> CpuBackend:
        """Return this back end without oneDNN's products."""
        return CpuBackend(self._library, self._dtype, self._threads)

    def can_attend(self, shape: AttentionShape) -> bool:
        """Return whether compiled attention serves heads of `shape`."""
        return fits(self._library, shape)

    def kv_dtype(self, shapes: Iterable[AttentionShape]) -> torch.dtype:
        """Return the type of keys and values by default: bfloat16 beside such weights where tiles multiply it.

        Other attention reads float32 faster, and is more exact.
        """
        has_tiles = self._library.attends_by_tiles and self._dtype == torch.bfloat16
        return torch.bfloat16 if has_tiles and all(map(self.can_attend, shapes)) else self.kernels.activation_dtype

    def prepare(self, most_tokens: int) -> None:
        """Do nothing: products are complete when weights are laid out."""

    def attention(self, shape: AttentionShape, rotary: torch.Tensor) -> AttentionBackend:
        """Return compiled attention where the shape allows, else the reference."""
        if self.can_attend(shape):
            return CpuAttention(self._library, shape, rotary, self._threads)
        if shape.latent_dim is not None:
            log.warning("Latent attention runs in plain torch, slower: compiled attention needs values beside keys")
            return TorchAttention(shape, rotary)
        log.warning(
            "Compiled attention needs page_size and head_dim in multiples of %d; %d and %d run in plain torch, slower",
            self._library.lanes, shape.page_size, shape.head_dim,
        )  # fmt: skip
        return TorchAttention(shape, rotary)

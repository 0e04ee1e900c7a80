"""Memory for keys and values, by pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from services.worker.engine.host_memory import HostArena
from services.worker.engine.kernels.interface import AttentionShape, KvLayer, KvLayout

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class KvPool:
    """Keys and values of `pages` pages; page p of the model is page p of every layer."""

    layers: Sequence[KvLayer]
    pages: int
    page_size: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        held = sum(tensor.nbytes for layer in self.layers for tensor in (layer.keys, layer.values))
        return held // (self.pages * self.page_size)


def bytes_per_token(shape: AttentionShape, layers: int, dtype: torch.dtype) -> int:
    """Return what a pool will need per token."""
    return 2 * layers * shape.kv_width * dtype.itemsize


def allocate_pool(
    shape: AttentionShape, layers: int, pages: int, layout: KvLayout, *, dtype: torch.dtype, device: torch.device
) -> KvPool:
    """Allocate a zeroed pool: what was never written must be finite, since masked values get multiplied by zero."""
    match layout:
        case KvLayout.TOKEN_MAJOR:
            key_page = value_page = (shape.page_size, shape.kv_heads, shape.head_dim)
        case KvLayout.LANES:
            key_page = (shape.kv_heads, shape.head_dim, shape.page_size)
            value_page = (shape.kv_heads, shape.page_size, shape.head_dim)
        case KvLayout.HEAD_MAJOR:
            key_page = value_page = (shape.kv_heads, shape.page_size, shape.head_dim)
    arena = HostArena()
    return KvPool(
        layers=tuple(
            KvLayer(
                keys=_zeros((pages, *key_page), dtype, device, arena),
                values=_zeros((pages, *value_page), dtype, device, arena),
            )
            for _ in range(layers)
        ),
        pages=pages,
        page_size=shape.page_size,
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, arena: HostArena) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return arena.zeros(shape, dtype)

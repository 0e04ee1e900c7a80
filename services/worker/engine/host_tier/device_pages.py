"""Reading device pages as bytes, for workers of other groups."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.worker.engine.host_tier.stream_transfers import make_mover

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.worker.engine.model.kv_pool import KvPool

# Pages collected at a time: some megabytes of staging memory.
STAGED_PAGES = 8


class DevicePages:
    """Pages of a KV pool, each with its layers one after the other, as a page of `HostPool`; see `DevicePageBytes`.

    On a GPU, pages are collected on a stream of their own, beside the passes.
    """

    def __init__(self, pool: KvPool) -> None:
        """Read pages of `pool`, all of whose layers have the same pages."""
        self._pool: KvPool | None = pool
        self._gathering: _Gathering | None = None
        self._lock = threading.Lock()
        self.page_bytes = sum(tensor[0].nbytes for layer in pool.layers for tensor in layer.stored)

    @torch.inference_mode()
    def read_pages(self, pages: Sequence[int]) -> bytes:
        with self._lock:
            if self._pool is None:
                return b""
            if self._gathering is None:
                self._gathering = _Gathering(self._pool)
            read = self._gathering.read
            parts = range(0, len(pages), STAGED_PAGES)
            return b"".join(read(pages[first : first + STAGED_PAGES]) for first in parts)

    def close(self) -> None:
        """Let go of the pool, once the reading in progress has ended."""
        with self._lock:
            self._pool = self._gathering = None


class _Gathering:
    """Staging memory for some pages, and what fills it; made at the first read, as most groups have no peers."""

    def __init__(self, pool: KvPool) -> None:
        keys, *others = pool.layers[0].stored
        # As in the host tier: FP8 is copied as bytes.
        dtype = torch.uint8 if keys.itemsize == 1 else keys.dtype
        shape = (STAGED_PAGES, len(pool.layers), 1 + len(others), keys[0].numel())
        self._staging = torch.empty(shape, dtype=dtype, device=keys.device)
        self._mover = make_mover(pool)
        # torch has no types for it
        self._stream = torch.cuda.Stream(keys.device) if keys.is_cuda else None  # type: ignore[no-untyped-call]

    def read(self, pages: Sequence[int]) -> bytes:
        indices = torch.from_numpy(np.array(pages, np.int64))
        if self._stream is None:
            self._mover.gather(indices, self._staging)
            held = self._staging[: len(pages)]
        else:
            with torch.cuda.stream(self._stream):
                self._mover.gather(indices.to(self._staging.device), self._staging)
                held = self._staging[: len(pages)].cpu()
        content: bytes = held.contiguous().view(torch.uint8).numpy().tobytes()
        return content

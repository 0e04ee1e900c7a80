"""Memory of a decoder on one rank: pages of KV, and states of recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from common.errors import ConfigurationError
from common.host import available_memory
from common.steps import RecurrentStates, WindowPool
from services.worker.engine.backends import check_float8_kv, ranks_on_host
from services.worker.engine.host_tier.pool import count_host_pages
from services.worker.engine.measuring.capacity import (
    LEAST_SNAPSHOTS,
    MemoryMeasure,
    count_pages,
    divide,
    has_window_pool,
)
from services.worker.engine.model.kv_pool import KvPool, allocate_pool, bytes_per_token, join_pools, with_scales
from services.worker.engine.model.recurrent import StatePool, allocate_states, state_bytes
from services.worker.engine.quantization.fp8 import FP8

if TYPE_CHECKING:
    from common.steps import EngineSpec
    from services.worker.engine.kernels.interface import AttentionShape, KernelBackend, KvLayout, KvScales
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.parallel.shards import Span


@dataclass(frozen=True, slots=True)
class DecoderMemory:
    """Sizes and allocates what the layers of one stage keep of each row."""

    spec: EngineSpec
    config: ModelConfig
    layers: Span
    # Of layers without a window, and with one.
    shapes: tuple[AttentionShape, AttentionShape]
    # Of recurrent layers, on this rank.
    state_heads: int
    device: torch.device
    kv_dtype: torch.dtype
    activation_dtype: torch.dtype
    # Whether passes run in CUDA graphs, whose padding rows write to a page more.
    is_captured: bool
    # Of keys and values in FP8.
    scales: tuple[KvScales, ...]

    @property
    def _part(self) -> ModelConfig:
        """The model that these layers are."""
        return self.config.part(self.layers.start, self.layers.stop)

    def pool(self, pages: int, layout: KvLayout, window_pages: int = 0) -> KvPool:
        """Allocate; with `window_pages`, layers with a window have so many pages of their own."""
        window_pages += self.is_captured if window_pages else 0
        pool = self._allocate(pages, layout, self.kv_dtype, window_pages)
        return with_scales(pool, self.scales) if self.scales else pool

    def unquantised_pool(self, pages: int, layout: KvLayout) -> KvPool:
        """Allocate pages, and states of recurrent layers, in the type of activations."""
        return replace(self._allocate(pages, layout, self.activation_dtype), states=self.states())

    def states(self, snapshots: int = 0) -> StatePool | None:
        """Allocate recurrent states of all rows, and snapshots."""
        recurrent = self._part.recurrent
        if recurrent is None:
            return None
        dtype = self.activation_dtype
        return allocate_states(recurrent, self.state_heads, (self.spec.max_rows, snapshots), dtype, self.device)

    def count_pages(self, context: int, free: tuple[int, int], reserve: int) -> tuple[int, int]:
        """Return the number of pages to allocate, and the number for the layers with a window alone.

        `free` are the bytes that were free before and after loading, `reserve` those to leave.
        """
        is_host = self.device.type == "cpu"
        memory = MemoryMeasure(*free, shared_by=ranks_on_host(self.spec) if is_host else 1, is_host=is_host)
        token_bytes = self._token_bytes
        states = self.recurrent_states(0)
        if not self._window:
            kv_bytes = sum(token_bytes)
            if states is not None:
                reserve += (self.spec.max_rows + 1) * states.row_bytes
                # Snapshots take as much memory as pages.
                kv_bytes *= 2
            return count_pages(self.spec, context, kv_bytes, reserve, memory), 0
        return divide(self.spec, context, token_bytes, reserve, memory, self._window)

    def count_snapshots(self, pages: int) -> int:
        """Return the number of snapshots to allocate: with as many as are asked for, or as much memory as `pages`."""
        states = self.recurrent_states(0)
        if states is None or self.spec.snapshots is not None:
            return self.spec.snapshots or 0
        page_bytes = sum(self._token_bytes) * self.spec.page_size
        return max(pages * page_bytes // states.row_bytes, LEAST_SNAPSHOTS)

    def count_host_pages(self, pool: KvPool) -> tuple[int, int]:
        """Return the numbers of pages and of snapshots of the host tier beside `pool`."""
        page_bytes = pool.bytes_per_token * pool.page_size
        free = available_memory() // ranks_on_host(self.spec)
        if self.device.type == "cpu":
            # The pool is allocated, but hardly any of its pages are committed yet.
            free -= pool.pages * page_bytes
        states = self.recurrent_states(0)
        return count_host_pages(self.spec, page_bytes, states.row_bytes if states is not None else 0, free)

    def recurrent_states(self, snapshots: int) -> RecurrentStates | None:
        """Return the sizes of recurrent layers' states; None without such layers."""
        recurrent = self._part.recurrent
        if recurrent is None:
            return None
        dtype = self.activation_dtype
        return RecurrentStates(snapshots, state_bytes(recurrent, self.state_heads, dtype))

    def window_pool(self, pool: KvPool) -> WindowPool | None:
        """Return the sizes of the pages of layers with a window; None if they have none of their own."""
        if not pool.window_pages:
            return None
        pages = pool.window_pages - self.is_captured
        return WindowPool(pages, self._window, sum(self._is_local), pool.window_bytes_per_token)

    def _allocate(self, pages: int, layout: KvLayout, dtype: torch.dtype, window_pages: int = 0) -> KvPool:
        (shape, local_shape), local = self.shapes, sum(self._is_local)
        layers = self._part.attention_layers - local

        def allocate(shape: AttentionShape, layers: int, pages: int) -> KvPool:
            return allocate_pool(shape, layers, pages, layout, dtype=dtype, device=self.device)

        if not window_pages and shape == local_shape:
            return allocate(shape, layers + local, pages)
        pool = allocate(shape, layers, pages)
        pool = join_pools(pool, allocate(local_shape, local, window_pages or pages), self._is_local)
        return pool if window_pages else replace(pool, window_pages=0, window_bytes_per_token=0)

    @property
    def _token_bytes(self) -> tuple[int, int]:
        """Bytes of a token's KV in the layers without a window, and in those with one."""
        (shape, local_shape), local = self.shapes, sum(self._is_local)
        layers = self._part.attention_layers - local
        return bytes_per_token(shape, layers, self.kv_dtype), bytes_per_token(local_shape, local, self.kv_dtype)

    @property
    def _is_local(self) -> tuple[bool, ...]:
        """Which layers attend to a window only."""
        return tuple(self._part.window_of(i) is not None for i in range(self._part.layers))

    @property
    def _window(self) -> int:
        """Tokens that any of them sees; 0: they have no pages of their own."""
        if not has_window_pool(self.spec, self._is_local):
            return 0
        return max(window for window in self.config.windows if window is not None)


def check_memory(spec: EngineSpec, config: ModelConfig, backend: KernelBackend, kv_dtype: torch.dtype) -> None:
    """Check that KV and states can be kept as `spec` says, on the current device.

    Raises:
        ConfigurationError: they cannot.
    """
    if kv_dtype == FP8 and config.latent is not None:
        raise ConfigurationError(
            f"kv_dtype=fp8: latent attention ({config.family}) keeps one row for both, which is not "
            "supported in FP8; use kv_dtype=auto"
        )
    if kv_dtype == FP8 and backend.name == "gpu":
        check_float8_kv(torch.cuda.get_device_capability())

"""Host memory for KV pages that have left the device."""

from __future__ import annotations

import math
import mmap
import threading
from typing import TYPE_CHECKING

import torch

from common.errors import ConfigurationError
from services.worker.engine.host_memory import HostArena
from services.worker.engine.host_tier.state_slots import allocate_host_states, slot_bytes
from services.worker.engine.measuring.capacity import LEAST_SNAPSHOTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.steps import EngineSpec
    from services.worker.engine.host_tier.state_slots import HostStates
    from services.worker.engine.model.kv_pool import KvPool

# Bytes page-locked in one call: enough that calls cost little, and few enough that the first pages are ready soon.
_PINNED_AT_ONCE = 1024**3
# Share of the free host memory for the pool; the rest is left to the page cache and other processes.
_MEMORY_SHARE = 0.9


class HostPool:
    """Pages of a rank's host tier. A page holds its layers one after the other, keys before values.

    So a page is one run of bytes: long copies over the bus however pages are scattered, and an object for storage as it
    is. Its tokens are laid out as on the device.

    `memory` is [pages, layers, 2, elements of a layer's keys in a page]; with latent attention 1 instead of 2. Where
    layers differ in that, it is [pages, 1, 1, elements of a page]. `states` are snapshots of recurrent layers.
    """

    def __init__(self, memory: torch.Tensor, states: HostStates | None = None) -> None:
        """Hand out parts of `memory`, which is contiguous; `states` are snapshots beside the pages, if any."""
        self.memory = memory
        self.states = states
        self._bytes = memory.view(torch.uint8).view(memory.shape[0], -1).numpy()

    @property
    def pages(self) -> int:
        """Number of pages."""
        return self.memory.shape[0]

    @property
    def snapshots(self) -> int:
        """Number of snapshots."""
        return 0 if self.states is None else self.states.slots

    @property
    def page_bytes(self) -> int:
        return int(self._bytes.shape[1])

    def read_page(self, page: int) -> bytes:
        content: bytes = self._bytes[page].tobytes()
        return content

    def write_page(self, page: int, content: memoryview) -> None:
        """Overwrite a page with `page_bytes` bytes."""
        self._bytes[page] = memoryview(content).cast("B")


def count_host_pages(spec: EngineSpec, page_bytes: int, row_bytes: int, free_bytes: int) -> tuple[int, int]:
    """Return the numbers of pages and of snapshots that the host tier of a rank gets, 0 for none.

    `row_bytes` are those of a snapshot of recurrent states, 0 without such layers. As on the device, pages and
    snapshots get as much memory each.

    Raises:
        ConfigurationError: they would not fit into `free_bytes` of host memory.
    """
    state_bytes = slot_bytes(row_bytes)
    pages, snapshots = spec.host_pages, spec.host_snapshots
    if pages is None:
        pages = spec.host_bytes // (2 * page_bytes if row_bytes else page_bytes)
    if not row_bytes:
        snapshots = 0
    elif snapshots is None:
        snapshots = max(pages * page_bytes // state_bytes, min(pages, LEAST_SNAPSHOTS))
    size = pages * page_bytes + snapshots * state_bytes
    if size > free_bytes * _MEMORY_SHARE:
        kinds = f"{pages} pages and {snapshots} snapshots" if row_bytes else f"{pages} pages"
        raise ConfigurationError(
            f"a host tier of {kinds} takes {size >> 20} MiB on each rank, and {free_bytes >> 20} MiB of host memory "
            "are free"
        )
    if spec.host_pages is None and spec.host_bytes and not pages:
        raise ConfigurationError(f"a host tier of {spec.host_bytes} bytes does not hold a page of {page_bytes} bytes")
    return pages, snapshots


def allocate_host_pool(pool: KvPool, pages: int, snapshots: int = 0) -> HostPool:
    """Allocate a host tier for the pages and states of `pool`; memory is touched only as it is used."""
    shape, dtype = host_page_shape(pool)
    states = allocate_host_states(pool.states, snapshots) if pool.states is not None and snapshots else None
    return HostPool(HostArena().zeros((pages, *shape), dtype), states)


def host_page_shape(pool: KvPool) -> tuple[tuple[int, int, int], torch.dtype]:
    """Return the shape and type of a page of `pool` in a `HostPool`."""
    keys, *others = pool.layers[0].stored
    # FP8 is copied as bytes, since torch does not index it everywhere.
    dtype = torch.uint8 if keys.itemsize == 1 else keys.dtype
    sizes = [math.prod(tensor.shape[1:]) for layer in pool.layers for tensor in layer.stored]
    if len(set(sizes)) > 1:
        return (1, 1, sum(sizes)), dtype
    return (len(pool.layers), 1 + len(others), sizes[0]), dtype


def parts_of_pages(pool: KvPool, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, slice]]:
    """Yield keys, and values, of each layer, [pages, elements], and which elements of a host page they are."""
    end = 0
    for layer in pool.layers:
        for tensor in layer.stored:
            held = tensor.view(dtype).view(pool.pages, -1)
            start, end = end, end + held.shape[1]
            yield held, slice(start, end)


class PinnedRange:
    """Page-locks a pool from its first page on, in a thread of its own: it takes long for hundreds of gigabytes.

    Copies to and from pages that are not locked yet have to wait.
    """

    def __init__(self, pool: HostPool, device: torch.device) -> None:
        """Begin to lock."""
        self.error: str | None = None
        # Locked together, from a multiple of this on; a copy must not cross the border of two such ranges.
        self.pages_at_once = _pages_at_once(pool.page_bytes)
        self._pool = pool
        self._device = device
        self._ready_pages = 0
        self._registered: list[int] = []
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pinning", daemon=True)
        self._thread.start()

    @property
    def ready_pages(self) -> int:
        """Pages [0, ready_pages) are locked."""
        return self._ready_pages

    def close(self) -> None:
        """Unlock everything; no copy may be under way."""
        self._is_closing.set()
        self._thread.join()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types for it
        for address in self._registered:
            runtime.cudaHostUnregister(address)
        self._registered.clear()

    def _run(self) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types for it
        torch.cuda.set_device(self._device)
        base = self._pool.memory.data_ptr()
        while self._ready_pages < self._pool.pages and not self._is_closing.is_set():
            pages = min(self.pages_at_once, self._pool.pages - self._ready_pages)
            address = base + self._ready_pages * self._pool.page_bytes
            code = int(runtime.cudaHostRegister(address, pages * self._pool.page_bytes, 0))
            if code:
                self.error = f"page-locking host memory failed with code {code} after {self._ready_pages} pages"
                return
            self._registered.append(address)
            self._ready_pages += pages


def _pages_at_once(page_bytes: int) -> int:
    """Return the number of pages locked in one call: ranges that do not share a page of the system's memory."""
    least = mmap.PAGESIZE // math.gcd(page_bytes, mmap.PAGESIZE)
    return max(1, _PINNED_AT_ONCE // (page_bytes * least)) * least

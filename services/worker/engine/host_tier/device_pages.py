"""Reading and writing device pages as bytes, to and from workers of other groups."""

from __future__ import annotations

import logging
import secrets
import threading
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.worker.engine.host_tier.cuda_sharing import CudaSharing
from services.worker.engine.host_tier.device_snapshots import DeviceSnapshots, snapshot_form
from services.worker.engine.host_tier.page_form import PageForm
from services.worker.engine.host_tier.pool import host_page_shape
from services.worker.engine.host_tier.shared_pages import Borrowers, SharedPages, SharingError, share_pages
from services.worker.engine.host_tier.stream_transfers import make_mover
from services.worker.engine.kernels.interface import KvLayout
from services.worker.engine.parallel.shards import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.worker.engine.execution.interface import AfterPasses
    from services.worker.engine.host_tier.nixl_agents import NixlAgents, NixlLoan
    from services.worker.engine.host_tier.shared_pages import MemorySharing
    from services.worker.engine.kernels.interface import AttentionShape
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.model.kv_pool import KvPool
    from services.worker.engine.parallel.shards import ModelShard

log = logging.getLogger(__name__)

# Pages collected at a time: some megabytes of staging memory.
STAGED_PAGES = 8


def rank_form(
    pool: KvPool, layout: KvLayout, shape: AttentionShape, shard: ModelShard, config: ModelConfig
) -> PageForm | None:
    """Return where a rank's heads lie in its pages, and in snapshots if it has any; None if layers have other pages."""
    form = page_form_of(pool, layout, shape, shard.kv_heads, config.kv_heads)
    if form is None or pool.states is None or shard.state_heads is None or config.recurrent is None:
        return form
    return replace(form, snapshot=snapshot_form(pool.states, shard.state_heads, config.recurrent.key_heads))


def page_form_of(
    pool: KvPool, layout: KvLayout, shape: AttentionShape, kv_heads: Span, total_heads: int
) -> PageForm | None:
    """Return where this rank's `kv_heads` lie in pages of `pool`; None if layers have other pages.

    In layers with other numbers of heads, each of `kv_heads` stands for as many of theirs.
    """
    if pool.window_pages:
        return None
    pages = [tensor[0] for layer in pool.layers for tensor in layer.stored]
    if shape.latent_dim is not None:
        return PageForm(((len(pages), pages[0].nbytes),), Span(0, 1), 1)
    # Where tokens are outermost, each has the heads one after the other.
    runs = pool.page_size if layout is KvLayout.TOKEN_MAJOR else 1
    parts = tuple(
        (len(list(alike)) * runs, page_bytes // runs // len(kv_heads))
        for page_bytes, alike in groupby(page.nbytes for page in pages)
    )
    return PageForm(parts, kv_heads, total_heads)


class DevicePages:
    """Pages of a KV pool, each with its layers one after the other, as a page of `HostPool`; see `DevicePageBytes`.

    On a GPU, pages are collected on a stream of their own, beside the passes.
    """

    def __init__(
        self, pool: KvPool, form: PageForm, sharing: MemorySharing | None = None, nixl: NixlAgents | None = None
    ) -> None:
        """Read and write pages of `pool`, which has no window pages, of this form.

        If all layers' pages have one size, other processes may map its memory by `sharing`, and read it by `nixl`, as
        far as these are there.
        """
        self.form = form
        self.snapshots: DeviceSnapshots | None = None
        if pool.states is not None and form.snapshot is not None:
            self.snapshots = DeviceSnapshots(pool.states, form.snapshot)
        self._sharing = sharing if len(form.parts) == 1 else None
        self._nixl = nixl if len(form.parts) == 1 else None
        self._name = secrets.token_bytes(16)
        self._shared: SharedPages | None = None
        # The same memory over NIXL.
        self._loan: NixlLoan | None = None
        self._over_nixl: SharedPages | None = None
        self._borrowers = Borrowers()
        self._pool: KvPool | None = pool
        self._staged: _Staging | None = None
        self._lock = threading.Lock()

    @torch.inference_mode()
    def read_pages(self, pages: Sequence[int], heads: Span) -> bytes:
        with self._lock:
            if self._pool is None:
                return b""
            read = self._staging(self._pool).read
            parts = range(0, len(pages), STAGED_PAGES)
            return b"".join(self.form.cut(read(pages[first : first + STAGED_PAGES]), heads) for first in parts)

    def after_passes(self) -> AfterPasses | None:
        device = None if self._pool is None else self._pool.layers[0].keys.device
        if device is None or device.type != "cuda":
            # Passes are over when the engine's thread is here.
            return None
        # Blocking: the waiting thread leaves the processor to others.
        launched = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch has no types for it
        launched.record(torch.cuda.current_stream(device))
        is_over = launched.query()  # type: ignore[no-untyped-call]
        return None if is_over else launched.synchronize

    @torch.inference_mode()
    def write_pages(self, pages: Sequence[int], content: memoryview) -> None:
        size = self.form.page_bytes
        with self._lock:
            if self._pool is None:
                return
            staging = self._staging(self._pool)
            for first in range(0, len(pages), STAGED_PAGES):
                part = pages[first : first + STAGED_PAGES]
                staging.write(part, content[first * size : (first + len(part)) * size])

    @property
    def shared_name(self) -> bytes | None:
        return None if self._shared is None and self._over_nixl is None else self._name

    def lend(
        self, recall: Callable[[], None], *, is_here: bool = True, reads_over_nixl: bool = False
    ) -> SharedPages | None:
        # Where GPUs reach each other, mapped memory is nearest.
        maps = is_here and self._sharing is not None
        if not (maps or (reads_over_nixl and self._nixl is not None)) or not self._borrowers.add(recall):
            return None
        # From here on, `close` waits.
        try:
            with self._lock:
                memory = None if self._pool is None else self._share(self._pool) if maps else self._lend(self._pool)
        except SharingError as error:
            log.info("workers of other groups read pages over gRPC, as memory cannot be shared: %s", error)
            memory = None
            if maps:
                self._sharing = None
            else:
                self._nixl = None
        if memory is None:
            self._borrowers.remove(recall)
        return memory

    def take_back(self, recall: Callable[[], None]) -> None:
        self._borrowers.remove(recall)

    def close(self) -> None:
        """Let go of the pool, once what is under way has ended and other processes have unmapped its memory."""
        if not self._borrowers.close():
            log.warning("a worker of another group keeps memory of this one mapped")
        if self.snapshots is not None:
            self.snapshots.close()
        with self._lock:
            # Before the memory goes: a late read would find something else there, or nothing.
            if self._loan is not None:
                self._loan.close()
            self._pool = self._staged = self._loan = None

    def _share(self, pool: KvPool) -> SharedPages:
        assert self._sharing is not None, "asked before"
        if self._shared is None:
            tensors = _tensors_of(pool)
            addresses = [tensor.data_ptr() for tensor in tensors]
            self._shared = share_pages(self._name, addresses, pool.pages, tensors[0][0].nbytes, self._sharing)
        return self._shared

    def _lend(self, pool: KvPool) -> SharedPages:
        assert self._nixl is not None, "asked before"
        if self._over_nixl is None:
            tensors = _tensors_of(pool)
            self._loan = self._nixl.lend(tensors)
            places = tuple((0, tensor.data_ptr()) for tensor in tensors)
            self._over_nixl = SharedPages(
                self._name, pool.pages, tensors[0][0].nbytes, (self._loan.handle,), places, over_nixl=True
            )
        return self._over_nixl

    def _staging(self, pool: KvPool) -> _Staging:
        if self._staged is None:
            self._staged = _Staging(pool)
        return self._staged


def find_sharing(device: torch.device) -> MemorySharing | None:
    """Return the way to share memory of a device with other processes; None for the CPU."""
    return CudaSharing(device.index or 0) if device.type == "cuda" else None


def _tensors_of(pool: KvPool) -> list[torch.Tensor]:
    return [tensor for layer in pool.layers for tensor in layer.stored]


class _Staging:
    """Staging memory for some pages, and what fills and empties it; made at the first use, as most have no peers."""

    def __init__(self, pool: KvPool) -> None:
        keys = pool.layers[0].keys
        # As in the host tier.
        shape, dtype = host_page_shape(pool)
        self._memory = torch.empty((STAGED_PAGES, *shape), dtype=dtype, device=keys.device)
        self._mover = make_mover(pool)
        # torch has no types for it
        self._stream = torch.cuda.Stream(keys.device) if keys.is_cuda else None  # type: ignore[no-untyped-call]

    def read(self, pages: Sequence[int]) -> bytes:
        indices = torch.from_numpy(np.array(pages, np.int64))
        if self._stream is None:
            self._mover.gather(indices, self._memory)
            held = self._memory[: len(pages)]
        else:
            with torch.cuda.stream(self._stream):
                self._mover.gather(indices.to(self._memory.device), self._memory)
                held = self._memory[: len(pages)].cpu()
        content: bytes = held.contiguous().view(torch.uint8).numpy().tobytes()
        return content

    def write(self, pages: Sequence[int], content: memoryview) -> None:
        indices = torch.from_numpy(np.array(pages, np.int64))
        # A copy: torch takes no memory that is read-only.
        held = torch.from_numpy(np.array(content)).view(self._memory.dtype).view(len(pages), *self._memory.shape[1:])
        if self._stream is None:
            self._memory[: len(pages)] = held
            self._mover.scatter(indices, self._memory)
            return
        with torch.cuda.stream(self._stream):
            self._memory[: len(pages)] = held.to(self._memory.device)
            self._mover.scatter(indices.to(self._memory.device), self._memory)
        self._stream.synchronize()

"""Copies from KV memory of other processes' GPUs into pages of this process: over NVLink or the bus, past Python."""

from __future__ import annotations

import queue
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.worker.engine.host_tier.shared_pages import (
    DIRECT_SLICE_BYTES,
    SLICE_BYTES,
    SLICES_AT_ONCE,
    MappedPages,
    SharingError,
)
from services.worker.engine.host_tier.stream_transfers import runs
from services.worker.engine.kernels.gpu.libraries import has_triton

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from common.steps import PageIds
    from services.worker.engine.host_tier.shared_pages import MemorySharing, SharedPages
    from services.worker.engine.host_tier.stream_transfers import StreamTransfers
    from services.worker.engine.kernels.gpu.page_moves import ProgramPageMover


class PeerCopies:
    """Copies pages slice by slice on streams of its own, beside the passes; see `PeerPageCopies`.

    Those for the host are collected in staging memory on this device, and cross the bus from there in long runs.
    """

    reads_over_nixl = False

    def __init__(self, transfers: StreamTransfers, mover: ProgramPageMover, sharing: MemorySharing) -> None:
        """Copy to the pages of `transfers` on the host, and to those of `mover` on its device."""
        self._host = transfers.host
        self._pinned = transfers.pinned
        self._mover = mover
        self._device = transfers.device
        self._sharing = sharing
        self._slots: queue.SimpleQueue[_Slot] | None = None
        self._lock = threading.Lock()

    @property
    def slice_pages(self) -> int:
        return max(1, min(self._host.pages, SLICE_BYTES // self._host.page_bytes))

    @property
    def direct_slice_pages(self) -> int:
        return max(1, DIRECT_SLICE_BYTES // self._host.page_bytes)

    def can_write(self, host_pages: PageIds) -> bool:
        return int(host_pages.max(initial=0)) < self._pinned.ready_pages

    def map(self, memory: SharedPages) -> MappedPages:
        if memory.over_nixl:
            raise SharingError("it is lent over NIXL only")
        self._check_form(memory)
        self._staging()
        return MappedPages(memory, self._sharing)

    @torch.inference_mode()
    def copy(self, source: MappedPages, pages: PageIds, host_pages: PageIds) -> None:
        with self._slot_for(source, pages) as slot:
            slot.copy(source, pages, self._host.memory, runs(host_pages, self._pinned.pages_at_once))

    @torch.inference_mode()
    def copy_to_device(self, source: MappedPages, pages: PageIds, device_pages: PageIds) -> None:
        with self._slot_for(source, pages) as slot:
            slot.copy_to_device(source, pages, self._mover, device_pages)

    @contextmanager
    def _slot_for(self, source: MappedPages, pages: PageIds) -> Iterator[_Slot]:
        """Give staging memory that no other copy uses meanwhile."""
        # An access outside mapped memory would end every computation of this process.
        self._check_form(source.memory)
        if len(pages) and (pages.min() < 0 or pages.max() >= source.memory.pages):
            raise SharingError("there are no such pages")
        slots = self._staging()
        slot = slots.get()
        try:
            yield slot
        finally:
            slots.put(slot)

    def _check_form(self, memory: SharedPages) -> None:
        _, layers, halves, elements = self._host.memory.shape
        page_bytes = elements * self._host.memory.itemsize
        if (len(memory.tensors), memory.tensor_page_bytes) != (layers * halves, page_bytes):
            raise SharingError("its pages have another form")

    def _staging(self) -> queue.SimpleQueue[_Slot]:
        """Return the staging memory that is not in use; allocated at the first use, as most groups have no peers."""
        with self._lock:
            if self._slots is None:
                shape = (self.slice_pages, *self._host.memory.shape[1:])
                slots: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
                try:
                    for _ in range(SLICES_AT_ONCE):
                        slots.put(_Slot(torch.empty(shape, dtype=self._host.memory.dtype, device=self._device)))
                except torch.OutOfMemoryError as error:
                    raise SharingError(f"no memory to collect pages in: {error}") from error
                self._slots = slots
            return self._slots


class _Slot:
    """Staging memory of one slice, laid out as that of `HostPool`, and a stream."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        # torch has no types for them
        self._stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]
        self._is_done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        # The latest source, and what moves its pages: its addresses are uploaded once.
        self._source: MappedPages | None = None
        self._source_mover: ProgramPageMover | None = None

        # Compiles the programs before a lender waits for them.
        with torch.cuda.stream(self._stream):
            itself = self._mover([memory.data_ptr()] * memory[0, ..., 0].numel(), memory[0, 0, 0].nbytes)
            page = torch.zeros(1, dtype=torch.int64, device=memory.device)
            itself.gather(page, memory)
            # To where it is.
            itself.copy_from(itself, page, page)
        self._stream.synchronize()

    def copy(
        self, source: MappedPages, pages: PageIds, host: torch.Tensor, host_runs: Iterable[tuple[int, int, int]]
    ) -> None:
        """Copy pages, [pages] int32, to `host`, [pages, …], and wait until that is done; see `runs`."""
        # All on this stream: others wait for passes.
        with torch.cuda.stream(self._stream):
            self._mover_of(source).gather(self._upload(pages)[0], self._memory)
            for first, page, length in host_runs:
                host[page : page + length].copy_(self._memory[first : first + length], non_blocking=True)
            self._is_done.record(self._stream)
        self._is_done.synchronize()

    def copy_to_device(
        self, source: MappedPages, pages: PageIds, mover: ProgramPageMover, device_pages: PageIds
    ) -> None:
        """Copy pages, [pages] int32, to `device_pages`, [pages] int32, of `mover`'s pool; wait until that is done."""
        with torch.cuda.stream(self._stream):
            indices, into = self._upload(pages, device_pages)
            mover.copy_from(self._mover_of(source), indices, into)
            self._is_done.record(self._stream)
        self._is_done.synchronize()

    def _upload(self, *ids: PageIds) -> torch.Tensor:
        """Return page ids on the device, [lists, pages] int64."""
        return torch.from_numpy(np.stack(ids).astype(np.int64)).to(self._memory.device)

    def _mover_of(self, source: MappedPages) -> ProgramPageMover:
        if self._source_mover is None or self._source is not source:
            self._source_mover = self._mover(source.addresses, source.memory.tensor_page_bytes)
            self._source = source
        return self._source_mover

    def _mover(self, addresses: Sequence[int], page_bytes: int) -> ProgramPageMover:
        # Imported here because it needs Triton.
        from services.worker.engine.kernels.gpu.page_moves import ProgramPageMover

        return ProgramPageMover(addresses, page_bytes, self._memory.device)


def make_peer_copies(transfers: StreamTransfers, sharing: MemorySharing) -> PeerCopies | None:
    """Return copies to the host pages of `transfers`; None without Triton, or if pages have odd sizes."""
    memory = transfers.host.memory
    if memory.shape[-1] * memory.itemsize % 8 or not has_triton():
        return None
    # Imported here because it needs Triton.
    from services.worker.engine.kernels.gpu.page_moves import ProgramPageMover

    mover = transfers.mover
    return PeerCopies(transfers, mover, sharing) if isinstance(mover, ProgramPageMover) else None

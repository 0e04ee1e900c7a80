"""Transfers on streams of their own, for engines on a GPU: the passes go on meanwhile."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from common.transfers import TransferAck, TransferDirection
from services.worker.engine.host_tier.pool import HostPool, PinnedRange, parts_of_pages
from services.worker.engine.kernels.gpu.libraries import has_triton

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from common.steps import PageIds
    from common.transfers import Transfer
    from services.worker.engine.host_tier.state_slots import HostStates
    from services.worker.engine.model.kv_pool import KvPool
    from services.worker.engine.model.recurrent import StatePool

log = logging.getLogger(__name__)

# Device memory between the pool, whose pages are scattered over layers, and the bus, which needs long copies.
STAGING_BYTES = 32 * 1024**2
# For loads there are two such buffers: while the bus fills one, pages are distributed from the other. Backups have one,
# so that the bus has nothing to do for a moment every 0.6 ms: a pass's tokens go the same way, and would wait for all.
BUFFERS = {TransferDirection.HOST_TO_DEVICE: 2, TransferDirection.DEVICE_TO_HOST: 1}
# How long an engine without work stays with its copies before it looks for the next plan, and how often it looks.
IDLE_BUDGET_S = 0.005
IDLE_INTERVAL_S = 0.0002


@dataclass(slots=True)
class _Running:
    transfer: Transfer
    started: torch.cuda.Event
    ended: torch.cuda.Event


class PageMover(Protocol):
    """Moves pages between a pool and the first ones of staging memory, which is laid out as that of `HostPool`."""

    def gather(self, pages: torch.Tensor, staging: torch.Tensor) -> None:
        """Collect scattered pages of all layers, [pages] int64."""

    def scatter(self, pages: torch.Tensor, staging: torch.Tensor) -> None:
        """Do the opposite."""


class StreamTransfers:
    """Moves pages on side streams; see `Transfers`.

    Side streams wait for the passes that were launched before the plan; nothing ever waits for a side stream, as the
    scheduler does not use the pages until they are acknowledged. Loads and backups have streams of their own: the
    bus carries both ways at once. Pages that are not page-locked yet make their transfer wait here.
    """

    def __init__(self, pool: KvPool, host: HostPool, device: torch.device) -> None:
        """Copy between `pool` on `device` and `host`."""
        self.host = host
        self.device = device
        self.pinned = PinnedRange(host, device)
        # Likewise slots of snapshots, each as a page.
        self._pinned_states = None if host.states is None else PinnedRange(HostPool(host.states.memory), device)
        self.mover = make_mover(pool)
        states = None if pool.states is None or host.states is None else (pool.states, host.states)
        self._lanes = {
            direction: _Lane(self.mover, host, device, self.pinned.pages_at_once, BUFFERS[direction], states)
            for direction in (TransferDirection.HOST_TO_DEVICE, TransferDirection.DEVICE_TO_HOST)
        }
        self._waiting: deque[Transfer] = deque()
        self._has_warned = False

    def begin(self, transfers: Iterable[Transfer]) -> None:
        """Launch a plan's transfers, in stream order after the passes before it."""
        self._waiting.extend(transfers)
        self._launch()

    def poll(self) -> tuple[TransferAck, ...]:
        """Return the acknowledgements of finished transfers, without waiting."""
        self._launch()
        return tuple(ack for lane in self._lanes.values() for ack in lane.take_done())

    def wait(self) -> tuple[TransferAck, ...]:
        """Look again and again for a while until something is done."""
        end = time.perf_counter() + IDLE_BUDGET_S
        while True:
            acks = self.poll()
            is_idle = not self._waiting and not any(lane.is_busy for lane in self._lanes.values())
            if acks or is_idle or time.perf_counter() > end:
                return acks
            time.sleep(IDLE_INTERVAL_S)

    def reset(self) -> None:
        """Drop the transfers that have not begun, and wait for those that have."""
        self._waiting.clear()
        for lane in self._lanes.values():
            lane.drain()

    def close(self) -> None:
        """Wait for the transfers that have begun, and unlock the host's pages."""
        self.reset()
        for pinned in self._all_pinned:
            pinned.close()

    def _launch(self) -> None:
        for _ in range(len(self._waiting)):
            transfer = self._waiting.popleft()
            if self._is_pinned(transfer):
                self._lanes[transfer.direction].launch(transfer)
            else:
                self._waiting.append(transfer)
        error = next((pinned.error for pinned in self._all_pinned if pinned.error is not None), None)
        if error is not None and not self._has_warned:
            self._has_warned = True
            log.error("The host tier is slow, and slows decoding: %s", error)

    @property
    def _all_pinned(self) -> tuple[PinnedRange, ...]:
        return (self.pinned,) if self._pinned_states is None else (self.pinned, self._pinned_states)

    def _is_pinned(self, transfer: Transfer) -> bool:
        """Return whether all memory of a transfer on the host is page-locked, or will not be.

        Copies from memory that is not page-locked delay passes, but are correct.
        """
        slots = transfer.host_pages, transfer.host_snapshots
        return all(
            pinned.error is not None or int(each.max(initial=-1)) < pinned.ready_pages
            for each, pinned in zip(slots, self._all_pinned, strict=False)
        )


class _Lane:
    """One direction, in order: a stream for the bus, one for collecting and distributing, and staging memory."""

    def __init__(
        self,
        mover: PageMover,
        host: HostPool,
        device: torch.device,
        border: int,
        buffers: int,
        states: tuple[StatePool, HostStates] | None,
    ) -> None:
        self._mover = mover
        self._states = states
        self._border = border
        self._host = host
        self._device = device
        # torch has no types for it
        self._bus, self._moves = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        _, layers, halves, elements = host.memory.shape
        pages = max(1, min(host.pages, STAGING_BYTES // host.page_bytes))
        self._buffers = [
            _Buffer(torch.empty((pages, layers, halves, elements), dtype=host.memory.dtype, device=device))
            for _ in range(buffers)
        ]
        self._turn = 0
        self._running: deque[_Running] = deque()

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    @torch.inference_mode()
    def launch(self, transfer: Transfer) -> None:
        started = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        is_backup = transfer.direction is TransferDirection.DEVICE_TO_HOST
        first, last = (self._moves, self._bus) if is_backup else (self._bus, self._moves)
        self._moves.wait_stream(torch.cuda.current_stream(self._device))
        # A load reads what the host has, whatever the passes do, but is timed from its own begin.
        if transfer.pages:
            indices = torch.from_numpy(transfer.device_pages.astype(np.int64)).pin_memory()
            with torch.cuda.stream(self._moves):
                device_pages = indices.to(self._device, non_blocking=True)
            started.record(first)
            step = self._buffers[0].memory.shape[0]
            for start in range(0, transfer.pages, step):
                part = slice(start, start + step)
                self._copy(device_pages[part], transfer.host_pages[part], is_backup=is_backup)
        else:
            started.record(first)
        if len(transfer.device_snapshots):
            self._copy_snapshots(transfer, last, is_backup=is_backup)
        ended.record(last)
        self._running.append(_Running(transfer, started, ended))

    def take_done(self) -> Iterator[TransferAck]:
        while self._running and self._running[0].ended.query():  # type: ignore[no-untyped-call]
            done = self._running.popleft()
            duration_us = round(done.started.elapsed_time(done.ended) * 1e3)
            yield TransferAck(done.transfer.transfer_id, done.transfer.pages, duration_us)

    def drain(self) -> None:
        self._bus.synchronize()
        self._moves.synchronize()
        self._running.clear()

    def _copy(self, device_pages: torch.Tensor, host_pages: PageIds, *, is_backup: bool) -> None:
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._buffers)
        first, last = (self._moves, self._bus) if is_backup else (self._bus, self._moves)
        first.wait_event(buffer.is_free)
        with torch.cuda.stream(first):
            if is_backup:
                self._mover.gather(device_pages, buffer.memory)
            else:
                self._cross_bus(buffer.memory, host_pages, is_backup=False)
        buffer.is_full.record(first)
        last.wait_event(buffer.is_full)
        with torch.cuda.stream(last):
            if is_backup:
                self._cross_bus(buffer.memory, host_pages, is_backup=True)
            else:
                self._mover.scatter(device_pages, buffer.memory)
        buffer.is_free.record(last)

    def _copy_snapshots(self, transfer: Transfer, stream: torch.cuda.Stream, *, is_backup: bool) -> None:
        """Copy snapshots, which need no staging memory: on the device, each layer's part is in one piece."""
        assert self._states is not None, "plans of other models copy no snapshots"
        states, host = self._states
        # This waits for the passes, too, of which the bus's stream does not know otherwise.
        stream.wait_stream(self._moves)
        copy = host.back_up if is_backup else host.load
        with torch.cuda.stream(stream):
            for device_slot, host_slot in zip(
                transfer.device_snapshots.tolist(), transfer.host_snapshots.tolist(), strict=True
            ):
                copy(states, device_slot, host_slot)

    def _cross_bus(self, staging: torch.Tensor, host_pages: PageIds, *, is_backup: bool) -> None:
        for first, page, length in runs(host_pages, self._border):
            on_device = staging[first : first + length]
            on_host = self._host.memory[page : page + length]
            if is_backup:
                on_host.copy_(on_device, non_blocking=True)
            else:
                on_device.copy_(on_host, non_blocking=True)


class _Buffer:
    """Staging memory, and events that say when it may be filled and when it is."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory  # laid out as that of `HostPool`
        self.is_free = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.is_full = torch.cuda.Event()  # type: ignore[no-untyped-call]


class TorchPageMover:
    """Moves layer by layer: right everywhere, a launch for each layer's keys and one for its values."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool

    def gather(self, pages: torch.Tensor, staging: torch.Tensor) -> None:
        staged = staging.flatten(1)
        for held, part in parts_of_pages(self._pool, staging.dtype):
            staged[: len(pages), part] = held.index_select(0, pages)

    def scatter(self, pages: torch.Tensor, staging: torch.Tensor) -> None:
        staged = staging.flatten(1)
        for held, part in parts_of_pages(self._pool, staging.dtype):
            held.index_copy_(0, pages, staged[: len(pages), part])


def make_mover(pool: KvPool) -> PageMover:
    """Return one program for all layers where Triton is installed and pages consist of whole words."""
    if has_triton():
        # Imported here because it needs Triton.
        from services.worker.engine.kernels.gpu.page_moves import ProgramPageMover

        if ProgramPageMover.fits(pool):
            return ProgramPageMover.of_pool(pool)
    return TorchPageMover(pool)


def runs(pages: PageIds, border: int) -> list[tuple[int, int, int]]:
    """Return the runs of consecutive pages that cross no multiple of `border`: index, first page, how many."""
    starts = np.flatnonzero((np.diff(pages, prepend=pages[0] - 2) != 1) | (pages % border == 0))
    lengths = np.diff(starts, append=len(pages))
    return [(int(first), int(pages[first]), int(length)) for first, length in zip(starts, lengths, strict=True)]

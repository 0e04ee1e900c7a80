"""Transfers in small slices between the passes, for engines on the CPU: there, device and host are the same memory."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from common.transfers import TransferAck, TransferDirection
from services.worker.engine.host_tier.pool import parts_of_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from common.transfers import Transfer
    from services.worker.engine.host_tier.pool import HostPool
    from services.worker.engine.model.kv_pool import KvPool

# A slice of a copy, in pages: some megabytes, so about a millisecond.
SLICE_PAGES = 8
# Time for copies after a pass. A request waits for a load; a backup is never urgent, and decoding waits for it.
LOAD_BUDGET_S = 0.02
BACKUP_BUDGET_S = 0.002
# How long an engine without work stays with its copies before it looks for the next plan.
IDLE_BUDGET_S = 0.02


@dataclass(slots=True)
class _Progress:
    transfer: Transfer
    # Of pages, and then of snapshots.
    done: int = 0
    seconds: float = 0.0

    @property
    def all(self) -> int:
        return self.transfer.pages + len(self.transfer.device_snapshots)


class SlicedTransfers:
    """Copies in the engine's own thread, some pages after each pass; see `Transfers`."""

    def __init__(self, pool: KvPool, host: HostPool, clock: Callable[[], float] = time.perf_counter) -> None:
        """Copy between `pool` and `host`; `clock` counts seconds."""
        self._pool = pool
        self._host = host
        self._clock = clock
        self._loads: deque[_Progress] = deque()
        self._backups: deque[_Progress] = deque()

    def begin(self, transfers: Iterable[Transfer]) -> None:
        """Queue a plan's transfers."""
        for transfer in transfers:
            is_load = transfer.direction is TransferDirection.HOST_TO_DEVICE
            (self._loads if is_load else self._backups).append(_Progress(transfer))

    def poll(self) -> tuple[TransferAck, ...]:
        """Copy some slices, those of loads first."""
        if not (self._loads or self._backups):
            return ()
        return (*self._work(self._loads, LOAD_BUDGET_S), *self._work(self._backups, BACKUP_BUDGET_S))

    def wait(self) -> tuple[TransferAck, ...]:
        """Copy until something is done, or for as long as a plan may wait."""
        acks = tuple(self._work(self._loads, IDLE_BUDGET_S))
        return acks or tuple(self._work(self._backups, IDLE_BUDGET_S))

    def reset(self) -> None:
        """Drop the open transfers."""
        self._loads.clear()
        self._backups.clear()

    def close(self) -> None:
        """Drop the open transfers; the pools belong to their owner."""
        self.reset()

    def _work(self, queue: deque[_Progress], budget_s: float) -> list[TransferAck]:
        acks = []
        started = now = self._clock()
        while queue and now - started < budget_s:
            progress = queue[0]
            transfer = progress.transfer
            end = self._copy_slice(transfer, progress.done)
            later = self._clock()
            progress.done, progress.seconds, now = end, progress.seconds + later - now, later
            if end == progress.all:
                queue.popleft()
                acks.append(TransferAck(transfer.transfer_id, transfer.pages, round(progress.seconds * 1e6)))
        return acks

    def _copy_slice(self, transfer: Transfer, done: int) -> int:
        """Copy some pages, or a snapshot, after the first `done`; return how many are done then."""
        if done < transfer.pages:
            end = min(done + SLICE_PAGES, transfer.pages)
            self._copy(transfer, slice(done, end))
            return end
        self._copy_snapshot(transfer, done - transfer.pages)
        return done + 1

    @torch.inference_mode()
    def _copy_snapshot(self, transfer: Transfer, index: int) -> None:
        states, host = self._pool.states, self._host.states
        assert states is not None, "plans of other models copy no snapshots"
        assert host is not None, "slots are checked"
        copy = host.back_up if transfer.direction is TransferDirection.DEVICE_TO_HOST else host.load
        copy(states, int(transfer.device_snapshots[index]), int(transfer.host_snapshots[index]))

    @torch.inference_mode()
    def _copy(self, transfer: Transfer, part: slice) -> None:
        device = torch.from_numpy(transfer.device_pages[part].astype(np.int64))
        host = torch.from_numpy(transfer.host_pages[part].astype(np.int64))
        if transfer.direction is TransferDirection.DEVICE_TO_HOST:
            back_up(self._pool, self._host, device, host)
        else:
            load(self._pool, self._host, device, host)


def back_up(pool: KvPool, host: HostPool, device_pages: torch.Tensor, host_pages: torch.Tensor) -> None:
    """Copy pages of the device, [pages] int64, to pages of the host, layer by layer; both are CPU memory here."""
    memory = host.memory.flatten(1)
    for held, part in parts_of_pages(pool, memory.dtype):
        memory[:, part].index_copy_(0, host_pages, held.index_select(0, device_pages))


def load(pool: KvPool, host: HostPool, device_pages: torch.Tensor, host_pages: torch.Tensor) -> None:
    """Copy pages of the host to pages of the device; see `back_up`."""
    memory = host.memory.flatten(1)
    for held, part in parts_of_pages(pool, memory.dtype):
        held.index_copy_(0, device_pages, memory[:, part].index_select(0, host_pages))

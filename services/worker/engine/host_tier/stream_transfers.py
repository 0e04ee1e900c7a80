"""Transfers on streams of their own, for engines on a GPU: the passes go on meanwhile."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from common.transfers import TransferAck, TransferDirection
from services.worker.engine.host_tier.pool import PinnedRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from common.steps import PageIds
    from common.transfers import Transfer
    from services.worker.engine.host_tier.pool import HostPool
    from services.worker.engine.model.kv_pool import KvPool

log = logging.getLogger(__name__)

# Device memory between the pool, whose pages are scattered by layers, and the bus, which wants long runs.
STAGING_BYTES = 32 * 1024**2
# How long an engine without work stays with its copies before it looks for the next plan, and how often it looks.
IDLE_BUDGET_S = 0.005
IDLE_INTERVAL_S = 0.0002


@dataclass(slots=True)
class _Running:
    transfer: Transfer
    started: torch.cuda.Event
    ended: torch.cuda.Event


class StreamTransfers:
    """Gathers and scatters pages layer by layer on two side streams; see `Transfers`.

    A side stream waits for the passes that were launched before the plan; nothing ever waits for a side stream, as the
    scheduler lets nobody touch the pages until they are acknowledged. Loads and backups have a stream each, since the
    bus carries both ways at once. Pages that are not page-locked yet make their transfer wait here.
    """

    def __init__(self, pool: KvPool, host: HostPool, device: torch.device) -> None:
        """Copy between `pool` on `device` and `host`."""
        self._host = host
        self._device = device
        self._pinned = PinnedRange(host, device)
        self._lanes = {
            direction: _Lane(pool, host, device, self._pinned.pages_at_once)
            for direction in (TransferDirection.HOST_TO_DEVICE, TransferDirection.DEVICE_TO_HOST)
        }
        self._waiting: deque[Transfer] = deque()
        self._has_warned = False

    def begin(self, transfers: Iterable[Transfer]) -> None:
        """Launch a plan's transfers behind the passes before it."""
        self._waiting.extend(transfers)
        self._launch()

    def poll(self) -> tuple[TransferAck, ...]:
        """Return what is done; only asks the device."""
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
        """Forget what has not begun, and wait for what has."""
        self._waiting.clear()
        for lane in self._lanes.values():
            lane.drain()

    def close(self) -> None:
        """Wait for what has begun, and unlock the host's pages."""
        self.reset()
        self._pinned.close()

    def _launch(self) -> None:
        for _ in range(len(self._waiting)):
            transfer = self._waiting.popleft()
            # Copies of memory that cannot be locked hold up the passes, but are right.
            if int(transfer.host_pages.max()) < self._pinned.ready_pages or self._pinned.error is not None:
                self._lanes[transfer.direction].launch(transfer)
            else:
                self._waiting.append(transfer)
        if self._pinned.error is not None and not self._has_warned:
            self._has_warned = True
            log.error("The host tier is slow, and slows decoding: %s", self._pinned.error)


class _Lane:
    """One direction: a stream, its staging memory, and what runs on it, in order."""

    def __init__(self, pool: KvPool, host: HostPool, device: torch.device, border: int) -> None:
        self._pool = pool
        self._border = border
        self._host = host
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types for it
        _, layers, halves, elements = host.memory.shape
        pages = max(1, min(host.pages, STAGING_BYTES // host.page_bytes))
        self._staging = torch.empty(
            (pages, layers, halves, elements), dtype=host.memory.dtype, device=device
        )  # [pages, layers, 2, elements]
        self._running: deque[_Running] = deque()

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    @torch.inference_mode()
    def launch(self, transfer: Transfer) -> None:
        started = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            started.record()
            for first in range(0, transfer.pages, self._staging.shape[0]):
                part = slice(first, first + self._staging.shape[0])
                self._copy(transfer.direction, transfer.device_pages[part], transfer.host_pages[part])
            ended.record()
        self._running.append(_Running(transfer, started, ended))

    def take_done(self) -> Iterator[TransferAck]:
        while self._running and self._running[0].ended.query():  # type: ignore[no-untyped-call]
            done = self._running.popleft()
            duration_us = round(done.started.elapsed_time(done.ended) * 1e3)
            yield TransferAck(done.transfer.transfer_id, done.transfer.pages, duration_us)

    def drain(self) -> None:
        self._stream.synchronize()
        self._running.clear()

    def _copy(self, direction: TransferDirection, device_pages: PageIds, host_pages: PageIds) -> None:
        indices = torch.from_numpy(device_pages.astype(np.int64)).pin_memory().to(self._device, non_blocking=True)
        host_runs = runs(host_pages, self._border)
        if direction is TransferDirection.DEVICE_TO_HOST:
            gather(self._pool, indices, self._staging)
            for first, page, length in host_runs:
                part = self._staging[first : first + length]
                self._host.memory[page : page + length].copy_(part, non_blocking=True)
        else:
            for first, page, length in host_runs:
                part = self._host.memory[page : page + length]
                self._staging[first : first + length].copy_(part, non_blocking=True)
            scatter(self._pool, indices, self._staging)


def gather(pool: KvPool, pages: torch.Tensor, staging: torch.Tensor) -> None:
    """Collect scattered pages of all layers, [pages] int64, in the first of `staging` [pages, layers, 2, elements]."""
    for index, layer in enumerate(pool.layers):
        for half, tensor in enumerate((layer.keys, layer.values)):
            staging[: len(pages), index, half] = tensor.view(pool.pages, -1).index_select(0, pages)


def scatter(pool: KvPool, pages: torch.Tensor, staging: torch.Tensor) -> None:
    """Do the opposite of `gather`."""
    for index, layer in enumerate(pool.layers):
        for half, tensor in enumerate((layer.keys, layer.values)):
            tensor.view(pool.pages, -1).index_copy_(0, pages, staging[: len(pages), index, half])


def runs(pages: PageIds, border: int) -> list[tuple[int, int, int]]:
    """Return the runs of consecutive pages that cross no multiple of `border`: index, first page, how many."""
    starts = np.flatnonzero((np.diff(pages, prepend=pages[0] - 2) != 1) | (pages % border == 0))
    lengths = np.diff(starts, append=len(pages))
    return [(int(first), int(pages[first]), int(length)) for first, length in zip(starts, lengths, strict=True)]

"""Rates of prefill and of copies from the host tier on this machine, measured once at start-up."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from common.transfers import Transfer, TransferDirection, TransferId
from services.worker.engine.measuring.random_batches import random_batch

if TYPE_CHECKING:
    from services.worker.engine.host_tier.pool import HostPool
    from services.worker.engine.host_tier.transfers import Transfers
    from services.worker.engine.model.batch import ForwardBatch
    from services.worker.engine.model_runner import ModelRunner

# Enough to fill the processor: a GPU needs more.
CPU_TOKENS, GPU_TOKENS = 256, 2048
# The first pass and the first copy include one-time costs.
REPETITIONS = 2


@dataclass(frozen=True, slots=True)
class Calibration:
    """Tokens of a prompt per second, and bytes from the host per second, both on this rank."""

    prefill_tokens_per_s: float
    load_bytes_per_s: float


def calibrate(runner: ModelRunner, host: HostPool, transfers: Transfers, max_step_tokens: int) -> Calibration:
    """Measure with random content in pages that are still free; all ranks do so at the same time."""
    capacity = runner.capacity
    wanted = CPU_TOKENS if runner.device.type == "cpu" else GPU_TOKENS
    tokens = min(wanted, max_step_tokens, capacity.max_context, capacity.device_pages * capacity.page_size)
    batch = random_batch(capacity, runner.device, [(0, tokens)])
    prefill_s = min(_prefill_s(runner, batch) for _ in range(REPETITIONS))
    pages = min(-(-wanted // capacity.page_size), host.pages, capacity.device_pages)
    load_s = min(_load_s(transfers, pages) for _ in range(REPETITIONS))
    return Calibration(tokens / prefill_s, pages * host.page_bytes / load_s)


def _prefill_s(runner: ModelRunner, batch: ForwardBatch) -> float:
    started = time.perf_counter()
    runner.forward(batch).argmax(dim=-1).tolist()  # waits for the device
    return time.perf_counter() - started


def _load_s(transfers: Transfers, pages: int) -> float:
    ids = np.arange(pages, dtype=np.int32)
    started = time.perf_counter()
    transfers.begin([Transfer(TransferId(0), TransferDirection.HOST_TO_DEVICE, ids, ids)])
    while not transfers.wait():
        pass
    return time.perf_counter() - started

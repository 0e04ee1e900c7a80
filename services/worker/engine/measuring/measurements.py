"""Measurements with random batches: memory of the largest pass, rates of prefill and of copies from the host tier."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from common.errors import ConfigurationError
from common.transfers import Transfer, TransferDirection, TransferId
from services.worker.engine.model.batch import ForwardBatch, StateChunk, StateSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.steps import EngineCapacity
    from services.worker.engine.execution.interface import Transfers
    from services.worker.engine.host_tier.pool import HostPool
    from services.worker.engine.model_runner import ModelRunner
# Enough to fill the processor: a GPU needs more.
CPU_TOKENS, GPU_TOKENS = 256, 2048
# The first pass and the first copy include one-time costs.
REPETITIONS = 2


def random_batch(
    capacity: EngineCapacity, device: torch.device, lengths: Sequence[tuple[int, int]], seed: int = 0
) -> ForwardBatch:
    """Return a batch of one row for each pair (tokens computed before, new tokens); decoding rows come first.

    A row decodes if it has computed tokens and one new one; each row's last token is sampled.
    """
    page_size = capacity.page_size
    width = max(-(-(old + new) // page_size) for old, new in lengths)
    assert width * len(lengths) <= capacity.device_pages, "the pool holds all rows"
    return _batch(lengths, page_size, capacity.vocabulary_size, device, seed)


def random_prompts(
    lengths: list[int], page_size: int, vocabulary_size: int, device: torch.device, samples: int | None = None
) -> ForwardBatch:
    """Return a batch of prompts of `lengths` tokens on the first pages; its last `samples` tokens are sampled."""
    batch = _batch([(0, length) for length in lengths], page_size, vocabulary_size, device, seed=0)
    tokens = sum(lengths)
    sampled = torch.arange(max(0, tokens - (samples or len(lengths))), tokens, device=device)
    assert batch.states is not None, "all random batches have slots"
    # There may be more prompts than rows.
    chunks = tuple(replace(chunk, slot=0) for chunk in batch.states.chunks)
    return replace(batch, sample_indices=sampled, states=replace(batch.states, chunks=chunks))


def _batch(
    lengths: Sequence[tuple[int, int]], page_size: int, vocabulary_size: int, device: torch.device, seed: int
) -> ForwardBatch:
    generator = torch.Generator().manual_seed(seed)
    width = max(-(-(old + new) // page_size) for old, new in lengths)
    table = torch.arange(width * len(lengths), dtype=torch.int32).view(len(lengths), width)
    positions = [torch.arange(old, old + new) for old, new in lengths]
    slots = [table[i, place // page_size].long() * page_size + place % page_size for i, place in enumerate(positions)]
    starts = torch.tensor([0, *(new for _, new in lengths)]).cumsum(0)
    decoding = sum(old > 0 and new == 1 for old, new in lengths)
    return ForwardBatch(
        token_ids=torch.randint(vocabulary_size, (int(starts[-1]),), generator=generator).to(device),
        positions=torch.cat(positions).to(device),
        query_starts=starts.int().to(device),
        key_lengths=torch.tensor([old + new for old, new in lengths], dtype=torch.int32).to(device),
        page_table=table.to(device),
        write_slots=torch.cat(slots).to(device),
        sample_indices=(starts[1:] - 1).to(device),
        decode_rows=decoding,
        max_query_length=max(new for _, new in lengths),
        max_key_length=max(old + new for old, new in lengths),
        states=StateSlots(
            torch.arange(decoding, device=device),
            tuple(
                StateChunk(start, start + new, slot=i, begins=old == 0)
                for i, ((old, new), start) in enumerate(zip(lengths, starts.tolist(), strict=False))
                if i >= decoding
            ),
        ),
    )


def pages_of(lengths: list[int], page_size: int) -> int:
    """Return the number of pages that `random_prompts` uses."""
    return len(lengths) * max(-(-length // page_size) for length in lengths)


def prompts_of(tokens: int, longest: int) -> list[int]:
    """Return lengths that add up to `tokens`, none above `longest`."""
    whole, rest = divmod(tokens, longest)
    return [longest] * whole + ([rest] if rest else [])


def measure_peak(run: Callable[[], object], device: torch.device) -> int:
    """Return the peak of bytes that `run` allocates; runs it twice, the first time to warm up.

    Raises:
        ConfigurationError: memory does not suffice for the largest step.
    """
    try:
        run()
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"no memory for a step of the configured size beside the weights: {error}; "
            "make scheduler.max_step_tokens or scheduler.max_rows smaller, or free the device of other processes"
        ) from error
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


@dataclass(frozen=True, slots=True)
class Calibration:
    """Tokens of a prompt per second, and bytes from the host per second, both on this rank."""

    prefill_tokens_per_s: float
    load_bytes_per_s: float

    def added_to(self, capacity: EngineCapacity) -> EngineCapacity:
        """Return `capacity` with these rates."""
        return replace(capacity, prefill_tokens_per_s=self.prefill_tokens_per_s, load_bytes_per_s=self.load_bytes_per_s)


def calibrate(runner: ModelRunner, host: HostPool, transfers: Transfers, max_step_tokens: int) -> Calibration:
    """Measure with random content in pages that are still free; all ranks do so at the same time."""
    capacity = runner.capacity
    wanted = CPU_TOKENS if runner.device.type == "cpu" else GPU_TOKENS
    tokens = min(wanted, max_step_tokens, capacity.max_context, capacity.device_pages * capacity.page_size)
    batch = random_batch(capacity, runner.device, [(0, tokens)])
    prefill_s = min(_prefill_s(runner, batch) for _ in range(REPETITIONS))
    pages = min(-(-wanted // capacity.page_size), host.pages, capacity.device_pages)
    # Also compiles the program that gathers pages, which is another one than that of loads.
    _transfer_s(transfers, TransferDirection.DEVICE_TO_HOST, 1)
    load_s = min(_transfer_s(transfers, TransferDirection.HOST_TO_DEVICE, pages) for _ in range(REPETITIONS))
    return Calibration(tokens / prefill_s, pages * host.page_bytes / load_s)


def _prefill_s(runner: ModelRunner, batch: ForwardBatch) -> float:
    started = time.perf_counter()
    runner.forward(batch).argmax(dim=-1).tolist()  # waits for the device
    return time.perf_counter() - started


def _transfer_s(transfers: Transfers, direction: TransferDirection, pages: int) -> float:
    ids = np.arange(pages, dtype=np.int32)
    started = time.perf_counter()
    transfers.begin([Transfer(TransferId(0), direction, ids, ids)])
    while not transfers.wait():
        pass
    return time.perf_counter() - started

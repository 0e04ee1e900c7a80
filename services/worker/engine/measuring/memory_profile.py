"""What the largest pass takes beside weights and KV, measured by running it once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.errors import ConfigurationError
from services.worker.engine.model.batch import ForwardBatch

if TYPE_CHECKING:
    from collections.abc import Callable


def made_up_batch(
    lengths: list[int], page_size: int, vocabulary_size: int, device: torch.device, samples: int | None = None
) -> ForwardBatch:
    """Return a batch of prompts of `lengths` tokens on the first pages; their last `samples` tokens are sampled."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(lengths)
    width = max(-(-length // page_size) for length in lengths)
    table = torch.arange(width * len(lengths), dtype=torch.int32).view(len(lengths), width)
    positions = [torch.arange(length) for length in lengths]
    slots = [table[i, place // page_size].long() * page_size + place % page_size for i, place in enumerate(positions)]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return ForwardBatch(
        token_ids=torch.randint(vocabulary_size, (tokens,), generator=generator).to(device),
        positions=torch.cat(positions).to(device),
        query_starts=starts.int().to(device),
        key_lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        page_table=table.to(device),
        write_slots=torch.cat(slots).to(device),
        sample_indices=torch.arange(max(0, tokens - (samples or len(lengths))), tokens, device=device),
        decode_rows=0,
        max_query_length=max(lengths),
        max_key_length=max(lengths),
    )


def pages_of(lengths: list[int], page_size: int) -> int:
    """Return how many pages `made_up_batch` uses."""
    return len(lengths) * max(-(-length // page_size) for length in lengths)


def prompts_of(tokens: int, longest: int) -> list[int]:
    """Return lengths that add up to `tokens`, none above `longest`."""
    whole, rest = divmod(tokens, longest)
    return [longest] * whole + ([rest] if rest else [])


def measure_peak(run: Callable[[], object], device: torch.device) -> int:
    """Return how many bytes `run` took at its peak beyond what was taken before; runs it twice, to warm up.

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

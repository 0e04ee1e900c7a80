"""Made-up input of a given shape, for measuring how long passes take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from services.worker.engine.model.batch import ForwardBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.worker.engine.model_runner import ModelRunner


def random_batch(runner: ModelRunner, lengths: Sequence[tuple[int, int]], seed: int = 0) -> ForwardBatch:
    """Return a batch of rows with random ids: (tokens computed before, new tokens) for each, one-token rows first."""
    capacity, device = runner.capacity, runner.device
    size = capacity.page_size
    generator = torch.Generator().manual_seed(seed)
    width = max(-(-(old + new) // size) for old, new in lengths)
    assert width * len(lengths) <= capacity.device_pages, "the pool holds all rows"
    table = torch.arange(width * len(lengths), dtype=torch.int32).view(len(lengths), width)
    positions = [torch.arange(old, old + new) for old, new in lengths]
    slots = [table[i, place // size].long() * size + place % size for i, place in enumerate(positions)]
    starts = torch.tensor([0, *(new for _, new in lengths)]).cumsum(0)
    return ForwardBatch(
        token_ids=torch.randint(capacity.vocabulary_size, (int(starts[-1]),), generator=generator).to(device),
        positions=torch.cat(positions).to(device),
        query_starts=starts.int().to(device),
        key_lengths=torch.tensor([old + new for old, new in lengths], dtype=torch.int32).to(device),
        page_table=table.to(device),
        write_slots=torch.cat(slots).to(device),
        sample_indices=(starts[1:] - 1).to(device),
        decode_rows=sum(new == 1 for _, new in lengths),
        max_query_length=max(new for _, new in lengths),
        max_key_length=max(old + new for old, new in lengths),
    )

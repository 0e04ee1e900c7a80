"""Drives a model runner as the engine does: rows that hold pages and grow."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from common.steps import EngineSpec
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.loader import load_decoder
from services.worker.engine.model.batch import ForwardBatch, StateChunk, StateSlots

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from services.worker.engine.model_runner import ModelRunner


def load(
    model: str | Path, *, backend: str = "auto", threads: int = 1, products: str = "auto", device: str = "auto",
    **changes: object,
) -> ModelRunner:  # fmt: skip
    """Load a runner with a small pool, in float32 as references are; `changes` go into its spec."""
    fields: dict[str, object] = {"max_rows": 8, "device_pages": 64, "dtype": "float32", **changes}
    spec = EngineSpec(str(model), **fields)  # type: ignore[arg-type]  # whatever a test wants to change
    return load_decoder(
        spec, lambda *_: None, RunnerOptions(device, backend=backend, threads=threads, products=products)
    )


@dataclass
class Row:
    """A sequence: the ids whose KV is computed, and its pages."""

    pages: list[int]
    computed: list[int] = field(default_factory=list)
    slot: int = 0


@dataclass
class Driver:
    """Gives out pages in a scattered order and builds batches."""

    runner: ModelRunner

    def __post_init__(self) -> None:
        order = torch.randperm(self.runner.capacity.device_pages, generator=torch.Generator().manual_seed(0))
        self._free: list[int] = order.tolist()
        self._opened = 0

    def open(self, tokens: int) -> Row:
        """Return a row with pages for `tokens` tokens."""
        self._opened += 1
        return Row(
            [self._free.pop() for _ in range(-(-tokens // self.runner.capacity.page_size))], slot=self._opened - 1
        )

    def run(self, work: Sequence[tuple[Row, list[int]]], *, all_tokens: bool = False) -> torch.Tensor:
        """Append the given ids to each row in one pass; rows with a single one must come first.

        Returns logits of each row's last token, or of every token.
        """
        batch = self.batch(work, all_tokens=all_tokens)
        logits = self.runner.forward(batch)
        for row, token_ids in work:
            row.computed += token_ids
        return logits

    def batch(self, work: Sequence[tuple[Row, list[int]]], *, all_tokens: bool = False) -> ForwardBatch:
        """Return the batch that `run` would run."""
        size = self.runner.capacity.page_size
        starts = [0]
        positions: list[int] = []
        slots: list[int] = []
        for row, token_ids in work:
            places = range(len(row.computed), len(row.computed) + len(token_ids))
            starts.append(starts[-1] + len(token_ids))
            positions += places
            slots += [row.pages[place // size] * size + place % size for place in places]
        widest = max(len(row.pages) for row, _ in work)
        # What lies behind a row's pages must never be looked at.
        table = [row.pages + [10**6] * (widest - len(row.pages)) for row, _ in work]
        lengths = [len(row.computed) + len(token_ids) for row, token_ids in work]
        device = self.runner.device
        return ForwardBatch(
            token_ids=torch.tensor([token for _, token_ids in work for token in token_ids], device=device),
            positions=torch.tensor(positions, device=device),
            query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
            key_lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
            page_table=torch.tensor(table, dtype=torch.int32, device=device),
            write_slots=torch.tensor(slots, device=device),
            sample_indices=torch.tensor(
                list(range(starts[-1])) if all_tokens else [end - 1 for end in starts[1:]], device=device
            ),
            decode_rows=sum(len(token_ids) == 1 for _, token_ids in work),
            max_query_length=max(len(token_ids) for _, token_ids in work),
            max_key_length=max(lengths),
            states=StateSlots(
                torch.tensor([row.slot for row, token_ids in work if len(token_ids) == 1], device=device),
                tuple(
                    StateChunk(start, start + len(token_ids), row.slot, begins=not row.computed)
                    for (row, token_ids), start in zip(work, starts, strict=False)
                    if len(token_ids) > 1
                ),
            ),
        )

    def generate(self, prompt: list[int], tokens: int, *, chunks: Sequence[int] = ()) -> list[int]:
        """Prefill `prompt`, in chunks that end where `chunks` says, and decode greedily."""
        row = self.open(len(prompt) + tokens)
        borders = [0, *chunks, len(prompt)]
        for start, end in itertools.pairwise(borders):
            logits = self.run([(row, prompt[start:end])])
        generated = [int(logits.argmax())]
        while len(generated) < tokens:
            generated.append(int(self.run([(row, generated[-1:])]).argmax()))
        return generated


def random_ids(count: int, vocabulary: int, seed: int = 0) -> list[int]:
    """Return ids to prompt with."""
    ids: list[int] = torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids

"""From hidden states to embeddings, over as many passes as a prompt takes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import normalize

from common.types import RowSlot

if TYPE_CHECKING:
    from common.steps import RowOpen
    from services.worker.engine.plans.passes import HostBatch, IntArray
    from services.worker.engine.plans.rows import RowIndices


class Pooler:
    """Owns the sums of rows that are embedded and whose last id is not computed yet.

    An embedding has length 1, so that the mean of hidden states and their sum give the same; and a single one is a sum,
    too. Sums are float32, whatever the model computes in.
    """

    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}

    def open(self, opened: RowOpen) -> None:
        """Forget the sums of the slot's former row."""
        self._sums.pop(opened.row, None)

    def add(self, slots: IntArray, hidden: torch.Tensor) -> None:
        """Add hidden states [tokens, hidden] to the rows `slots` [tokens], in which a row's tokens are neighbours."""
        first = np.flatnonzero(np.diff(slots, prepend=-1))
        lengths = np.diff(first, append=slots.size)
        sums = hidden.float()
        if lengths.size < slots.size:
            sums = torch.segment_reduce(sums, "sum", lengths=torch.from_numpy(lengths).to(sums.device), unsafe=True)
        rows = slots[first].tolist()
        # Copies, since `sums` may be views of the pass's states. All are made before any is stored: a pass that lacks
        # memory is repeated with the same states.
        self._sums |= {
            row: added.clone() if row not in self._sums else self._sums[row] + added
            for row, added in zip(rows, sums, strict=True)
        }

    def take(self, rows: RowIndices) -> torch.Tensor:
        """Return the embeddings of `rows`, all of whose ids are computed, [rows, hidden] float32; forget the rows."""
        return normalize(torch.stack([self._sums.pop(row) for row in rows.tolist()]), dim=1)

    def finish(self, rows: RowIndices) -> tuple[tuple[RowSlot, bytes], ...]:
        """Return the same as results carry it; waits for the device."""
        return encoded(rows, self.take(rows).cpu()) if rows.size else ()


def encoded(rows: RowIndices, vectors: torch.Tensor) -> tuple[tuple[RowSlot, bytes], ...]:
    """Return embeddings [rows, hidden] float32 on the CPU as results carry them."""
    parts = vectors.numpy().astype("<f4", copy=False)
    return tuple((RowSlot(row), vector.tobytes()) for row, vector in zip(rows.tolist(), parts, strict=True))


def with_pooled(batch: HostBatch) -> HostBatch:
    """Return the batch with the pooled tokens appended to the sampled ones."""
    return replace(batch, sample_indices=np.concatenate([batch.sample_indices, batch.pooled_indices]))

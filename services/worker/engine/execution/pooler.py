"""From hidden states to embeddings or outputs of a classification head, over as many passes as a prompt takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from common.types import Pooling, RowSlot

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.steps import RowOpen
    from services.worker.engine.plans.passes import HostBatch, IntArray
    from services.worker.engine.plans.rows import RowIndices


@dataclass(frozen=True, slots=True)
class PoolerHead:
    """A classification head: `classify` turns hidden states [n, hidden] into outputs [n, labels] float32.

    With `input` it reads one pooled hidden state per prompt; None: that of each token.
    """

    classify: Callable[[torch.Tensor], torch.Tensor]
    input: Pooling | None

    @property
    def pooling(self) -> Pooling:
        """The only pooling of the model's rows."""
        return Pooling.TOKEN_CLASSIFY if self.input is None else Pooling.CLASSIFY


class Pooler:
    """Owns the sums of rows that are pooled and whose last id is not computed yet.

    Sums are float32, whatever the model computes in. With a head of each token, it owns the outputs so far instead.
    """

    def __init__(self, head: PoolerHead | None = None) -> None:
        """With a head, all rows are classified."""
        self._head = head
        self._sums: dict[int, torch.Tensor] = {}
        self._counts: dict[int, int] = {}
        self._outputs: dict[int, tuple[torch.Tensor, ...]] = {}

    def open(self, opened: RowOpen) -> None:
        """Forget the sums of the slot's former row."""
        self._sums.pop(opened.row, None)
        self._counts.pop(opened.row, None)
        self._outputs.pop(opened.row, None)

    def add(self, slots: IntArray, hidden: torch.Tensor) -> None:
        """Add hidden states [tokens, hidden] to the rows `slots` [tokens], in which a row's tokens are neighbours."""
        first = np.flatnonzero(np.diff(slots, prepend=-1))
        lengths = np.diff(first, append=slots.size)
        rows = slots[first].tolist()
        if self._head is not None and self._head.input is None:
            outputs = torch.split(self._head.classify(hidden).float(), lengths.tolist())
            # All are made before any is stored: a pass that lacks memory is repeated with the same states.
            self._outputs |= {row: (*self._outputs.get(row, ()), part) for row, part in zip(rows, outputs, strict=True)}
            return
        sums = hidden.float()
        if lengths.size < slots.size:
            sums = torch.segment_reduce(sums, "sum", lengths=torch.from_numpy(lengths).to(sums.device), unsafe=True)
        # Copies, since `sums` may be views of the pass's states. All are made before any is stored, as above.
        self._sums |= {
            row: added.clone() if row not in self._sums else self._sums[row] + added
            for row, added in zip(rows, sums, strict=True)
        }
        self._counts |= {
            row: self._counts.get(row, 0) + count for row, count in zip(rows, lengths.tolist(), strict=True)
        }

    def take(self, rows: RowIndices) -> torch.Tensor:
        """Return the results of `rows`, all of whose ids are computed, [rows, components] float32; forget the rows.

        Not with a head of each token.
        """
        slots = rows.tolist()
        sums = torch.stack([self._sums.pop(row) for row in slots])
        counts = torch.tensor([self._counts.pop(row) for row in slots], dtype=torch.float32).to(sums.device)
        pooled = sums / counts[:, None]
        return pooled if self._head is None else self._head.classify(pooled).float()

    def finish(self, rows: RowIndices) -> tuple[tuple[RowSlot, bytes], ...]:
        """Return the same as results carry it; waits for the device."""
        if not rows.size:
            return ()
        if self._head is not None and self._head.input is None:
            whole = [torch.cat(self._outputs.pop(row)).cpu() for row in rows.tolist()]
            return tuple((RowSlot(row), _bytes(outputs)) for row, outputs in zip(rows.tolist(), whole, strict=True))
        return encoded(rows, self.take(rows).cpu())


def encoded(rows: RowIndices, vectors: torch.Tensor) -> tuple[tuple[RowSlot, bytes], ...]:
    """Return results [rows, components] float32 on the CPU as results of a pass carry them."""
    return tuple((RowSlot(row), _bytes(vector)) for row, vector in zip(rows.tolist(), vectors, strict=True))


def with_pooled(batch: HostBatch) -> HostBatch:
    """Return the batch with the pooled tokens appended to the sampled ones."""
    return replace(batch, sample_indices=np.concatenate([batch.sample_indices, batch.pooled_indices]))


def _bytes(values: torch.Tensor) -> bytes:
    packed: bytes = values.numpy().astype("<f4", copy=False).tobytes()
    return packed

"""Tokens that a request rules out: all but some, and the ends of sequences that it bans."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from common.steps import RowOpen
    from services.worker.engine.plans.rows import RowIndices, RowTable

# Not minus infinity: should other masks rule out all that is allowed, a row would have no distribution at all.
RULED_OUT = -1e30


class WordTable:
    """What is ruled out in the rows that rule anything out."""

    def __init__(self) -> None:
        """Begin with no such row."""
        self._allowed: dict[int, torch.Tensor] = {}
        self._banned: dict[int, tuple[tuple[int, ...], ...]] = {}

    def open(self, opened: RowOpen) -> None:
        """Take note of what a row rules out."""
        sampling = opened.sampling
        self._allowed.pop(opened.row, None)
        if sampling.allowed_token_ids:
            self._allowed[opened.row] = torch.tensor(sampling.allowed_token_ids, dtype=torch.int64)
        self._banned[opened.row] = sampling.banned_sequences

    def rule_out(self, logits: torch.Tensor, samples: NDArray[np.int64], slots: RowIndices, rows: RowTable) -> None:
        """Make what rows `slots` rule out all but impossible in `logits[samples]`, in place.

        Only what a row has generated counts as the beginning of a banned sequence.
        """
        for sample, slot in zip(samples.tolist(), slots.tolist(), strict=True):
            row = logits[sample]
            if slot in self._allowed:
                kept = self._allowed[slot].to(logits.device)
                values = row[kept]
                row.fill_(RULED_OUT)
                row[kept] = values
            ends = self.ends(slot, rows)
            if ends:
                row[torch.tensor(ends, device=logits.device)] = RULED_OUT

    def ends(self, slot: int, rows: RowTable) -> list[int]:
        """Return the ids with which a row would now end a sequence that it bans."""
        generated = rows.token_ids[slot, rows.prompt_tokens[slot] : rows.lengths[slot]]
        return [
            sequence[-1]
            for sequence in self._banned[slot]
            if len(sequence) <= generated.size + 1
            and tuple(generated[generated.size + 1 - len(sequence) :].tolist()) == sequence[:-1]
        ]

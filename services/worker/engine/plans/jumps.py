"""Tokens that rows get without sampling them, as their grammar leaves nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.types import TokenIds
    from services.worker.engine.plans.rows import RowIndices


@dataclass(frozen=True, slots=True)
class Forced:
    """Row rows[i] gets token_ids[i] [tokens] int32 behind the one that it has sampled.

    Those of a row are neighbours, in their order; the last of them may stop it, none before.
    """

    rows: RowIndices
    token_ids: TokenIds

    def by_row(self) -> Iterator[tuple[int, TokenIds]]:
        """Yield each row with its tokens."""
        if self.rows.size:
            starts = np.flatnonzero(np.diff(self.rows, prepend=-1))
            for token_ids, first in zip(np.split(self.token_ids, starts[1:]), starts, strict=True):
                yield int(self.rows[first]), token_ids

    def of(self, rows: RowIndices) -> Forced:
        """Return what some rows get."""
        if not self.rows.size:
            return self
        theirs = np.isin(self.rows, rows)
        return Forced(self.rows[theirs], self.token_ids[theirs])


NOTHING_FORCED = Forced(np.empty(0, np.int64), np.empty(0, np.int32))


def join_forced(parts: list[Forced]) -> Forced:
    """Return what the parts of a pass have brought."""
    if not any(part.rows.size for part in parts):
        return NOTHING_FORCED
    return Forced(np.concatenate([part.rows for part in parts]), np.concatenate([part.token_ids for part in parts]))

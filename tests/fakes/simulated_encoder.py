"""The images of a simulated worker's rows: what is encoded, what is kept, and whether a row gets its own images."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from common.steps import RowOpen, StepPlan
    from common.types import RowImage


@dataclass
class _Seen:
    image: RowImage
    first: int
    end: int
    # The picture whose embeddings it has; None: it is not encoded yet.
    digest: bytes | None = None


@dataclass
class SimulatedEncoder:
    # Output -> picture.
    kept: dict[int, bytes] = field(default_factory=dict)
    # The lengths of the images that each plan's chunks encoded, for plans that encoded any.
    encoded: list[list[int]] = field(default_factory=list)
    rows: dict[int, list[_Seen]] = field(default_factory=dict)

    def begin(self, plan: StepPlan) -> None:
        """Take over the changes of a plan."""
        for closed in plan.closes:
            self.rows.pop(closed, None)
        for output in plan.dropped_outputs:
            self.kept.pop(output, None)
        for opened in plan.opens:
            if opened.images:
                self.rows[opened.row] = self._open(opened)

    def compute(self, chunks: list[tuple[int, int, int]]) -> None:
        """Encode the images that begin in chunks: rows, starts and ends."""
        lengths = []
        for row, start, end in chunks:
            for seen in self.rows.get(row, ()):
                if seen.end <= start or seen.first >= end:
                    continue
                if seen.digest is None:
                    output = seen.image.output
                    if output is None or output not in self.kept:
                        assert seen.image.pixels is not None
                        lengths.append(seen.image.length)
                        if output is not None:
                            self.kept[output] = seen.image.digest
                    seen.digest = seen.image.digest if output is None else self.kept[output]
                assert seen.digest == seen.image.digest, "the embeddings of another image"
        if lengths:
            self.encoded.append(lengths)

    def _open(self, opened: RowOpen) -> list[_Seen]:
        below = np.flatnonzero(opened.token_ids < 0).tolist()
        taken, seen = 0, []
        for image in opened.images:
            places = below[taken : taken + image.length]
            taken += image.length
            first, end = places[0], places[-1] + 1
            if end <= opened.computed_tokens:
                continue
            digest = None
            if image.pixels is None:
                assert image.output in self.kept, "an output that is not kept"
                digest = self.kept[image.output]
            seen.append(_Seen(image, first, end, digest))
        return seen

"""Selects the tokens of a pass whose logits give requested log probabilities of prompt tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from common.prompt_logprobs import MAX_PART_VALUES
from common.steps import StepResult
from common.types import RowSlot

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from common.prompt_logprobs import PromptLogprobs, PromptLogprobSpan
    from common.steps import RowOpen
    from common.types import StepId, TokenIds
    from services.worker.engine.plans.passes import Chunks, ForwardPass, HostBatch, IntArray
    from services.worker.engine.plans.rows import RowStates

RowSpans = tuple[tuple[RowSlot, "PromptLogprobSpan"], ...]


@dataclass(frozen=True, slots=True)
class Scored:
    """A run of one row's prompt: `targets` [tokens] int32 from position `first` on.

    `indices` [tokens] are the pass's tokens before each, whose logits give its log probability.
    """

    row: RowSlot
    first: int
    targets: TokenIds
    indices: IntArray
    wanted: PromptLogprobs


class ScoringTable:
    """The rows whose prompts are scored."""

    def __init__(self) -> None:
        self._wanted: dict[int, PromptLogprobs] = {}

    def open(self, opened: RowOpen) -> None:
        """Store a row's request."""
        if opened.prompt_logprobs is None:
            self._wanted.pop(opened.row, None)
        else:
            self._wanted[opened.row] = opened.prompt_logprobs

    def of(self, rows: RowStates, forward: ForwardPass) -> tuple[Scored, ...]:
        """Return the scored runs of a pass, whose tokens are one for each decoding row, then those of chunks."""
        chunks = forward.chunks
        if not self._wanted or not chunks.rows.size:
            return ()
        ends = forward.decode_rows.size + np.cumsum(chunks.lengths)
        found = (self._run(rows, chunks, index, int(ends[index])) for index in range(chunks.rows.size))
        return tuple(run for run in found if run is not None)

    def _run(self, rows: RowStates, chunks: Chunks, index: int, end: int) -> Scored | None:
        row = int(chunks.rows[index])
        wanted = self._wanted.get(row)
        if wanted is None:
            return None
        start, stop = int(chunks.starts[index]), int(chunks.starts[index] + chunks.lengths[index])
        # The last prompt token's logits belong to the first generated token.
        positions = np.arange(max(start, wanted.start), min(stop, int(rows.prompt_tokens[row]) - 1))
        if not positions.size:
            return None
        targets = rows.token_ids[row, positions + 1]
        return Scored(RowSlot(row), int(positions[0]) + 1, targets, positions + (end - stop), wanted)


def with_scored(batch: HostBatch, scored: Sequence[Scored]) -> HostBatch:
    """Return the batch with the tokens of `scored` appended to its samples."""
    indices = np.concatenate([batch.sample_indices, *(run.indices for run in scored)])
    return replace(batch, sample_indices=indices)


def partial_results(step_id: StepId, substep: int, spans: RowSpans) -> Iterator[StepResult]:
    """Yield partial results with a pass's prompt log probabilities, each of bounded size, to precede its own result."""
    for bundle in _bundles((row, part) for row, span in spans for part in span.parts()):
        yield StepResult(step_id, substep, last=False, prompt_logprobs=bundle, partial=True)


def _bundles(parts: Iterable[tuple[RowSlot, PromptLogprobSpan]]) -> Iterator[RowSpans]:
    """Yield runs of parts that are together not much larger than one may be."""
    bundle: list[tuple[RowSlot, PromptLogprobSpan]] = []
    values = 0
    for row, part in parts:
        bundle.append((row, part))
        values += part.values
        if values >= MAX_PART_VALUES:
            yield tuple(bundle)
            bundle, values = [], 0
    if bundle:
        yield tuple(bundle)

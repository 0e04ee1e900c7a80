"""Applies worker results: new tokens, stopped rows, computed prompt chunks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from common.deltas import TokenOrigin
from common.errors import DeviceMemoryError
from common.steps import RowStop
from common.types import Finish, FinishReason, RowSlot
from services.scheduler.core.milestones import MilestoneKind
from services.scheduler.core.sequence import SequencePhase

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from common.steps import PrefillChunk, StepPlan, StepResult
    from common.types import StepId, TokenLogprob
    from services.scheduler.core.costs import LoadCosts
    from services.scheduler.core.milestones import Milestones
    from services.scheduler.core.output import OutputBuffer
    from services.scheduler.core.row_changes import Tenancy
    from services.scheduler.core.rows import RowSlots
    from services.scheduler.core.sequence import Sequence
    from services.scheduler.core.speculation import Speculation

# Weight of the newest sample in the running mean of the decode step's duration.
STEP_TIME_WEIGHT = 0.1
NO_MEMORY = "the device has not enough memory for this request now; a shorter one, or the same one later, may succeed"


@dataclass(frozen=True, slots=True)
class _Expected:
    """The chunks of a plan, `RowSlots.vacated` when it was made, and whether it encodes images."""

    chunks: tuple[PrefillChunk, ...] = ()
    vacated: int | None = None
    encodes: bool = False
    steps: int = 1
    # Of a plan that can be shortened: the rows that decode.
    decoding: NDArray[np.int64] | None = None


class ResultHandler:
    """Applies step results to the sequences that they belong to.

    Results refer to row slots. A result for a slot's previous occupant (its plan was sent before the row was closed) is
    recognised by its step id and dropped.
    """

    def __init__(
        self,
        rows: RowSlots,
        tenancy: Tenancy,
        output: OutputBuffer,
        milestones: Milestones,
        speculation: Speculation,
        load_costs: LoadCosts | None = None,
    ) -> None:
        """Apply results to state that the core owns.

        `speculation` and `load_costs` receive the measured times of decoding and of prefill.
        """
        self._rows = rows
        self._tenancy = tenancy
        self._output = output
        self._milestones = milestones
        self._speculation = speculation
        self._load_costs = load_costs
        # Of plans in flight.
        self._expected: dict[StepId, _Expected] = {}
        self.decode_step_s: float | None = None
        # Number of jump-forward tokens.
        self.jumped_tokens = 0

    def expect(self, plan: StepPlan, *, encodes: bool) -> float:
        """Record the chunks of a plan that is being sent, and whether it encodes images.

        Return the seconds that it will take, if it computes prompts without images, and prefill was measured; else 0.
        """
        decoding = self._rows.decoding.nonzero()[0] if plan.can_shorten else None
        expected = _Expected(plan.prefills, self._rows.vacated, encodes, plan.steps, decoding)
        self._expected[plan.step_id] = expected
        if encodes or self._load_costs is None:
            return 0.0
        prefill_s = self._load_costs.prefill_s(sum(chunk.length for chunk in plan.prefills))
        # Rows whose prompts the plan completes count as decoding.
        decodes = prefill_s and self._rows.decoding.sum() > self._rows.decoding[[c.row for c in plan.prefills]].sum()
        return prefill_s + (plan.steps * (self.decode_step_s or 0.0) if decodes else 0.0)

    def forget_all(self) -> None:
        """Drop the records of plans in flight, as the workers that had them are gone."""
        self._expected.clear()
        self._speculation.forget_sent()

    def apply(self, result: StepResult, finish: Callable[[Sequence, Finish], None]) -> None:
        """Store new tokens, pass them to the output, and finish rows that stopped."""
        if result.partial:
            self._report_scores(result)
            return
        expected = self._recall(result)
        chunks = expected.chunks
        if result.abandoned:
            # The plan that it was abandoned for has closed its rows; one that it was shortened for has not.
            if expected.decoding is not None:
                self._take_back(expected.decoding, result.step_id)
            self._speculation.saw_result(result)
            return
        failed = {stop.row for stop in result.stops if stop.reason is FinishReason.ERROR}
        self._confirm_chunks(result.step_id, tuple(chunk for chunk in chunks if chunk.row not in failed))
        rows, token_ids = result.rows, result.token_ids
        if expected.vacated != self._rows.vacated:
            rows, token_ids = self._current(rows, token_ids, result.step_id)
        if len(rows):
            self._store(rows, token_ids, result)
        if len(result.accepted_rows):
            self._store_accepted(result)
        if len(result.forced_rows):
            self._store_forced(result)
        self._measure(result, expected)
        self._speculation.saw_result(result)
        embeddings = dict(result.embeddings)
        for stop in result.stops:
            if self._is_current(stop.row, result.step_id):
                self._finish_stopped(stop, embeddings.get(stop.row), finish)

    def _recall(self, result: StepResult) -> _Expected:
        """Return the expectations of the result's plan; only its first pass computes the chunks."""
        expected = self._expected.get(result.step_id, _Expected())
        if result.last:
            self._expected.pop(result.step_id, None)
        return replace(expected, chunks=()) if result.substep else expected

    def _take_back(self, rows: NDArray[np.int64], step_id: StepId) -> None:
        """Correct how far the rows of a shortened plan are planned: each later plan takes each of them a token further.

        Some may have been at their limit when later plans were made, but the workers decode them until they stop.
        """
        table = self._rows
        rows = rows[table.opened_step[rows] <= step_id]
        later = sum(each.steps for each in self._expected.values())
        table.planned[rows] = np.minimum(table.length[rows] - 1 + later, table.limit[rows])

    def _current(
        self, rows: NDArray[np.int32], token_ids: NDArray[np.int32], step_id: StepId
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        current = self._rows.occupied[rows] & (self._rows.opened_step[rows] <= step_id)
        if current.all():
            return rows, token_ids
        return rows[current], token_ids[current]

    def _is_current(self, row: RowSlot, step_id: StepId) -> bool:
        return bool(self._rows.occupied[row] and self._rows.opened_step[row] <= step_id)

    def _store(self, rows: NDArray[np.int32], token_ids: NDArray[np.int32], result: StepResult) -> None:
        table = self._rows
        length = table.length[rows]
        table.ids[rows, length] = token_ids
        table.computed[rows] = length
        table.length[rows] = length + 1
        silent = table.silent[rows]
        if silent.any():
            rows, token_ids = rows[~silent], token_ids[~silent]
        # Further log probabilities of a row are of accepted tokens.
        positions = {int(row): index for index, row in enumerate(rows)} if result.logprobs else {}
        logprobs = [(positions.pop(row), logprob) for row, logprob in result.logprobs if row in positions]
        self._output.tokens(table.handle[rows].astype(np.int32), token_ids, logprobs)

    def _store_accepted(self, result: StepResult) -> None:
        table = self._rows
        rows, token_ids = self._current(result.accepted_rows, result.accepted_token_ids, result.step_id)
        reported: dict[int, list[TokenLogprob]] = {}
        for row, logprob in result.logprobs:
            reported.setdefault(row, []).append(logprob)
        # The first one is of the row's first token.
        remaining = {row: iter(logprobs[1:]) for row, logprobs in reported.items()}
        logprobs = []
        for index, (row, token_id) in enumerate(zip(rows.tolist(), token_ids.tolist(), strict=True)):
            length = int(table.length[row])
            table.ids[row, length] = token_id
            table.computed[row] = length
            table.length[row] = length + 1
            table.planned[row] = min(int(table.planned[row]) + 1, int(table.limit[row]))
            if row in remaining:
                logprobs.append((index, next(remaining[row])))
        self._output.tokens(table.handle[rows].astype(np.int32), token_ids, logprobs, TokenOrigin.DRAFTED)

    def _store_forced(self, result: StepResult) -> None:
        table = self._rows
        rows, token_ids = self._current(result.forced_rows, result.forced_token_ids, result.step_id)
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            length = int(table.length[row])
            table.ids[row, length] = token_id
            table.length[row] = length + 1
            # Later plans for the row continue after the forced token.
            table.planned[row] = min(int(table.planned[row]) + 1, int(table.limit[row]))
        self.jumped_tokens += len(rows)
        self._output.tokens(table.handle[rows].astype(np.int32), token_ids, [], TokenOrigin.FORCED)

    def _report_scores(self, result: StepResult) -> None:
        for row, span in result.prompt_logprobs:
            sequence = self._rows.sequences[row]
            if sequence is not None and sequence.scoring is not None and self._is_current(row, result.step_id):
                self._output.score(sequence.scoring.take(sequence.handle, span))

    def _confirm_chunks(self, step_id: StepId, chunks: tuple[PrefillChunk, ...]) -> None:
        """Insert computed prompt pages into the cache so that the next request can use them."""
        for chunk in chunks:
            sequence = self._rows.sequences[chunk.row]
            if sequence is None or not self._is_current(chunk.row, step_id):
                continue
            end = chunk.start + chunk.length
            self._rows.computed[chunk.row] = end
            self._tenancy.keep_computed(sequence)
            if sequence.follower is not None:
                sequence.follower.on_computed()
            if end >= len(sequence.token_ids):
                sequence.is_prefilled = True
                sequence.phase = SequencePhase.DECODE
                self._milestones.note(MilestoneKind.PREFILLED, sequence)
                if sequence.follower is not None:
                    sequence.follower.on_prefilled(sequence, self._rows.page_table(chunk.row))

    def _finish_stopped(
        self, stop: RowStop, embedding: bytes | None, finish: Callable[[Sequence, Finish], None]
    ) -> None:
        sequence = self._rows.sequences[stop.row]
        assert sequence is not None, "checked by _is_current"
        if sequence.is_silent and stop.reason is FinishReason.STOP:
            stop = RowStop(stop.row, FinishReason.LENGTH)
        if stop.reason is FinishReason.ERROR:
            finish(sequence, Finish(FinishReason.ERROR, error=DeviceMemoryError(NO_MEMORY).to_failure()))
            return
        ended = Finish(
            stop.reason,
            matched_token_id=stop.matched_token_id,
            embedding=embedding,
            accepted_prediction_tokens=sequence.accepted_prediction_tokens,
            rejected_prediction_tokens=sequence.rejected_prediction_tokens,
        )
        finish(sequence, ended)

    def _without_decoding(self, chunks: tuple[PrefillChunk, ...], result: StepResult) -> float:
        """Return the seconds of a pass due to its chunks: decoding beside them is assumed to take one decode step."""
        decoded = len(result.rows) > len(chunks)
        return result.compute_us / 1e6 - (self.decode_step_s or 0.0 if decoded else 0.0)

    def _measure(self, result: StepResult, expected: _Expected) -> None:
        chunks = expected.chunks
        if not chunks and len(result.rows):
            self._measure_decoding(result.step_id, len(result.rows), result.compute_us / 1e6)
        elif chunks and self._load_costs is not None and not expected.encodes:
            self._load_costs.saw_prefill(sum(chunk.length for chunk in chunks), self._without_decoding(chunks, result))

    def _measure_decoding(self, step_id: StepId, rows: int, seconds: float) -> None:
        if self._speculation.saw_pass(step_id, rows, seconds):
            return
        if self.decode_step_s is None:
            self.decode_step_s = seconds
        self.decode_step_s += STEP_TIME_WEIGHT * (seconds - self.decode_step_s)

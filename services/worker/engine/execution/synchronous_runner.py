"""The synchronous runner: each pass is computed and sampled before the next one is prepared."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from common.steps import RowOpen, RowStop, StepPlan, StepResult
from services.worker.engine.execution.interface import PassAbandonedError, never_overtaken
from services.worker.engine.execution.pass_output import PassOutput, failures, with_tokens
from services.worker.engine.plans.passes import NO_CHUNKS, Chunks, ForwardPass, make_pass
from services.worker.engine.plans.plan import PlanLimits, apply_bookkeeping
from services.worker.engine.plans.saved_states import SavedStates
from services.worker.engine.plans.scoring import partial_results

if TYPE_CHECKING:
    from common.transfers import TransferAck
    from services.worker.engine.execution.interface import (
        AdapterStore,
        Checkpoint,
        Emit,
        ImageStore,
        IsOvertaken,
        Transfers,
    )
    from services.worker.engine.plans.rows import RowStates
    from services.worker.engine.plans.saved_states import RowStateCopies

TimeSource = Callable[[], float]


class PassExecutor(Protocol):
    """Computes the tokens of passes."""

    def open(self, opened: RowOpen) -> None:
        """Store a row's parameters."""

    def step(self, rows: RowStates, forward: ForwardPass, checkpoint: Checkpoint | None = None) -> PassOutput:
        """Run a pass, which has at least one row, and return the tokens of its `sampled_rows`.

        A pass that may be abandoned calls `checkpoint` as often as it can.
        """


class SynchronousRunner:
    """Owns the rows and runs each pass of a plan to its end; see `PlanRunner`."""

    def __init__(  # noqa: PLR0913  (all that passes touch)
        self,
        rows: RowStates,
        limits: PlanLimits,
        executor: PassExecutor,
        *,
        transfers: Transfers | None = None,
        states: RowStateCopies | None = None,
        reports_tokens: bool = True,
        adapters: AdapterStore | None = None,
        images: ImageStore | None = None,
        clock: TimeSource = time.perf_counter,
    ) -> None:
        """Take over `rows`. Only the rank that samples reports tokens; `clock` counts seconds.

        `transfers`, `states` and `adapters` are there if `limits` allow any, `images` if the model sees some.
        """
        self.rows = rows
        self._limits = limits
        self._executor = executor
        self._transfers = transfers
        self._saved = SavedStates(states)
        self._reports_tokens = reports_tokens
        self._adapters = adapters
        self._images = images
        self._clock = clock

    def run(self, plan: StepPlan, emit: Emit, is_overtaken: IsOvertaken = never_overtaken) -> None:
        """Run all passes of a plan; see `Engine.execute`."""
        started = self._clock()
        if plan.can_abandon and is_overtaken():
            self._begin(plan.without_passes())
            emit(self._abandoned(plan, 0))
            return
        chunks = self._begin(plan)
        checkpoint = _checkpoint(is_overtaken) if plan.can_abandon else None
        decoding = self.rows.decoding(plan.micro_batch)
        for substep in range(plan.steps):
            if plan.can_shorten and is_overtaken():
                emit(self._abandoned(plan, substep))
                return
            forward = make_pass(self.rows, decoding, chunks if substep == 0 else NO_CHUNKS)
            computing = self._clock()
            sampled = self._compute(forward, checkpoint)
            if sampled is None:
                emit(self._abandoned(plan, substep))
                return
            computed = self._clock()
            stops = self._advance(forward, sampled)
            self.rows.draft_lengths[:] = 0
            self._saved.save(plan.saves, self.rows)
            decoding = self.rows.decoding(plan.micro_batch)
            if plan.jumps:
                self.rows.allow_one_more()
            last = substep == plan.steps - 1 or decoding.size == 0
            acks = self._take_acks(is_idle=forward.is_empty)
            ended = self._clock()
            result = StepResult(
                plan.step_id,
                substep,
                last,
                compute_us=round((computed - computing) * 1e6),
                host_us=round((computing - started + ended - computed) * 1e6),
                acks=acks,
            )
            for part in partial_results(plan.step_id, substep, sampled.prompt_logprobs):
                emit(part)
            emit(with_tokens(result, forward, sampled, stops) if self._reports_tokens else result)
            if last:
                return
            started = ended

    def reset(self) -> None:
        """Free all rows and void all transfers."""
        self.rows.reset()
        if self._images is not None:
            self._images.reset()
        if self._adapters is not None:
            self._adapters.reset()
        if self._transfers is not None:
            self._transfers.reset()

    def settle(self, is_wanted: Callable[[], bool]) -> None:
        """Do nothing: every result was emitted at once."""

    def _begin(self, plan: StepPlan) -> Chunks:
        """Make a plan's changes, start its transfers, and return the chunks of its first pass."""
        if self._images is not None:
            plan = self._images.admit(plan, self.rows)
        chunks = apply_bookkeeping(plan, self.rows, self._limits)
        if self._adapters is not None:
            self._adapters.load(plan.adapters)
        for opened in plan.opens:
            self._executor.open(opened)
        self._saved.load(plan.opens)
        if self._transfers is not None:
            self._transfers.begin(plan.transfers)
        return chunks

    def _compute(self, forward: ForwardPass, checkpoint: Checkpoint | None) -> PassOutput | None:
        """Return the output of a pass, None if it was abandoned."""
        if forward.is_empty:
            return PassOutput()
        try:
            return self._executor.step(self.rows, forward, checkpoint)
        except PassAbandonedError:
            return None

    def _abandoned(self, plan: StepPlan, substep: int) -> StepResult:
        return StepResult(plan.step_id, substep, last=True, acks=self._take_acks(is_idle=False), abandoned=True)

    def _take_acks(self, *, is_idle: bool) -> tuple[TransferAck, ...]:
        if self._transfers is None:
            return ()
        return self._transfers.wait() if is_idle else self._transfers.poll()

    def _advance(self, forward: ForwardPass, sampled: PassOutput) -> tuple[RowStop, ...]:
        if forward.chunks.rows.size:
            self.rows.advance_prefill(forward.chunks.rows, forward.chunks.lengths)
        pooled = self.rows.finish_pooled(forward.pooled_rows)
        stops = pooled + self.rows.append_tokens(forward.sampled_rows, sampled.token_ids)
        stops += self.rows.append_accepted(sampled.accepted)
        stops += self.rows.append_following(sampled.forced)
        if not sampled.failed.size:
            return stops
        self.rows.stop(sampled.failed)
        failed = set(sampled.failed.tolist())
        return (*(stop for stop in stops if stop.row not in failed), *failures(sampled.failed))


def _checkpoint(is_overtaken: IsOvertaken) -> Checkpoint:
    def check() -> None:
        if is_overtaken():
            raise PassAbandonedError

    return check

"""The runner of stages: a pass is launched while others are computed, here or by later stages."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from common.steps import StepResult
from services.worker.engine.execution.interface import never_overtaken
from services.worker.engine.execution.pass_output import PassOutput, with_tokens
from services.worker.engine.plans.passes import NO_CHUNKS, make_pass
from services.worker.engine.plans.plan import PlanLimits, apply_bookkeeping
from services.worker.engine.plans.saved_states import SavedStates
from services.worker.engine.plans.scoring import partial_results

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from common.steps import RowStop, StepPlan
    from common.transfers import TransferAck
    from services.worker.engine.execution.interface import Emit, IsOvertaken, Transfers
    from services.worker.engine.plans.passes import Chunks, ForwardPass
    from services.worker.engine.plans.rows import RowIndices, RowStates
    from services.worker.engine.plans.saved_states import RowStateCopies

# Pause between two looks at whether the oldest pass has its tokens; where the processor computes the passes itself.
PAUSE_S = 0.0002


class LaunchedStagePass(Protocol):
    """A pass whose tokens are not known yet."""

    @property
    def is_ready(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> PassOutput:
        """Return the tokens of the pass's `sampled_rows`, when they are there."""


class StagePassExecutor(Protocol):
    """Computes a stage's part of passes without waiting for their tokens."""

    def mirror(self, plan: StepPlan, rows: RowStates) -> None:
        """Take in the changes that a plan made in `rows`."""

    def launch(self, rows: RowStates, forward: ForwardPass) -> LaunchedStagePass:
        """Compute this stage's part of a pass, which has at least one row."""


@dataclass(slots=True)
class _Pass:
    """A pass of a plan; None launched: it had no rows."""

    plan: StepPlan
    substep: int
    forward: ForwardPass
    launched: LaunchedStagePass | None
    begun: float
    compute_us: int
    host_us: int
    last: bool
    output: PassOutput = field(default_factory=PassOutput)
    stops: tuple[RowStop, ...] = ()

    @property
    def rows(self) -> RowIndices:
        """The rows that change once the tokens are known."""
        return np.concatenate([self.forward.sampled_rows, self.forward.pooled_rows])

    @property
    def is_ready(self) -> bool:
        return self.launched is None or self.launched.is_ready


class StagedRunner:
    """Owns the rows of a stage; see `PlanRunner`.

    What a plan reads of rows depends on their tokens. So before a plan is taken in, this waits for the passes that its
    own rows were in: those of its micro-batch, and those that it closes or changes. Passes of other micro-batches stay
    in flight, here or in later stages. Prompts advance when their pass is launched: their next chunk needs no token.
    """

    def __init__(  # noqa: PLR0913  (all that passes touch)
        self,
        rows: RowStates,
        limits: PlanLimits,
        executor: StagePassExecutor,
        *,
        transfers: Transfers | None = None,
        states: RowStateCopies | None = None,
        reports_tokens: bool = False,
        pause_s: float = PAUSE_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take over `rows`; `clock` counts seconds. `transfers` and `states` are there if `limits` allow any.

        The rank that samples reports tokens; `pause_s` is the time between two looks at whether a pass is ready.
        """
        self.rows = rows
        self._limits = limits
        self._executor = executor
        self._transfers = transfers
        self._saved = SavedStates(states)
        self._reports_tokens = reports_tokens
        self._pause_s = pause_s
        self._clock = clock
        self._last_done = 0.0
        self._emit: Emit = lambda _result: None
        self._pending: deque[_Pass] = deque()

    def run(self, plan: StepPlan, emit: Emit, is_overtaken: IsOvertaken = never_overtaken) -> None:
        """Launch the passes of a plan; results come once their tokens are known. No plan is abandoned."""
        del is_overtaken
        self._emit = emit
        started = self._clock()
        self._finish_passes_of(self._changed_rows(plan))
        chunks = self._begin(plan)
        # Further passes of a plan, and snapshots, need the tokens of the one before.
        waits = plan.steps > 1 or bool(plan.saves)
        for substep in range(plan.steps):
            made = self._launch(plan, substep, chunks if substep == 0 else NO_CHUNKS, started)
            if waits:
                self._finish_passes(made)
                self._saved.save(plan.saves, self.rows)
                if plan.jumps:
                    self.rows.allow_one_more()
                made.last = substep == plan.steps - 1 or self.rows.decoding(plan.micro_batch).size == 0
                self._report(made)
                started = self._clock()
            self.rows.draft_lengths[:] = 0
            if made.last:
                return

    def settle(self, is_wanted: Callable[[], bool], pause: Callable[[float], None] = time.sleep) -> None:
        """Emit the results of outstanding passes as they end; return early when `is_wanted`: there is a plan to run."""
        while self._pending:
            if self._pending[0].is_ready:
                self._finish_oldest()
            elif is_wanted():
                return
            else:
                pause(self._pause_s)

    def reset(self) -> None:
        """Free all rows and void all transfers."""
        self._pending.clear()
        self.rows.reset()
        if self._transfers is not None:
            self._transfers.reset()

    def _changed_rows(self, plan: StepPlan) -> NDArray[np.bool_]:
        """Return [slots] which rows' tokens the plan depends on."""
        changed = np.zeros(self.rows.max_rows, np.bool_)
        changed[plan.micro_batch.of(np.arange(self.rows.max_rows))] = True
        for rows in (
            plan.closes,
            [opened.row for opened in plan.opens],
            [replacement.row for replacement in plan.replacements],
            [draft.row for draft in plan.drafts],
            [save.row for save in plan.saves],
        ):
            # Rows outside of the slots are refused when the plan is taken in.
            changed[[row for row in rows if row < self.rows.max_rows]] = True
        return changed

    def _begin(self, plan: StepPlan) -> Chunks:
        chunks = apply_bookkeeping(plan, self.rows, self._limits)
        self._executor.mirror(plan, self.rows)
        self._saved.load(plan.opens)
        if self._transfers is not None:
            self._transfers.begin(plan.transfers)
        return chunks

    def _launch(self, plan: StepPlan, substep: int, chunks: Chunks, started: float) -> _Pass:
        forward = make_pass(self.rows, self.rows.decoding(plan.micro_batch), chunks)
        computing = self._clock()
        launched = None if forward.is_empty else self._executor.launch(self.rows, forward)
        computed = self._clock()
        if forward.chunks.rows.size:
            self.rows.advance_prefill(forward.chunks.rows, forward.chunks.lengths)
        made = _Pass(
            plan, substep, forward, launched, computing, round((computed - computing) * 1e6),
            round((computing - started) * 1e6), last=substep == plan.steps - 1,
        )  # fmt: skip
        self._pending.append(made)
        return made

    def _finish_passes_of(self, rows: NDArray[np.bool_]) -> None:
        """Wait for the tokens of `rows` [slots]."""
        count = max((i for i, made in enumerate(self._pending, 1) if rows[made.rows].any()), default=0)
        for _ in range(count):
            self._finish_oldest()

    def _finish_passes(self, newest: _Pass) -> None:
        """Wait for the tokens of all passes; the result of `newest` is left to the caller."""
        while self._pending[0] is not newest:
            self._finish_oldest()
        self._advance(self._pending.popleft())

    def _finish_oldest(self) -> None:
        made = self._pending.popleft()
        self._advance(made)
        self._report(made)

    def _advance(self, made: _Pass) -> None:
        """Give rows the tokens that they sampled."""
        if made.launched is None:
            return
        made.output = output = made.launched.wait()
        if self._reports_tokens:
            # From the launch or the end of the pass before, whichever is later: passes overlap.
            finished = self._clock()
            made.compute_us = round((finished - max(made.begun, self._last_done)) * 1e6)
            self._last_done = finished
        stops = self.rows.finish_pooled(made.forward.pooled_rows)
        stops += self.rows.append_tokens(made.forward.sampled_rows, output.token_ids)
        stops += self.rows.append_accepted(output.accepted)
        made.stops = stops + self.rows.append_following(output.forced)

    def _report(self, made: _Pass) -> None:
        acks: tuple[TransferAck, ...] = ()
        if self._transfers is not None:
            acks = self._transfers.wait() if made.launched is None else self._transfers.poll()
        result = StepResult(
            made.plan.step_id, made.substep, made.last, compute_us=made.compute_us, host_us=made.host_us, acks=acks
        )
        for part in partial_results(made.plan.step_id, made.substep, made.output.prompt_logprobs):
            self._emit(part)
        reported = with_tokens(result, made.forward, made.output, made.stops) if self._reports_tokens else result
        self._emit(reported)

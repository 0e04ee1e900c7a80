"""The overlapped runner: launches each pass before the tokens of the one before are read.

Pass p + 1 is launched before the tokens of pass p are read, even where rows' choices depend on them: those are read
while the device computes pass p + 1. Rows that reach their length are known in advance; a row
that samples a stop id in pass p still takes part in pass p + 1, where its token is dropped, and is out of pass p + 2.
That lag is fixed, whenever tokens happen to arrive, so that all ranks launch the same passes. What such a row writes
goes to pages that the plan granted it, before anything that a later plan can put there. Rows do not jump forward here,
however far plans would let them.

A plan with drafts comes when all earlier tokens are known, and its pass is not overlapped: how many tokens it gives is
known when it has ended.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from common.steps import RowStop, StepPlan, StepResult
from common.types import FinishReason, RowSlot
from services.worker.engine.execution.interface import never_overtaken
from services.worker.engine.execution.pass_output import NO_ROWS, PassOutput, failures
from services.worker.engine.plans.passes import NO_CHUNKS, ForwardPass, make_pass
from services.worker.engine.plans.plan import PlanLimits, apply_bookkeeping
from services.worker.engine.plans.saved_states import SavedStates
from services.worker.engine.plans.scoring import partial_results

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from common.transfers import TransferAck
    from services.worker.engine.execution.interface import AdapterStore, Emit, ImageStore, IsOvertaken, Transfers
    from services.worker.engine.execution.synchronous_runner import TimeSource
    from services.worker.engine.plans.rows import RowIndices, RowStates
    from services.worker.engine.plans.saved_states import RowStateCopies


log = logging.getLogger(__name__)

# Only first uses take so long: they compile, load or allocate.
_SLOW_LAUNCH_S = 0.2


class PendingOutput(Protocol):
    """A launched pass."""

    @property
    def failed(self) -> RowIndices:
        """Rows for which memory did not suffice; known at once, as nothing was launched for them."""

    def is_ready(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> PassOutput:
        """Return the tokens of the pass's `sampled_rows`, when they are there."""


class OverlappedPassExecutor(Protocol):
    """Computes passes without waiting for them."""

    def mirror(self, plan: StepPlan, rows: RowStates) -> None:
        """Copy the changes that a plan made in `rows` to the device."""

    def launch(
        self, rows: RowStates, forward: ForwardPass, catch_up: Callable[[], None], report_ready: Callable[[], None]
    ) -> PendingOutput:
        """Start a pass with at least one row.

        Where what rows may sample depends on their earlier tokens, `catch_up` is called once the computation is
        launched: it waits for the tokens of all earlier passes, and records them in `rows`. Where launching takes
        long, `report_ready` is called again and again, once the pass's input is complete: it does the same for the
        tokens that have arrived.
        """


@dataclass(slots=True)
class _Pass:
    number: int
    plan: StepPlan
    substep: int
    rows: RowIndices
    tenants: NDArray[np.int64]
    positions: NDArray[np.int64]
    at_limit: NDArray[np.bool_]
    pooled: RowIndices
    pooled_tenants: NDArray[np.int64]
    failed: RowIndices
    failed_tenants: NDArray[np.int64]
    tokens: PendingOutput | None
    launched: float
    host_s: float
    last: bool = False


class OverlappedRunner:
    """Owns the rows and runs plans one pass ahead; see `PlanRunner`. Results of the last pass wait for `settle`."""

    def __init__(  # noqa: PLR0913  (all that passes touch)
        self,
        rows: RowStates,
        limits: PlanLimits,
        executor: OverlappedPassExecutor,
        *,
        transfers: Transfers | None = None,
        states: RowStateCopies | None = None,
        reports_tokens: bool = True,
        adapters: AdapterStore | None = None,
        images: ImageStore | None = None,
        clock: TimeSource = time.perf_counter,
    ) -> None:
        """Take over `rows`. Ranks other than 0 do not report tokens; `clock` counts seconds.

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
        self._emit: Emit = lambda _result: None
        self._pending: deque[_Pass] = deque()
        self._next_pass = 0
        self._last_done = 0.0
        # Of the launch of a pass: what reading earlier tokens took, and the error that ended it.
        self._waited_s = 0.0
        self._failure: Exception | None = None
        # Rows that sampled a stop id and the pass that sampled it, until the fixed lag is over.
        self._stopping: deque[tuple[int, RowIndices, NDArray[np.int64]]] = deque()
        self._has_ended = np.zeros(rows.max_rows, np.bool_)
        self._generations = np.zeros(rows.max_rows, np.int64)

    @property
    def is_settled(self) -> bool:
        """Whether every pass's result was emitted."""
        return not self._pending

    def run(self, plan: StepPlan, emit: Emit, is_overtaken: IsOvertaken = never_overtaken) -> None:
        """Launch all passes of a plan, and emit the results of all but those that are still computed.

        No plan is abandoned.
        """
        del is_overtaken
        self._emit = emit
        started = self._clock()
        self._apply_stops()
        if self._images is not None:
            plan = self._images.admit(plan, self.rows)
        chunks = apply_bookkeeping(plan, self.rows, self._limits)
        if self._adapters is not None:
            # In stream order, after the passes of earlier plans.
            self._adapters.load(plan.adapters)
        for opened in plan.opens:
            self._generations[opened.row] += 1
            self._has_ended[opened.row] = False
        self._executor.mirror(plan, self.rows)
        self._saved.load(plan.opens)
        if self._transfers is not None:
            # All passes of earlier plans are launched: copies follow them in stream order.
            self._transfers.begin(plan.transfers)
        if plan.drafts:
            self._finish(keep=0)
            forward = make_pass(self.rows, self.rows.decoding(), chunks)
        else:
            forward = ForwardPass(self.rows.decoding(), chunks)
        for substep in range(plan.steps):
            launched = self._launch(plan, substep, forward, started)
            self._saved.save(plan.saves, self.rows)
            launched.last = bool(plan.drafts)
            self._finish(keep=0 if plan.drafts else 1)
            started = self._clock()
            self._apply_stops()
            forward = ForwardPass(self.rows.decoding(), NO_CHUNKS)
            launched.last = substep == plan.steps - 1 or forward.is_empty
            if launched.last:
                return

    def reset(self) -> None:
        """Free all rows and drop the outstanding passes."""
        self.rows.reset()
        if self._images is not None:
            self._images.reset()
        self._pending.clear()
        self._stopping.clear()
        if self._adapters is not None:
            self._adapters.reset()
        if self._transfers is not None:
            self._transfers.reset()

    def settle(self, is_wanted: Callable[[], bool], pause: Callable[[float], None] = time.sleep) -> None:
        """Emit the results of outstanding passes as they end; return early when `is_wanted`: there is a plan to run."""
        while self._pending:
            if self._is_ready():
                self._finish(keep=len(self._pending) - 1)
            elif is_wanted():
                return
            else:
                pause(20e-6)

    def _launch(self, plan: StepPlan, substep: int, forward: ForwardPass, started: float) -> _Pass:
        rows, sampled = self.rows, forward.sampled_rows
        self._waited_s = 0.0
        launched = self._clock()
        tokens = None
        if not forward.is_empty:
            try:
                tokens = self._executor.launch(rows, forward, self._catch_up, self._report_ready)
            finally:
                failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
        if forward.chunks.rows.size:
            rows.advance_prefill(forward.chunks.rows, forward.chunks.lengths)
        positions = rows.lengths[sampled]
        at_limit = rows.advance(sampled)
        pooled = forward.pooled_rows
        rows.finish_pooled(pooled)
        failed = NO_ROWS if tokens is None else tokens.failed
        took = self._clock() - launched - self._waited_s
        if took > _SLOW_LAUNCH_S:
            log.warning(
                "worker.slow_launch seconds=%.2f decode_rows=%d chunk_tokens=%d",
                took, forward.decode_rows.size, int(forward.chunks.lengths.sum()),
            )  # fmt: skip
        made = _Pass(
            self._next_pass, plan, substep, sampled, self._generations[sampled], positions, at_limit, pooled,
            self._generations[pooled], failed, self._generations[failed], tokens, launched,
            self._clock() - started - self._waited_s,
        )  # fmt: skip
        self._next_pass += 1
        self._pending.append(made)
        return made

    def _catch_up(self) -> None:
        self._report(keep=0)

    def _report_ready(self) -> None:
        """Emit what has been computed while a pass is launched: clients need not wait until all of it is."""
        # One without rows has only transfers, which may be waited for when the device has work.
        while self._pending and self._pending[0].tokens is not None and self._is_ready():
            self._report(keep=len(self._pending) - 1)

    def _report(self, keep: int) -> None:
        """Finish passes amid the launch of another one, of which errors of theirs are none: they are raised after it.

        A lack of memory would be taken for that of the launched pass otherwise, and the result would be lost.
        """
        started = self._clock()
        try:
            self._finish(keep)
        except Exception as error:  # noqa: BLE001  (raised again when the launch has ended)
            self._failure = self._failure or error
        self._waited_s += self._clock() - started

    def _is_ready(self) -> bool:
        """Whether the tokens of the oldest pass whose result is outstanding have arrived."""
        tokens = self._pending[0].tokens
        return tokens is None or tokens.is_ready()

    def _finish(self, keep: int) -> None:
        """Emit the results of all but the `keep` newest passes."""
        while len(self._pending) > keep:
            done = self._pending[0]
            sampled = PassOutput() if done.tokens is None else done.tokens.wait()
            finished = self._clock()
            self._pending.popleft()
            result = StepResult(
                done.plan.step_id,
                done.substep,
                done.last,
                # From the launch or the end of the pass before, whichever is later: passes overlap.
                compute_us=round((finished - max(done.launched, self._last_done)) * 1e6),
                host_us=round(done.host_s * 1e6),
                acks=self._take_acks(done),
            )
            self._last_done = finished
            for part in partial_results(done.plan.step_id, done.substep, sampled.prompt_logprobs):
                self._emit(part)
            # Failed rows have no tokens, so they end first.
            failures_of = self._end_failed(done)
            result = self._with_embeddings(self._with_tokens(result, done, sampled), done, sampled)
            if failures_of and self._reports_tokens:
                result = replace(result, stops=(*result.stops, *failures_of))
            self._emit(result)

    def _take_acks(self, done: _Pass) -> tuple[TransferAck, ...]:
        if self._transfers is None:
            return ()
        return self._transfers.wait() if done.tokens is None else self._transfers.poll()

    def _end_failed(self, done: _Pass) -> tuple[RowStop, ...]:
        """End the rows for which memory did not suffice; return their stops."""
        if not done.failed.size:
            return ()
        is_live = (self._generations[done.failed] == done.failed_tenants) & ~self._has_ended[done.failed]
        ended = done.failed[is_live]
        self._has_ended[ended] = True
        self._stopping.append((done.number, ended, self._generations[ended]))
        return failures(ended)

    def _with_embeddings(self, result: StepResult, done: _Pass, sampled: PassOutput) -> StepResult:
        """Add the embeddings of rows whose slots were not opened again meanwhile."""
        if not (done.pooled.size and self._reports_tokens):
            return result
        live = set(done.pooled[self._generations[done.pooled] == done.pooled_tenants].tolist())
        embeddings = tuple(entry for entry in sampled.embeddings if entry[0] in live)
        stops = tuple(RowStop(row, FinishReason.STOP) for row, _ in embeddings)
        return replace(result, stops=(*result.stops, *stops), embeddings=embeddings)

    def _with_tokens(self, result: StepResult, done: _Pass, sampled: PassOutput) -> StepResult:
        if done.rows.size == 0:
            return result
        live = (self._generations[done.rows] == done.tenants) & ~self._has_ended[done.rows]
        rows, positions = done.rows[live], done.positions[live]
        token_ids = sampled.token_ids[live]
        hits_stop = self.rows.record(rows, positions, token_ids)
        at_limit = done.at_limit[live]
        stops: tuple[RowStop, ...] = ()
        if (hits_stop | at_limit).any():
            stops = tuple(
                RowStop(RowSlot(int(rows[i])), FinishReason.STOP, int(token_ids[i]))
                if hits_stop[i]
                else RowStop(RowSlot(int(rows[i])), FinishReason.LENGTH)
                for i in np.flatnonzero(hits_stop | at_limit)
            )
            stopped = rows[hits_stop]
            self._has_ended[stopped] = True
            self._stopping.append((done.number, stopped, self._generations[stopped]))
        accepted = sampled.accepted.of(rows)
        stops += self.rows.append_accepted(accepted)
        if not self._reports_tokens:
            return result
        wanted = set(rows.tolist()) if sampled.logprobs else set()
        return replace(
            result,
            rows=rows.astype(np.int32),
            token_ids=token_ids,
            stops=stops,
            logprobs=tuple(entry for entry in sampled.logprobs if entry[0] in wanted),
            accepted_rows=accepted.rows.astype(np.int32),
            accepted_token_ids=accepted.token_ids,
        )

    def _apply_stops(self) -> None:
        """Take rows out that stopped two or more passes before the next one."""
        while self._stopping and self._stopping[0][0] <= self._next_pass - 2:
            _, stopped, tenants = self._stopping.popleft()
            self.rows.stop(stopped[self._generations[stopped] == tenants])

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from common.steps import RowOpen, StepPlan, StepResult
from common.types import RowSlot, StepId, TokenLogprob
from services.worker.engine.execution.pass_output import PassOutput
from services.worker.engine.execution.synchronous_runner import SynchronousRunner
from services.worker.engine.plans.plan import PlanLimits
from services.worker.engine.plans.rows import RowStates
from tests.services.worker.engine.scenario import chunk, open_row

if TYPE_CHECKING:
    from services.worker.engine.execution.interface import Checkpoint
    from services.worker.engine.plans.passes import ForwardPass

LOGPROB = (RowSlot(1), TokenLogprob(-0.5))


@dataclass
class ConstantExecutor:
    """Samples 5 for every row, and takes 3 ticks of the clock."""

    clock: count[int]
    opened: list[int] = field(default_factory=list)

    def open(self, opened: RowOpen) -> None:
        self.opened.append(opened.row)

    def step(self, rows: RowStates, forward: ForwardPass, checkpoint: Checkpoint | None = None) -> PassOutput:
        for _ in range(3):
            next(self.clock)
        return PassOutput(np.full(forward.sampled_rows.size, 5, np.int32), (LOGPROB,))


def run(plan: StepPlan, *, reports_tokens: bool = True) -> list[StepResult]:
    clock = count()
    runner = SynchronousRunner(
        RowStates(4, 40, 4),
        PlanLimits(100, 50, 64),
        ConstantExecutor(clock),
        reports_tokens=reports_tokens,
        clock=lambda: next(clock) * 1e-6,
    )
    results: list[StepResult] = []
    runner.run(plan, results.append)
    return results


PLAN = StepPlan(StepId(8), opens=(open_row(1, [1, 2], [0, 1], total=40),), prefills=(chunk(1, 0, 2),), steps=2)


def test_results_name_their_plan_and_separate_compute_from_host_time() -> None:
    first, second = run(PLAN)
    assert (first.step_id, first.substep, first.last) == (8, 0, False)
    assert (second.step_id, second.substep, second.last) == (8, 1, True)
    # The clock ticks once at each reading: 3 ticks of the executor and one to read it again.
    assert [result.compute_us for result in (first, second)] == [4, 4]
    assert [result.host_us for result in (first, second)] == [2, 2]
    assert first.logprobs == (LOGPROB,)


def test_other_ranks_report_that_they_have_run_and_nothing_else() -> None:
    results = run(PLAN)
    assert [result.rows.size for result in results] == [1, 1]
    for result, reported in zip(results, run(PLAN, reports_tokens=False), strict=True):
        assert (reported.step_id, reported.substep, reported.last) == (result.step_id, result.substep, result.last)
        assert reported.rows.size == reported.token_ids.size == 0
        assert reported.logprobs == ()


def test_a_chunk_that_ends_before_the_ids_do_samples_nothing() -> None:
    plan = StepPlan(StepId(1), opens=(open_row(1, [1, 2, 3], [0], total=40),), prefills=(chunk(1, 0, 2),), steps=9)
    (result,) = run(plan)
    assert result.last
    assert result.rows.size == 0

"""Memory that does not suffice, as the scheduler sees it: rows given up, and groups that need smaller steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from common.steps import RowStop, StepPlan, StepResult
from common.types import ErrorCode, FinishReason, RowSlot
from services.scheduler.core.step_limits import LEAST_TOKENS, StepLimits
from tests.fakes.simulated_worker import SimulatedWorker, expected_output
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request

PROMPT = list(range(100, 130))


class ShortWorker(SimulatedWorker):
    """Gives up the rows of some slots in some passes."""

    def __init__(self, pages: int, page_size: int, lost: set[tuple[int, int]]) -> None:
        super().__init__(pages, page_size)
        self.lost = lost
        self.passes = 0

    def run(self, plan: StepPlan) -> list[StepResult]:
        results = []
        assert plan.steps == 1, "no leases here"
        before = {number: row.computed for number, row in self.rows.items()}
        before |= {opened.row: opened.computed_tokens for opened in plan.opens}
        for result in super().run(plan):
            self.passes += 1
            failed = [row for number, row in sorted(self.lost) if number == self.passes and row in self.rows]
            for row in failed:
                self.rows[row].stopped = True
                # What it should have stored was not.
                for position in range(before[row], self.rows[row].computed):
                    del self.kv[self._slot(self.rows[row], position)]
            kept = ~np.isin(result.rows, failed)
            results.append(
                replace(
                    result,
                    rows=result.rows[kept],
                    token_ids=result.token_ids[kept],
                    stops=(
                        *(stop for stop in result.stops if stop.row not in failed),
                        *(RowStop(RowSlot(row), FinishReason.ERROR) for row in failed),
                    ),
                )
            )
        return results


def test_a_row_that_is_given_up_ends_with_a_typed_error_and_others_go_on() -> None:
    harness = Harness(depth=1)
    harness.worker = ShortWorker(64, 4, {(4, 1)})
    for name in ("a", "b", "c"):
        harness.core.submit(make_request(name, [ord(name), *PROMPT[:5]]), 0.0)
    harness.run()
    error = harness.finishes["b", 0].error
    assert error is not None
    assert (error.code, error.retryable) == (ErrorCode.OUT_OF_MEMORY, True)
    assert "not enough memory" in error.message
    for name in ("a", "c"):
        assert harness.outputs[name, 0] == expected_output([ord(name), *PROMPT[:5]], 14, (STOP_ID,))
    harness.audit()


def test_uncomputed_pages_are_not_cached_for_the_next_request() -> None:
    harness = Harness(depth=1)
    # Its second chunk of 16.
    harness.worker = ShortWorker(64, 4, {(2, 0)})
    harness.core.submit(make_request("lost", PROMPT), 0.0)
    harness.run()
    assert harness.finishes["lost", 0].reason is FinishReason.ERROR
    harness.core.submit(make_request("next", PROMPT), 0.0)
    harness.run()
    assert harness.cached["next", 0] == 16
    # The worker checks each slot that it reads.
    assert harness.outputs["next", 0] == expected_output(PROMPT, 38, (STOP_ID,))


@given(st.sets(st.tuples(st.integers(1, 20), st.integers(0, 3)), max_size=12), st.integers(1, 3))
def test_accounts_stay_exact_whichever_sequences_are_given_up(lost: set[tuple[int, int]], depth: int) -> None:
    harness = Harness(pages=24, depth=depth, cache="shared")
    harness.worker = ShortWorker(24, 4, lost)
    for number in range(6):
        harness.core.submit(make_request(f"r{number}", PROMPT[: 6 + 3 * number]), 0.0)
    harness.run()
    for number in range(6):
        finish = harness.finishes[f"r{number}", 0]
        wanted = expected_output(PROMPT[: 6 + 3 * number], 14 + 3 * number, (STOP_ID,))
        if finish.reason is FinishReason.ERROR:
            assert harness.outputs[f"r{number}", 0] == wanted[: len(harness.outputs[f"r{number}", 0])]
        else:
            assert harness.outputs[f"r{number}", 0] == wanted
    harness.audit()


def test_limits_shrink_in_tokens_first_then_in_rows_and_then_no_more() -> None:
    limits = StepLimits(512, 5)
    seen = []
    while limits.try_shrink():
        seen.append((limits.tokens, limits.rows))
    assert seen == [(128, 5), (32, 5), (LEAST_TOKENS, 5), (LEAST_TOKENS, 2), (LEAST_TOKENS, 1)]


def test_after_an_out_of_memory_loss_steps_are_smaller_and_all_requests_finish() -> None:
    harness = Harness(max_step_tokens=64, max_rows=4)
    for name in ("a", "b", "c", "d"):
        harness.core.submit(make_request(name, [ord(name), *PROMPT]), 0.0)
    harness.plan()
    assert max(_tokens(plan) for plan in harness.plans) == 64
    for _ in range(2):
        assert harness.core.shrink_steps()
        harness.lose_workers()
    before = len(harness.plans)
    harness.run()
    assert max(_tokens(plan) for plan in harness.plans[before:]) == LEAST_TOKENS
    assert max(len(plan.opens) for plan in harness.plans[before:]) <= 2
    for name in ("a", "b", "c", "d"):
        assert harness.outputs[name, 0] == expected_output([ord(name), *PROMPT], 39, (STOP_ID,))


def test_when_steps_cannot_shrink_running_sequences_fail_and_waiting_ones_run() -> None:
    harness = Harness(max_step_tokens=16, max_rows=1)
    for name in ("a", "b"):
        harness.core.submit(make_request(name, PROMPT), 0.0)
    harness.plan()
    assert not harness.core.shrink_steps()
    harness.lose_workers()
    harness.run()
    error = harness.finishes["a", 0].error
    assert error is not None
    assert error.code is ErrorCode.OUT_OF_MEMORY
    assert harness.outputs["b", 0] == expected_output(PROMPT, 38, (STOP_ID,))


def _tokens(plan: StepPlan) -> int:
    return sum(chunk.length for chunk in plan.prefills)

"""Requests that make the engine fail: they are found, and all others get their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from common.errors import UnavailableError
from common.types import ErrorCode, FinishReason
from services.scheduler.core.suspects import BROKEN_AFTER, QUARANTINE_S, QUARANTINED_AFTER
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request, with_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.scheduler.policy.policies import PolicyName

TOKENS = 12


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(17 * position + 31 * salt) % 900 + 10 for position in range(length)]


@dataclass
class Engine:
    """A harness whose engine fails in a pass that takes a row of `culprits` to so many computed tokens."""

    harness: Harness
    culprits: dict[str, int]
    failures: int = 0
    # The requests in flight at each failure.
    lost: list[list[str]] = field(default_factory=list)
    after_failure: Callable[[], None] = lambda: None

    def run(self, limit: int = 3000) -> None:
        for _ in range(limit):
            self.harness.plan()
            self.harness.check_accounts()
            if self._fails():
                self.failures += 1
                self.lost.append(sorted(row.opened.request_id for row in self.harness.worker.rows.values()))
                self.harness.lose_workers(engine_failed=True)
                self.after_failure()
            elif not self.harness.result() and not self.harness.core.in_flight:
                return
        raise AssertionError("the requests do not end")

    def _fails(self) -> bool:
        rows = self.harness.worker.rows.values()
        return any(row.computed >= self.culprits.get(row.opened.request_id, row.computed + 1) for row in rows)


def check_tokens(harness: Harness, prompts: dict[str, list[int]]) -> None:
    for name, prompt in prompts.items():
        assert harness.outputs[name, 0] == expected_output(prompt, len(prompt) + TOKENS, (STOP_ID,)), name
        assert harness.finishes[name, 0].error is None


def submit(harness: Harness, prompts: dict[str, list[int]], **changes: object) -> None:
    for name, prompt in prompts.items():
        admission = harness.core.submit(make_request(name, prompt, max_tokens=TOKENS, **changes), harness.now)  # type: ignore[arg-type]
        assert admission.rejected is None, admission


@pytest.mark.parametrize("policy", [None, "lpm", "priority", "fair"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("fails_at", [3, 14, 18], ids=["first chunk", "last chunk", "decoding"])
def test_the_request_to_blame_is_found_with_three_failures_and_the_others_get_their_tokens(
    policy: PolicyName | None, depth: int, fails_at: int
) -> None:
    harness = Harness(max_rows=8, max_step_tokens=16, depth=depth, policy=policy, pages=128)
    prompts = {f"r{index}": prompt_of(14, index) for index in range(12)}
    culprit = "r5"
    submit(harness, prompts)
    engine = Engine(harness, {culprit: fails_at})
    engine.run()
    assert engine.failures == QUARANTINED_AFTER
    finish = harness.finishes[culprit, 0]
    assert finish.reason is FinishReason.ERROR
    assert finish.error is not None
    assert (finish.error.code, finish.error.retryable) == (ErrorCode.INTERNAL, False)
    assert "repeatedly ended the engine" in finish.error.message
    check_tokens(harness, {name: prompt for name, prompt in prompts.items() if name != culprit})
    harness.audit()
    assert not list(harness.core.open_sequences)


def test_several_requests_to_blame_are_all_found() -> None:
    harness = Harness(max_rows=8, pages=128)
    prompts = {f"r{index}": prompt_of(10, index) for index in range(10)}
    culprits = {"r0": 5, "r4": 12, "r9": 3}
    submit(harness, prompts)
    engine = Engine(harness, culprits)
    engine.run()
    assert engine.failures <= QUARANTINED_AFTER * len(culprits)
    assert {name for (name, _), finish in harness.finishes.items() if finish.error is not None} == set(culprits)
    check_tokens(harness, {name: prompt for name, prompt in prompts.items() if name not in culprits})


def test_cleared_requests_run_beside_the_isolated_one_and_new_ones_wait_for_it() -> None:
    harness = Harness(max_rows=6, pages=128)
    prompts = {f"r{index}": prompt_of(10, index) for index in range(4)}
    late = {"late": prompt_of(10, 99)}
    submit(harness, prompts)
    engine = Engine(harness, {"r3": 6})
    engine.after_failure = lambda: submit(harness, late) if engine.failures == 2 else None
    engine.run()
    assert engine.lost == [["r0", "r1", "r2", "r3"]] * 3
    check_tokens(harness, {**late, **{name: prompt for name, prompt in prompts.items() if name != "r3"}})


def test_single_failures_and_lost_connections_are_no_evidence() -> None:
    harness = Harness(max_rows=4, max_step_tokens=64, pages=128)
    prompts = {f"r{index}": prompt_of(10, index) for index in range(4)}
    submit(harness, prompts)
    failures = 0
    while list(harness.core.open_sequences):
        harness.plan()
        harness.lose_workers(engine_failed=True)
        failures += 1
        for _ in range(5):
            harness.plan()
            harness.lose_workers(engine_failed=False)
        for _ in range(4):
            harness.plan()
            harness.result()
    assert failures > QUARANTINED_AFTER
    check_tokens(harness, prompts)


def test_an_engine_that_fails_at_every_plan_ends_all_requests() -> None:
    harness = Harness(max_rows=8, max_step_tokens=64, pages=128)
    prompts = {f"r{index}": prompt_of(10, index) for index in range(40)}
    submit(harness, prompts)
    engine = Engine(harness, dict.fromkeys(prompts, 0))
    engine.run()
    # Once it is clear that the engine is broken, each round takes all requests that run.
    assert engine.failures <= BROKEN_AFTER + 2 * 40 // 6
    assert len(harness.finishes) == 40
    assert {finish.error.code for finish in harness.finishes.values() if finish.error} == {ErrorCode.INTERNAL}


def test_all_choices_of_a_request_share_its_failures() -> None:
    harness = Harness(max_rows=8, pages=128)
    submit(harness, {"many": prompt_of(10)}, n=4)
    submit(harness, innocent := {"other": prompt_of(12, 3)})
    engine = Engine(harness, {"many": 13})
    engine.run()
    assert engine.failures == QUARANTINED_AFTER
    assert [harness.finishes["many", index].reason for index in range(4)] == [FinishReason.ERROR] * 4
    check_tokens(harness, innocent)


def test_the_same_prompt_of_the_same_subject_is_refused_for_a_while() -> None:
    harness = Harness(pages=128)
    submit(harness, {"bad": prompt_of(10)})
    Engine(harness, {"bad": 4}).run()
    refused = harness.core.submit(make_request("again", prompt_of(10)), harness.now + QUARANTINE_S - 1).rejected
    assert refused is not None
    assert (refused.code, refused.retryable) == (ErrorCode.INTERNAL, False)
    assert harness.core.submit(make_request("other", prompt_of(10), user="bob"), harness.now).rejected is None
    assert harness.core.submit(make_request("longer", prompt_of(11)), harness.now).rejected is None
    assert harness.core.submit(make_request("later", prompt_of(10)), harness.now + QUARANTINE_S + 1).rejected is None
    harness.run()


@pytest.mark.parametrize("fails_at", [6, 13])
def test_a_request_that_is_handed_back_takes_its_failures_along(fails_at: int) -> None:
    first, second = Harness(pages=128, max_rows=4), Harness(pages=128, max_rows=4)
    prompts = {f"r{index}": prompt_of(10, index) for index in range(4)}
    submit(first, prompts)
    first.plan()
    first.core.requeue_all()  # whether the engine failed is not known yet
    first.core.fail_all(UnavailableError("the workers are away"))
    first.collect()
    carried = {name: first.finishes[name, 0].error.engine_failures for name in prompts}  # type: ignore[union-attr]
    assert carried == dict.fromkeys(prompts, 1)
    for name, prompt in prompts.items():
        request = with_options(make_request(name, prompt, max_tokens=TOKENS), engine_failures=carried[name])
        assert second.core.submit(request, 0.0).rejected is None
    engine = Engine(second, {"r2": fails_at})
    engine.run()
    assert engine.failures == QUARANTINED_AFTER - 1
    check_tokens(second, {name: prompt for name, prompt in prompts.items() if name != "r2"})


def test_requests_that_end_while_they_are_suspected_leave_nothing() -> None:
    harness = Harness(max_rows=4, pages=128)
    prompts = {f"r{index}": prompt_of(10, index) for index in range(4)}
    submit(harness, prompts)
    for _ in range(2):
        harness.plan()
        harness.lose_workers(engine_failed=True)
    harness.plan()
    assert harness.core.rows.running == 1, "they run one after another"
    for name in prompts:
        harness.core.abort(make_request(name, [1]).request_id)
    assert not harness.core._suspects.is_isolating
    submit(harness, fresh := {"fresh": prompt_of(9, 50), "too": prompt_of(9, 51)})
    harness.run()
    check_tokens(harness, fresh)

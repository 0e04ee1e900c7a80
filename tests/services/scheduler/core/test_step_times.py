"""What is learnt of how long steps last."""

from __future__ import annotations

import pytest

from services.scheduler.core.step_times import StepTimes
from tests.services.scheduler.core.harness import Harness, make_request


def test_nothing_is_expected_of_what_was_never_seen() -> None:
    times = StepTimes()
    times.saw_decoding(0.01)
    assert times.expected(100, decodes=True) == 0.0
    times.saw_prompts(100, 0.05, decodes=False)
    assert times.expected(0, decodes=True) == 0.0


def test_prompts_take_their_time_beside_that_of_rows_that_decode() -> None:
    times = StepTimes()
    for _ in range(60):
        times.saw_decoding(0.01)
        assert times.saw_prompts(100, 0.06, decodes=True) == pytest.approx(0.05)
    assert times.expected(200, decodes=False) == pytest.approx(0.1)
    assert times.expected(200, decodes=True) == pytest.approx(0.11)


def test_a_short_prompt_says_little_about_long_ones() -> None:
    times = StepTimes()
    times.saw_prompts(4000, 0.1, decodes=False)
    for _ in range(5):
        times.saw_prompts(10, 0.004, decodes=False)
    assert times.expected(4000, decodes=False) == pytest.approx(0.1, rel=0.3)


def test_a_plan_that_computes_prompts_is_expected_to_last() -> None:
    harness = Harness(max_step_tokens=64, depth=1)
    assert harness.core.expected_step_s == 0.0
    times = harness.core._results.times
    times.saw_prompts(10, 0.1, decodes=False)
    harness.core.submit(make_request("long", list(range(10, 50)), max_tokens=4), 0.0)
    harness.plan()
    assert harness.core.expected_step_s == pytest.approx(0.4)
    harness.core.requeue_all()
    assert harness.core.expected_step_s == 0.0

"""How many tokens of prompts a step takes beside rows that decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request

if TYPE_CHECKING:
    from common.steps import StepPlan


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(17 * position + salt) % 900 + 10 for position in range(length)]


def prefilled(plans: list[StepPlan]) -> list[int]:
    return [tokens for plan in plans if (tokens := sum(chunk.length for chunk in plan.prefills))]


def decoding(mixed: int | None, share: float = 0.5) -> tuple[Harness, int]:
    """Return a server whose one row decodes, and how many plans that took."""
    harness = Harness(
        max_step_tokens=64, mixed_step_tokens=mixed, mixed_step_share=share, max_rows=8, pages=256, depth=1
    )
    harness.core.submit(make_request("first", prompt_of(4), max_tokens=60), 0.0)
    harness.plan()
    harness.result()
    return harness, len(harness.plans)


def test_while_few_tokens_wait_a_step_takes_only_some_of_them() -> None:
    harness, before = decoding(mixed=16)
    harness.core.submit(make_request("second", prompt_of(40, 1)), 0.0)
    harness.run()
    # Half of 40, then the least, then what is left.
    assert prefilled(harness.plans[before:]) == [20, 16, 4]
    assert harness.outputs["second", 0] == expected_output(prompt_of(40, 1), 48, (STOP_ID,))
    assert harness.outputs["first", 0] == expected_output(prompt_of(4), 64, (STOP_ID,))


def test_many_tokens_are_taken_as_fast_as_steps_allow() -> None:
    harness, before = decoding(mixed=16)
    for index in range(5):
        harness.core.submit(make_request(f"r{index}", prompt_of(50, index)), 0.0)
    harness.plan()
    assert prefilled(harness.plans[before:]) == [63]


@pytest.mark.parametrize(("share", "steps"), [(0.0, [8] * 5), (0.25, [10, 8, 8, 8, 6]), (1.0, [40])])
def test_the_share_of_waiting_tokens_that_a_step_takes_at_least(share: float, steps: list[int]) -> None:
    harness, before = decoding(mixed=8, share=share)
    harness.core.submit(make_request("second", prompt_of(40, 1)), 0.0)
    harness.run()
    assert prefilled(harness.plans[before:]) == steps
    assert harness.outputs["second", 0] == expected_output(prompt_of(40, 1), 48, (STOP_ID,))


def test_a_prompt_is_not_chunked_if_no_row_decodes() -> None:
    harness = Harness(max_step_tokens=64, mixed_step_tokens=16, depth=1)
    harness.core.submit(make_request("alone", prompt_of(50)), 0.0)
    harness.plan()
    assert prefilled(harness.plans) == [50]


def test_without_mixed_step_tokens_a_step_prefills_as_much_as_fits() -> None:
    harness, before = decoding(mixed=None)
    harness.core.submit(make_request("second", prompt_of(40, 1)), 0.0)
    harness.plan()
    assert prefilled(harness.plans[before:]) == [40]

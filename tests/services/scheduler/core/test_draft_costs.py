"""Drafts over simulated time: what passes cost decides which are made, and wrong guesses cost little."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.types import StopConditions
from services.scheduler.core.costs import LoadCosts
from services.scheduler.core.drafts import Guess, Origin
from services.scheduler.core.speculation import OVERHEAD_S, PassCosts
from tests.fakes.simulated_worker import next_token
from tests.services.scheduler.core.harness import Harness, make_request, with_options

if TYPE_CHECKING:
    from common.types import RowSlot

WRONG = 3
MAX_ROWS = 256


@dataclass
class Device:
    """How long passes take, in seconds."""

    plain_s: float
    each_s: float
    """Of a token of a draft."""
    added_s: float = 0.0
    """Of a pass with drafts, which its result shows."""
    idle_s: float = 0.0
    """Before and after a pass with drafts, which its result does not show."""


class Guesses:
    """Guesses each token of a row's output with a given probability, and otherwise a wrong one."""

    def __init__(self, acceptance: float) -> None:
        self.acceptance = acceptance
        self.harness: Harness | None = None

    def guess(self, row: RowSlot, most: int) -> Guess | None:
        assert self.harness is not None
        ids = list(self.harness.worker.rows[row].ids)
        known = len(ids)
        while len(ids) < known + most:
            is_right = random.Random(len(ids) * 1000 + row).random() < self.acceptance
            ids.append(next_token(ids) if is_right else WRONG)
        return Guess(np.array(ids[known:], np.int32), Origin.CACHE)


def seconds_of(device: Device, rows: int, guesses: Guesses | None, drafted_in: list[int] | None = None) -> float:
    """Return the simulated seconds of one token of `rows` rows that decode together.

    With `drafted_in`, the second pass with drafts takes a second longer, and it gets the numbers of passes with drafts.
    """
    length = 300 if rows <= 8 else 150
    harness = Harness(
        pages=rows * 200, max_rows=MAX_ROWS, max_waiting=1000, max_step_tokens=1024, max_context=1024, compute_us=0,
        draft_tokens=0 if guesses is None else 8, prefill_tokens_per_s=1 / device.each_s,
        make_sources=lambda _rows, _cache: guesses or Guesses(0),
    )  # fmt: skip
    if guesses is not None:
        guesses.harness = harness
    for number in range(rows):
        request = make_request(f"r{number}", [number + 10, 9, 8])
        harness.core.submit(with_options(request, stop=StopConditions(max_tokens=length, ignore_eos=True)), 0.0)
    began: float | None = None
    while True:
        harness.plan()
        if not harness.results:
            break
        plan = next(plan for plan in harness.plans if plan.step_id == harness.results[0].step_id)
        drafted = sum(len(draft.token_ids) for draft in plan.drafts)
        if plan.drafts and drafted_in is not None:
            drafted_in.append(len(harness.plans))
            harness.now += len(drafted_in) == 2
        compute_s = device.plain_s + drafted * device.each_s + (device.added_s if plan.drafts else 0.0)
        harness.now += compute_s + (device.idle_s if plan.drafts else 0.0)
        harness.results[0] = replace(harness.results[0], compute_us=round(compute_s * 1e6))
        harness.result()
        if began is None and len(harness.outputs) == rows:
            began = harness.now
        if harness.finishes and began is not None:
            break
    assert began is not None
    tokens = sum(map(len, harness.outputs.values()))
    return (harness.now - began) * rows / tokens


# As an H200 has them with a model of 8B, and as a processor with a small one.
FAST, SLOW = Device(0.0065, 4e-5, 0.002, 0.001), Device(0.02, 0.002, 0.0, 0.0005)


DEVICES = [FAST, SLOW, replace(FAST, added_s=0.01), replace(FAST, idle_s=0.02)]


@pytest.mark.parametrize(("device", "rows", "acceptance"), [(FAST, 8, 0.0), (FAST, 64, 0.6), (SLOW, 1, 0.3)])
def test_wrong_guesses_cost_little(device: Device, rows: int, acceptance: float) -> None:
    assert seconds_of(device, rows, Guesses(acceptance)) < 1.05 * seconds_of(device, rows, None)


@pytest.mark.extended
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("device", DEVICES)
def test_no_share_of_right_guesses_costs_more_than_trials(device: Device, rows: int, acceptance: float) -> None:
    assert seconds_of(device, rows, Guesses(acceptance)) < 1.05 * seconds_of(device, rows, None)


@pytest.mark.parametrize(("device", "rows"), [(FAST, 1), (FAST, 8), (FAST, 64), (SLOW, 1)])
def test_right_guesses_pay(device: Device, rows: int) -> None:
    assert seconds_of(device, rows, Guesses(0.95)) < 0.85 * seconds_of(device, rows, None)


def test_the_time_of_passes_is_learnt_by_rows() -> None:
    costs = PassCosts(LoadCosts(1, prefill_tokens_per_s=1000.0))
    costs.saw(4, 0.020)
    assert costs.plain_s(4) == pytest.approx(0.020)
    assert costs.plain_s(5) == pytest.approx(0.021)
    for rows in [4, 8, 12, 16] * 30:
        costs.saw(rows, 0.018 + rows * 0.0005)
    assert costs.plain_s(10) == pytest.approx(0.023, rel=0.02)


def test_what_drafts_add_is_learnt_from_the_time_to_the_next_plan() -> None:
    costs = PassCosts(LoadCosts(1, prefill_tokens_per_s=10_000.0))
    costs.saw_drafted(4, 8, 0.030)
    costs.saw(4, 0.020)
    assert list(costs.added()) == pytest.approx([OVERHEAD_S, 0.0001])
    for drafted in [2, 8, 16] * 30:
        costs.saw_drafted(4, drafted, 0.020 + 0.004 + drafted * 0.0003)
    overhead_s, each_s = costs.added()
    assert overhead_s == pytest.approx(0.004, rel=0.1)
    assert each_s == pytest.approx(0.0003, rel=0.1)


def test_one_slow_pass_does_not_end_drafts_for_long() -> None:
    costs = PassCosts(LoadCosts(1, prefill_tokens_per_s=10_000.0))
    costs.saw(4, 0.020)
    costs.saw_drafted(4, 8, 5.0)
    surprised_s = costs.added()[0]
    assert OVERHEAD_S < surprised_s < 0.1
    for _ in range(2000):
        costs.fade()
    assert costs.added()[0] < 0.3 * surprised_s


def test_drafts_of_a_large_batch_are_made_again_after_a_slow_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    # So many rows that not even certain tokens pay, until the slow pass is forgotten.
    monkeypatch.setattr("services.scheduler.core.speculation.UNUSED_DECAY", 0.7)
    drafted_in: list[int] = []
    seconds_of(FAST, 32, Guesses(0.95), drafted_in)
    pause = max(after - before for before, after in pairwise(drafted_in))
    assert 10 < pause < 80
    assert len(drafted_in) > 6

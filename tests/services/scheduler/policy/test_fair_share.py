from __future__ import annotations

import random
from itertools import count
from typing import TYPE_CHECKING

import pytest

from common.types import Subject
from services.scheduler.core.shares import ShareConfig, VirtualCounters
from services.scheduler.policy.fair_share import FairShare
from tests.services.scheduler.policy.waiting import handles, waiting_sequence

if TYPE_CHECKING:
    from services.scheduler.core.sequence import Sequence


def counters_of(**tokens: int) -> VirtualCounters:
    counters = VirtualCounters(ShareConfig())
    for user in tokens:
        counters.enter(Subject("tenant", user))
    for user, charged in tokens.items():
        counters.charge((Subject("tenant", user)), prompt_tokens=charged)
    return counters


def test_the_least_served_goes_first_and_each_principal_s_own_by_arrival() -> None:
    waiting = [waiting_sequence(1, user="ann"), waiting_sequence(2, user="ann"), waiting_sequence(3, user="bob")]
    policy = FairShare(counters_of(ann=100, bob=50), slack_tokens=0)
    assert handles(policy.order(waiting, lambda _: 0)) == [3, 1, 2]


def test_a_charge_between_two_choices_counts_for_the_second() -> None:
    counters = counters_of(ann=0, bob=10)
    waiting = [waiting_sequence(1, user="ann"), waiting_sequence(2, user="ann"), waiting_sequence(3, user="bob")]
    order = FairShare(counters, slack_tokens=0).order(waiting, lambda _: 0)
    assert next(order).handle == 1
    counters.charge((Subject("tenant", "ann")), prompt_tokens=20)
    assert handles(order) == [3, 2]


def test_within_the_slack_the_longest_prefix_goes_first() -> None:
    waiting = [waiting_sequence(1, user="ann"), waiting_sequence(2, user="bob"), waiting_sequence(3, user="eve")]
    policy = FairShare(counters_of(ann=0, bob=90, eve=200), slack_tokens=100)
    match = {1: 16, 2: 64, 3: 999}
    assert handles(policy.order(waiting, lambda sequence: match[sequence.handle])) == [2, 1, 3]


def test_no_more_than_the_window_is_matched_at_a_time() -> None:
    matched: list[int] = []

    def match(sequence: Sequence) -> int:
        matched.append(sequence.handle)
        return 0

    counters = counters_of(**{f"user{number}": 0 for number in range(20)})
    waiting = [waiting_sequence(number, user=f"user{number % 20}") for number in range(200)]
    next(FairShare(counters, window=16).order(waiting, match))
    assert len(matched) == 16
    assert len(set(matched)) == 16


def test_everybody_is_offered_a_row_exactly_once() -> None:
    counters = counters_of(ann=5, bob=50_000, eve=3_000)
    waiting = [waiting_sequence(number, user=("ann", "bob", "eve")[number % 3]) for number in range(30)]
    order = FairShare(counters).order(waiting, lambda sequence: sequence.handle % 7)
    assert sorted(handles(order)) == list(range(30))
    assert handles(FairShare(counters).order([], lambda _: 0)) == []


@pytest.mark.parametrize("slack", [0, 64, 512])
def test_counters_of_those_that_wait_never_lie_further_apart_than_the_bound(slack: int) -> None:
    longest, weight, running_tokens = 100, 2, 30
    chance = random.Random(slack)
    counters = VirtualCounters(ShareConfig(output_weight=weight))
    policy = FairShare(counters, slack)
    numbers = count()
    waiting: list[Sequence] = []
    users = [f"user{number}" for number in range(6)]
    prompts: dict[int, int] = {}

    def arrive(user: str) -> None:
        handle = next(numbers)
        waiting.append(waiting_sequence(handle, user=user))
        prompts[handle] = chance.randint(1, longest)
        counters.enter(Subject("tenant", user))

    for user in users:
        arrive(user)
    spread = 0.0
    for _ in range(3000):
        chosen = next(policy.order(waiting, lambda sequence: sequence.handle * 31 % 17))
        view = chosen.request.view
        counters.charge(view.subject, prompt_tokens=prompts[chosen.handle])
        # It goes on waiting with another request, as all do here.
        arrive(view.subject.name)
        waiting.remove(chosen)
        counters.exit(view.subject)
        # One of the rows that run generates; what all of them can add before they end is within the bound.
        if chance.random() < 0.3:
            counters.charge(view.subject, output_tokens=chance.randint(1, running_tokens))
        values = [counters.counter(("tenant", user)) for user in users]
        spread = max(spread, max(values) - min(values))
    assert spread <= slack + longest + weight * running_tokens
    assert spread > slack / 2

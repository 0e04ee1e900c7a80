from __future__ import annotations

import random
from collections import Counter
from itertools import count
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.limits import Limits, SubjectLimits, TenantLimits
from common.types import Subject
from services.scheduler.core.shares import ShareConfig, VirtualCounters
from services.scheduler.policy.policies import FairShare
from tests.examples import examples
from tests.services.scheduler.policy.waiting import handles, line_up, waiting_sequence

if TYPE_CHECKING:
    from services.scheduler.core.sequence import Sequence


WEIGHTS = st.sampled_from([0.5, 1.0, 2.0, 4.0])


def counters_of(**tokens: int) -> VirtualCounters:
    counters = VirtualCounters(ShareConfig())
    for user in tokens:
        counters.enter(Subject("tenant", user))
    for user, charged in tokens.items():
        counters.charge((Subject("tenant", user)), prompt_tokens=charged)
    return counters


def test_the_least_served_subject_goes_first_and_its_own_requests_by_arrival() -> None:
    waiting = [waiting_sequence(1, user="ann"), waiting_sequence(2, user="ann"), waiting_sequence(3, user="bob")]
    policy = FairShare(counters_of(ann=100, bob=50), slack_tokens=0)
    assert handles(policy.order(line_up(waiting), lambda _: 0)) == [3, 1, 2]


def test_a_charge_between_two_choices_counts_for_the_second() -> None:
    counters = counters_of(ann=0, bob=10)
    waiting = [waiting_sequence(1, user="ann"), waiting_sequence(2, user="ann"), waiting_sequence(3, user="bob")]
    order = FairShare(counters, slack_tokens=0).order(line_up(waiting), lambda _: 0)
    assert next(order).handle == 1
    counters.charge((Subject("tenant", "ann")), prompt_tokens=20)
    assert handles(order) == [3, 2]


def test_within_the_slack_the_longest_prefix_goes_first() -> None:
    waiting = [waiting_sequence(1, user="ann"), waiting_sequence(2, user="bob"), waiting_sequence(3, user="eve")]
    policy = FairShare(counters_of(ann=0, bob=90, eve=200), slack_tokens=100)
    match = {1: 16, 2: 64, 3: 999}
    assert handles(policy.order(line_up(waiting), lambda sequence: match[sequence.handle])) == [2, 1, 3]


def test_one_subject_alone_is_ordered_by_arrival_and_among_others_by_prefix() -> None:
    own = [waiting_sequence(number, user="ann") for number in range(3)]
    policy = FairShare(counters_of(ann=0, bob=0), slack_tokens=100)

    def match(sequence: Sequence) -> int:
        return 16 * sequence.handle

    assert handles(policy.order(line_up(own), match)) == [0, 1, 2]
    assert handles(policy.order(line_up([*own, waiting_sequence(3, user="bob")]), match)) == [3, 2, 1, 0]


def test_no_more_than_the_window_is_matched_at_a_time() -> None:
    matched: list[int] = []

    def match(sequence: Sequence) -> int:
        matched.append(sequence.handle)
        return 0

    counters = counters_of(**{f"user{number}": 0 for number in range(20)})
    waiting = [waiting_sequence(number, user=f"user{number % 20}") for number in range(200)]
    next(FairShare(counters, window=16).order(line_up(waiting), match))
    assert len(matched) == 16
    assert len(set(matched)) == 16


def test_every_sequence_is_offered_a_row_exactly_once() -> None:
    counters = counters_of(ann=5, bob=50_000, eve=3_000)
    waiting = [waiting_sequence(number, user=("ann", "bob", "eve")[number % 3]) for number in range(30)]
    order = FairShare(counters).order(line_up(waiting), lambda sequence: sequence.handle % 7)
    assert sorted(handles(order)) == list(range(30))
    assert handles(FairShare(counters).order(line_up([]), lambda _: 0)) == []


@pytest.mark.parametrize("slack", [0, 64, 512])
def test_counters_of_waiting_subjects_never_differ_by_more_than_the_bound(slack: int) -> None:
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
        chosen = next(policy.order(line_up(waiting), lambda sequence: sequence.handle * 31 % 17))
        view = chosen.request.view
        counters.charge(view.subject, prompt_tokens=prompts[chosen.handle])
        # It goes on waiting with another request, as all do here.
        arrive(view.subject.name)
        waiting.remove(chosen)
        counters.exit(view.subject)
        # One of the rows that run generates; what all of them can add before they end is within the bound.
        if chance.random() < 0.3:
            counters.charge(view.subject, output_tokens=chance.randint(1, running_tokens))
        values = [counters.of_subject(Subject("tenant", user)) for user in users]
        spread = max(spread, max(values) - min(values))
    assert spread <= slack + longest + weight * running_tokens
    assert spread > slack / 2


def test_tenants_come_first_and_then_their_subjects() -> None:
    counters = VirtualCounters(ShareConfig())
    subjects = [Subject("large", f"user{number}") for number in range(3)] + [Subject("small", "ann")]
    for subject in subjects:
        counters.enter(subject)
    for subject, tokens in zip(subjects, (10, 20, 30, 50), strict=True):
        counters.charge(subject, prompt_tokens=tokens)
    waiting = [waiting_sequence(number, user=each.name, tenant=each.tenant) for number, each in enumerate(subjects)]
    # Its tenant has had 50, the other one 60 by its three subjects, each of which has had less.
    assert handles(FairShare(counters, slack_tokens=0).order(line_up(waiting), lambda _: 0)) == [3, 0, 1, 2]


def test_the_slack_applies_on_each_level() -> None:
    counters = VirtualCounters(ShareConfig())
    subjects = [Subject("a", "x"), Subject("a", "y"), Subject("b", "z")]
    for subject in subjects:
        counters.enter(subject)
    for subject, tokens in zip(subjects, (0, 150, 90), strict=True):
        counters.charge(subject, prompt_tokens=tokens)
    waiting = [waiting_sequence(number, user=each.name, tenant=each.tenant) for number, each in enumerate(subjects)]
    match = {0: 16, 1: 64, 2: 32}

    def first() -> int:
        order = FairShare(counters, slack_tokens=100).order(line_up(waiting), lambda sequence: match[sequence.handle])
        return next(iter(order)).handle

    # Of tenant a, which is near enough to b, the subject y is further above x than the slack.
    assert first() == 2
    counters.charge(subjects[0], prompt_tokens=60)
    # Now y is near enough to x, but their tenant not to b,
    assert first() == 2
    counters.charge(subjects[2], prompt_tokens=30)
    # and now both are.
    assert first() == 1


@examples(30)
@given(
    tenants=st.lists(
        st.tuples(
            st.sampled_from([0.5, 1.0, 2.0, 3.0]), st.lists(st.sampled_from([0.5, 1.0, 4.0]), min_size=1, max_size=4)
        ),
        min_size=1,
        max_size=4,
    ),
    slack=st.sampled_from([0, 50]),
    seed=st.integers(0, 1000),
)
def test_random_tenants_and_subjects_get_their_weights_within_the_bound(
    tenants: list[tuple[float, list[float]]], slack: int, seed: int
) -> None:
    """All keep waiting; service by weight then differs by at most the bound, among tenants and within each."""
    longest, chance = 40, random.Random(seed)
    limits = Limits(
        tenants={
            f"t{number}": TenantLimits(
                weight=weight, subjects={f"s{index}": SubjectLimits(weight=each) for index, each in enumerate(weights)}
            )
            for number, (weight, weights) in enumerate(tenants)
        }
    )
    counters = VirtualCounters(ShareConfig())
    counters.adopt(limits)
    subjects = [
        Subject(f"t{n}", f"s{index}") for n, (_, weights) in enumerate(tenants) for index in range(len(weights))
    ]
    numbers = count()
    waiting: list[Sequence] = []
    for subject in subjects:
        counters.enter(subject)
        waiting.append(waiting_sequence(next(numbers), user=subject.name, tenant=subject.tenant))
    policy, served = FairShare(counters, slack), dict.fromkeys(subjects, 0)
    for _ in range(400):
        chosen = next(iter(policy.order(line_up(waiting), lambda sequence: sequence.handle * 31 % 17)))
        subject, tokens = chosen.request.view.subject, chance.randint(1, longest)
        counters.charge(subject, prompt_tokens=tokens)
        served[subject] += tokens
        waiting.remove(chosen)
        waiting.append(waiting_sequence(next(numbers), user=subject.name, tenant=subject.tenant))
    for number, (_, weights) in enumerate(tenants):
        within = [served[Subject(f"t{number}", f"s{index}")] / each for index, each in enumerate(weights)]
        assert max(within) - min(within) <= 2 * (slack + longest / min(weights))
    shares = [
        sum(served[Subject(f"t{number}", f"s{index}")] for index in range(len(weights))) / weight
        for number, (weight, weights) in enumerate(tenants)
    ]
    assert max(shares) - min(shares) <= 2 * (slack + longest / min(weight for weight, _ in tenants))


def test_an_anonymous_flood_gets_its_share_of_turns_and_no_more() -> None:
    """Issue 12, 1.4: unnamed requests are one subject, whatever salt they have, and it got 1,999 of 2,000 turns."""
    counters = VirtualCounters(ShareConfig())
    policy, numbers = FairShare(counters, 512), count()
    waiting: list[Sequence] = []

    def arrive(user: str) -> None:
        sequence = waiting_sequence(next(numbers), user=user)
        waiting.append(sequence)
        counters.enter(sequence.request.view.subject)

    for _ in range(500):
        arrive("anonymous")
    arrive("user/ann")
    turns: Counter[str] = Counter()
    for _ in range(2_000):
        chosen = next(iter(policy.order(line_up(waiting), lambda sequence: sequence.handle % 7)))
        subject = chosen.request.view.subject
        turns[subject.name] += 1
        arrive(subject.name)
        waiting.remove(chosen)
        counters.exit(subject)
        counters.charge(subject, prompt_tokens=100)
    assert turns["user/ann"] == pytest.approx(1_000, abs=12)

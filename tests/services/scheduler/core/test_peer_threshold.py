"""From which length on prompts are left to another group, by the measured time that this takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.types import RequestId
from services.scheduler.cache.tiers.config import HostConfig, WritePolicy
from services.scheduler.core.costs import (
    FIRST_PEER_TOKENS,
    LEAST_PEER_TOKENS,
    MOST_PEER_TOKENS,
    PEER_MEASUREMENTS,
    LoadCosts,
)
from services.scheduler.core.load_back import PEER_MEASURED_MOST_S, PEER_MEASURED_ONE_IN, PEER_MEASURED_S
from tests.services.scheduler.core.harness import Harness, make_request

# An 8B model on an H200.
TOKENS_PER_S = 43_000
# Prompts that are later by so much if another group computes them, over a fast link and over a slow one.
FAST_S, SLOW_S = 0.006, 0.05
FAST_TOKENS, SLOW_TOKENS = round(TOKENS_PER_S * FAST_S), round(TOKENS_PER_S * SLOW_S)

Seconds = st.floats(min_value=-1.0, max_value=100.0)
Delays = st.lists(Seconds, min_size=1, max_size=20)
Rates = st.floats(min_value=1.0, max_value=1e7)


def known_costs(*delays: float, rate: float = TOKENS_PER_S) -> LoadCosts:
    costs = LoadCosts(1, rate)
    for delay in delays:
        costs.saw_peer_start(delay)
    return costs


def prompt_of(tokens: int) -> list[int]:
    return [(13 * position) % 900 + 10 for position in range(tokens)]


def test_until_both_costs_are_measured_a_fixed_number_holds() -> None:
    assert LoadCosts(1).least_peer_tokens() == FIRST_PEER_TOKENS
    assert known_costs().least_peer_tokens() == FIRST_PEER_TOKENS
    assert known_costs(SLOW_S, rate=0.0).least_peer_tokens() == FIRST_PEER_TOKENS


@given(Delays, Rates)
def test_the_number_has_bounds_for_any_measurements(delays: list[float], rate: float) -> None:
    assert LEAST_PEER_TOKENS <= known_costs(*delays, rate=rate).least_peer_tokens() <= MOST_PEER_TOKENS


@given(Delays, Rates, st.floats(min_value=1.0, max_value=1000.0))
def test_a_slower_link_never_lowers_it_and_neither_does_a_faster_computer(
    delays: list[float], rate: float, factor: float
) -> None:
    before = known_costs(*delays, rate=rate).least_peer_tokens()
    assert known_costs(*(delay * factor for delay in delays), rate=rate).least_peer_tokens() >= before
    assert known_costs(*delays, rate=rate * factor).least_peer_tokens() >= before


def test_it_rises_with_a_slow_link_and_falls_with_a_fast_one() -> None:
    costs = known_costs(FAST_S)
    assert costs.least_peer_tokens() == pytest.approx(FAST_TOKENS, abs=1)
    for _ in range(PEER_MEASUREMENTS - 1):
        costs.saw_peer_start(SLOW_S)
        assert costs.least_peer_tokens() == pytest.approx(FAST_TOKENS, abs=1), "a queue says nothing of the link"
    costs.saw_peer_start(SLOW_S)
    assert costs.least_peer_tokens() == pytest.approx(SLOW_TOKENS, abs=1)
    costs.saw_peer_start(FAST_S)
    assert costs.least_peer_tokens() == pytest.approx(FAST_TOKENS, abs=1)


class Prompts:
    """Prompts of `tokens` tokens that come one after the other, and are later by `delay_s` if they are fetched."""

    def __init__(self, tokens: int, min_tokens: int | None = None, interval_s: float = 0.25) -> None:
        self.harness = Harness(
            pages=4000, max_context=4000, max_waiting=10_000,
            host=HostConfig(pages=4000, policy=WritePolicy.WRITE_THROUGH),
        )  # fmt: skip
        assert self.harness.core.memory.loads is not None
        self.loads = self.harness.core.memory.loads
        self.loads.costs = known_costs()
        self.tokens = tokens
        self._min_tokens = min_tokens
        self._interval_s = interval_s
        self._number = 0

    def fetched(self, prompts: int, delay_s: float) -> list[int]:
        """Let so many prompts come; return which of them another group computed."""
        fetched = []
        for number in range(prompts):
            name, self._number = RequestId(f"{self._number}"), self._number + 1
            self.harness.now += self._interval_s
            self.harness.core.submit(make_request(name, prompt_of(self.tokens)), self.harness.now)
            sequence = self.harness.core.leader_of(name)
            assert sequence is not None
            fetch = self.loads.await_peer(sequence, self._min_tokens)
            if fetch is not None:
                fetched.append(number)
                self.loads.host.peers.give_up(fetch)
                self.loads.costs.saw_peer_start(delay_s)
            self.harness.core.abort(name)
        return fetched


def test_over_a_slow_link_only_longer_prompts_are_fetched_but_for_one_in_eight() -> None:
    prompts = Prompts(FIRST_PEER_TOKENS + 8)
    assert prompts.fetched(1, SLOW_S) == [0]
    assert len(prompts.fetched(80, SLOW_S)) == 80 // PEER_MEASURED_ONE_IN
    prompts.tokens = SLOW_TOKENS + 8
    assert len(prompts.fetched(80, SLOW_S)) == 80


def test_over_a_fast_link_shorter_prompts_are_fetched_too() -> None:
    prompts = Prompts(FAST_TOKENS + 8)
    assert len(prompts.fetched(2 * PEER_MEASURED_ONE_IN, FAST_S)) > PEER_MEASURED_ONE_IN, "once one was measured"
    assert len(prompts.fetched(80, FAST_S)) == 80
    prompts.tokens = LEAST_PEER_TOKENS - 1
    assert not prompts.fetched(80, FAST_S), "not even to measure"


def test_a_link_that_becomes_fast_is_noticed_although_no_prompt_is_long_enough() -> None:
    prompts = Prompts(FIRST_PEER_TOKENS + 8)
    prompts.fetched(40, SLOW_S)
    assert len(prompts.fetched(80, FAST_S)) > 80 - PEER_MEASURED_ONE_IN


def test_rare_prompts_over_a_link_that_stays_slow_are_fetched_ever_less_often() -> None:
    prompts = Prompts(FIRST_PEER_TOKENS + 8, interval_s=PEER_MEASURED_S)
    assert prompts.fetched(16, SLOW_S) == [0, 1, 3, 7, 15]
    prompts = Prompts(FIRST_PEER_TOKENS + 8, interval_s=PEER_MEASURED_MOST_S)
    assert len(prompts.fetched(8, SLOW_S)) == 8, "a measurement so old says nothing"


@pytest.mark.parametrize(("tokens", "expected"), [(63, 0), (72, 40)])
def test_a_configured_number_holds_for_any_measurement(tokens: int, expected: int) -> None:
    assert len(Prompts(tokens, min_tokens=64).fetched(40, SLOW_S)) == expected


def test_what_is_cached_does_not_count() -> None:
    prompts = Prompts(FIRST_PEER_TOKENS + 8)
    prompts.harness.core.submit(make_request("cached", prompt_of(64), max_tokens=1), 0.0)
    prompts.harness.run()
    assert prompts.fetched(PEER_MEASURED_ONE_IN, SLOW_S) == [PEER_MEASURED_ONE_IN - 1], "to measure"
    prompts.tokens = SLOW_TOKENS + 60
    assert not prompts.fetched(1, SLOW_S)
    prompts.tokens = SLOW_TOKENS + 72
    assert prompts.fetched(1, SLOW_S)

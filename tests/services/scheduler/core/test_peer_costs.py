"""Which prompts are left to another group, by the measured rate of its pages: before, in and after an overload."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from common.types import RequestId
from services.scheduler.cache.tiers.config import HostConfig, WritePolicy
from services.scheduler.core.costs import PEER_MEASUREMENTS, PEER_READS_AT_ONCE, LoadCosts
from services.scheduler.core.load_back import PEER_MEASURED_MOST_S, PEER_MEASURED_ONE_IN, PEER_MEASURED_S
from tests.services.scheduler.core.harness import Harness, make_request

if TYPE_CHECKING:
    from collections.abc import Callable

# An 8B model on an H200: 43,000 tokens/s, and pages of 128 KiB a token over a link of 25 GB/s.
TOKEN_BYTES, PREFILL_TOKENS_PER_S, LINK_BYTES_PER_S = 131_072, 43_000, 25e9
# Slower reads than so many times the link's do not pay.
BREAK_EVEN = LINK_BYTES_PER_S / TOKEN_BYTES / PREFILL_TOKENS_PER_S
TOKENS = 8192
PROMPT = list(range(100, 124))


def known_costs() -> LoadCosts:
    costs = LoadCosts(TOKEN_BYTES)
    costs.saw_prefill(TOKENS, TOKENS / PREFILL_TOKENS_PER_S)
    return costs


def read(costs: LoadCosts, slowness: float = 1.0, *, beside_others: bool = False) -> None:
    """Record a read that takes `slowness` times as long as the link alone."""
    costs.saw_peer_read(TOKENS, slowness * TOKENS * TOKEN_BYTES / LINK_BYTES_PER_S, beside_others=beside_others)


class Prompts:
    """Prompts that come one after the other, each of which another group computes if that is expected to pay."""

    def __init__(self, interval_s: float) -> None:
        self.harness = Harness(
            pages=4000, max_waiting=10_000, host=HostConfig(pages=4000, policy=WritePolicy.WRITE_THROUGH)
        )
        assert self.harness.core.memory.loads is not None
        self.loads = self.harness.core.memory.loads
        self.loads.costs = known_costs()
        self._interval_s = interval_s
        self._number = 0

    def computed_here(self, prompts: int, slowness: Callable[[], float]) -> int:
        """Let so many prompts come, whose reads are slow as said; return how many are computed by this group."""
        here = 0
        for _ in range(prompts):
            name, self._number = f"{self._number}", self._number + 1
            self.harness.now += self._interval_s
            self.harness.core.submit(make_request(name, PROMPT, user=name), self.harness.now)
            sequence = self.harness.core.leader_of(RequestId(name))
            assert sequence is not None
            fetch = self.loads.await_peer(sequence, 4)
            if fetch is None:
                here += 1
            else:
                self.loads.host.peers.give_up(fetch)
                read(self.loads.costs, slowness())
            self.harness.core.abort(RequestId(name))
        return here


@pytest.mark.parametrize("seed", range(5))
def test_after_an_overload_of_both_sides_prompts_are_left_to_the_other_group_again(seed: int) -> None:
    prompts, random = Prompts(0.25), Random(seed)
    assert prompts.computed_here(200, lambda: random.uniform(1, 2)) == 0
    # Both sides compute other things meanwhile: a read takes up to 20 times as long.
    overloaded = prompts.computed_here(200, lambda: random.uniform(1, 20))
    assert 0 < overloaded < 200
    after = prompts.computed_here(200, lambda: random.uniform(1, 2))
    assert after < PEER_MEASURED_ONE_IN


def test_a_few_prompts_after_an_overload_end_it_as_well() -> None:
    prompts = Prompts(0.25)
    prompts.computed_here(100, lambda: 20.0)
    assert not prompts.loads.costs.peer_pays()
    rare = Prompts(PEER_MEASURED_S)
    rare.loads.costs = prompts.loads.costs
    assert rare.computed_here(10, lambda: 1.0) == 0


def test_over_a_link_that_stays_slow_prompts_are_computed_here_but_for_one_in_eight() -> None:
    prompts = Prompts(0.25)
    here = prompts.computed_here(800, lambda: 20.0)
    assert here >= 800 - 800 // PEER_MEASURED_ONE_IN - 2 * PEER_MEASUREMENTS


def test_rare_prompts_over_a_link_that_stays_slow_are_left_to_it_ever_less_often() -> None:
    prompts = Prompts(PEER_MEASURED_S)
    asked_at = [number for number in range(40) if not prompts.computed_here(1, lambda: 20.0)]
    assert asked_at == [0, 1, 3, 7, 15, 23, 31, 39]
    prompts = Prompts(PEER_MEASURED_MOST_S)
    assert prompts.computed_here(20, lambda: 20.0) == 0, "a measurement so old says nothing"


def test_a_link_is_known_by_the_best_of_its_latest_measurements() -> None:
    costs = known_costs()
    assert costs.peer_pays(), "not measured"
    read(costs, 2 * BREAK_EVEN)
    assert not costs.peer_pays(), "the only one"
    read(costs)
    for _ in range(PEER_MEASUREMENTS - 1):
        assert costs.peer_pays()
        read(costs, 10 * BREAK_EVEN)
    assert costs.peer_pays()
    read(costs, 10 * BREAK_EVEN)
    assert not costs.peer_pays(), "all of the latest were slow"
    read(costs)
    assert costs.peer_pays(), "one without delays is enough"


def test_reads_beside_each_other_are_one_measurement() -> None:
    """The last of them has had most of its time while the link was busy with others."""
    costs = known_costs()
    read(costs, 4 * BREAK_EVEN, beside_others=True)
    assert costs.peer_pays(), "not measured until all have ended"
    read(costs, 0.01)
    assert not costs.peer_pays(), "twice as long as computing takes, on average"
    busy = known_costs()
    for _ in range(PEER_READS_AT_ONCE):
        read(busy, 2 * BREAK_EVEN, beside_others=True)
    assert not busy.peer_pays(), "a link that is never free is measured, too"


def test_a_read_that_failed_measures_nothing() -> None:
    costs = known_costs()
    read(costs)
    for _ in range(2 * PEER_MEASUREMENTS):
        costs.saw_peer_read(0, 2.0)
    assert costs.peer_pays()
    costs.saw_peer_read(0, 2.0, beside_others=True)
    read(costs)
    assert costs.peer_pays()

"""The simulated server: what it finds in each mode follows from who has asked what before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deploy.evaluation.bench.arrivals import Arrival, by_time
from deploy.evaluation.bench.cache.simulation import CacheSimulation, Machine
from deploy.evaluation.bench.cache.tally import CacheFigures, Rules, Tally, jain_index
from deploy.evaluation.bench.records import BenchRequest, Segment, WorkloadSession
from deploy.evaluation.bench.workloads.ideal import IdealCache
from services.scheduler.cache.config import CacheConfig
from services.scheduler.cache.debug.audit import audit
from services.scheduler.cache.debug.invariants import violations
from services.scheduler.cache.radix import RadixCache

if TYPE_CHECKING:
    from services.scheduler.cache.factory import CacheName

SYSTEM = Segment("system/0", 160, role="system")
MACHINE = Machine(device_pages=400, epoch_seconds=10.0)


def request(user: str, *segments: Segment, answer: int = 16) -> BenchRequest:
    name = "-".join([user, *(segment.key for segment in segments)])
    return BenchRequest(segments, answer, user=user, answer=Segment(f"answer/{name}", answer, role="assistant"))


def played(
    mode: CacheName, arrivals: list[Arrival], machine: Machine = MACHINE
) -> tuple[CacheFigures, CacheSimulation]:
    rules = Rules(by_evidence=mode in ("shared", "user_aware"), by_pins=mode == "isolated_pinned")
    tally = Tally(rules, IdealCache(keeps_answers=True))
    simulation = CacheSimulation(mode, machine, CacheConfig(headroom_share=0), tally)
    simulation.run(arrivals)
    return tally.figures(simulation), simulation


def apps_first_users() -> list[Arrival]:
    """Five users ask one app, 30 s apart."""
    return [Arrival(30.0 * i, request(f"u{i}", SYSTEM, Segment(f"q{i}", 16))) for i in range(5)]


@pytest.mark.parametrize(
    ("mode", "hits"), [("shared", 4 * 160), ("isolated", 0), ("isolated_pinned", 3 * 160), ("user_aware", 2 * 160)]
)
def test_each_mode_hits_exactly_the_tokens_that_its_rules_allow(mode: CacheName, hits: int) -> None:
    # user_aware: three users compute the prompt, the others find it. A pin that is made when the prompt is first seen
    # becomes effective one epoch after, so that it is the second user's prompt which is kept.
    figures, _ = played(mode, apps_first_users())
    assert figures.hit_tokens == hits
    assert figures.input_tokens == 5 * 176
    if mode != "shared":
        assert figures.crossing_tokens == 0


def test_hits_without_evidence_are_counted() -> None:
    figures, _ = played("shared", apps_first_users())
    # The second and the third user find what only one and two others have asked.
    assert figures.crossing_tokens == 2 * 160
    assert figures.ideal_shared == 4 * 160


def test_time_to_promotion_is_counted_from_the_first_request() -> None:
    figures, _ = played("user_aware", apps_first_users())
    # The third user asks after 60 s; the fourth request is the first thing that happens after the boundary at 70 s.
    assert figures.prompts_seen == 1
    assert len(figures.promoted_after_s) == 1
    assert 60 <= figures.promoted_after_s[0] <= 90
    assert (figures.demotions, figures.quarantines) == (0, 0)


def test_a_users_next_turn_finds_the_answer_before_it() -> None:
    first = request("ann", SYSTEM, Segment("q", 16), answer=33)
    assert first.answer is not None
    second = request("ann", SYSTEM, Segment("q", 16), first.answer, Segment("q2", 16))
    figures, _ = played("isolated", [Arrival(0, first), Arrival(100, second)])
    # Of the last token of an answer no KV is computed.
    assert figures.hit_tokens == 160 + 16 + 32
    assert figures.ideal_own == figures.hit_tokens


@pytest.mark.parametrize("mode", ["shared", "isolated", "user_aware"])
def test_no_page_is_lost_when_memory_is_short(mode: CacheName) -> None:
    arrivals = [
        Arrival(i * 0.5, request(f"u{i % 7}", SYSTEM, Segment(f"d{i % 13}", 320), Segment(f"q{i}", 20)))
        for i in range(300)
    ]
    figures, simulation = played(mode, arrivals, Machine(device_pages=96, token_s=0.2))
    assert figures.requests == 300
    assert figures.hit_tokens < figures.ideal_shared
    assert isinstance(simulation.cache, RadixCache)
    assert violations(simulation.cache) == []
    assert audit(simulation.allocator, simulation.cache, {}).is_clean


def test_a_request_that_can_never_fit_is_refused_and_the_others_run() -> None:
    small = Machine(device_pages=20)
    arrivals = [Arrival(0, request("ann", Segment("d", 10_000))), Arrival(1, request("ann", SYSTEM))]
    figures, _ = played("user_aware", arrivals, small)
    assert (figures.refused, figures.requests) == (1, 1)


def test_turns_come_when_the_answer_before_is_written_and_thought_about() -> None:
    turns = [BenchRequest((Segment("a", 4),), 10), BenchRequest((Segment("b", 4),), 5, delay_s=3.0)]
    sessions = [WorkloadSession(tuple(turns), arrival_s=1.0), WorkloadSession((turns[0],), arrival_s=2.0)]
    times = [arrival.time_s for arrival in by_time(sessions, token_s=0.1)]
    assert times == [1.0, 2.0, 5.0]


def test_jain_index_is_one_for_equals_and_one_nth_for_a_single_winner() -> None:
    assert jain_index([0.5, 0.5, 0.5]) == pytest.approx(1.0)
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([0.0, 0.0]) == 1.0

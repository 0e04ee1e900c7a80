from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise
from statistics import mean, median
from typing import TYPE_CHECKING

import numpy as np
import pytest

from deploy.evaluation.bench.workloads.ideal import IdealCache, ideal_rates
from deploy.evaluation.bench.workloads.m1 import M1Shape, m1_sessions, m1_stream

if TYPE_CHECKING:
    from deploy.evaluation.bench.records import WorkloadSession

SHAPE = M1Shape(users=500, apps=20)


@pytest.fixture(scope="module")
def sessions() -> list[WorkloadSession]:
    return list(islice(m1_stream(SHAPE), 40_000))


def test_equal_seeds_are_equal_workloads() -> None:
    assert m1_sessions(SHAPE, 300, seed=3) == m1_sessions(SHAPE, 300, seed=3)
    assert m1_sessions(SHAPE, 300, seed=3) != m1_sessions(SHAPE, 300, seed=4)


def test_m1_has_the_requested_number_of_requests_in_order_of_arrival() -> None:
    sessions = m1_sessions(SHAPE, 1000, rate=2.0)
    assert sum(len(session.requests) for session in sessions) == 1000
    arrivals = [session.arrival_s or 0.0 for session in sessions]
    assert arrivals == sorted(arrivals)
    assert 1000 / arrivals[-1] == pytest.approx(2.0, rel=0.2)


def test_lengths_turns_and_pauses_are_distributed_as_specified(sessions: list[WorkloadSession]) -> None:
    requests = [request for session in sessions for request in session.requests]
    assert mean(len(session.requests) for session in sessions) == pytest.approx(1.7, abs=0.05)
    assert median(request.segments[-1].tokens for request in requests) == pytest.approx(120, rel=0.05)
    assert median(request.output_tokens for request in requests) == pytest.approx(250, rel=0.05)
    assert max(request.output_tokens for request in requests) == 1200
    pauses = [request.delay_s for session in sessions for request in session.requests[1:]]
    assert median(pauses) == pytest.approx(120, rel=0.05)
    assert all(session.requests[0].delay_s == 0 for session in sessions)
    systems = {s.key: s.tokens for r in requests for s in r.segments if s.key.startswith("system/")}
    assert len(systems) == 20
    assert 1000 < median(systems.values()) < 2200


def test_the_second_user_asks_half_as_often_as_the_first(sessions: list[WorkloadSession]) -> None:
    users = Counter(session.requests[0].user for session in sessions)
    (_, first), (_, second), (_, third) = users.most_common(3)
    assert first / second == pytest.approx(2, rel=0.15)
    assert first / third == pytest.approx(3, rel=0.15)


def test_every_user_has_one_to_three_apps(sessions: list[WorkloadSession]) -> None:
    apps: dict[str | None, set[str]] = {}
    for session in sessions:
        key = session.requests[0].segments[0].key
        if key.startswith("system/"):
            apps.setdefault(session.requests[0].user, set()).add(key)
    assert {len(each) for each in apps.values()} == {1, 2, 3}


def test_a_turn_contains_the_whole_conversation_before_it() -> None:
    sessions = (session for session in m1_stream(SHAPE) if len(session.requests) >= 3)
    for earlier, later in pairwise(next(sessions).requests):
        assert later.segments[:-2] == earlier.segments
        assert later.segments[-2] == earlier.answer


def test_documents_are_private_and_asked_again(sessions: list[WorkloadSession]) -> None:
    asked: dict[str, set[str | None]] = {}
    private = again = 0
    for session in sessions:
        document = next((s for s in session.requests[0].segments if s.key.startswith("document/")), None)
        if document is not None:
            private += 1
            again += document.key in asked
            asked.setdefault(document.key, set()).add(session.requests[0].user)
            assert 4_000 <= document.tokens <= 30_000
    assert all(len(users) == 1 for users in asked.values())
    assert private / len(sessions) == pytest.approx(0.1, abs=0.01)
    # A user's first one is always new.
    assert again / private == pytest.approx(0.3, abs=0.05)


def test_templates_differ_in_their_slot_only() -> None:
    shape = M1Shape(secret_share=0.9, document_share=0, secrets=4)
    filled = [session.requests[0].segments[:3] for session in m1_sessions(shape, 400)]
    filled = [segments for segments in filled if segments[0].key == "template/head"]
    assert len({segments[1].key for segments in filled}) == 4
    assert len({(segments[0], segments[2]) for segments in filled}) == 1


def test_bursts_keep_the_rate_and_spread_the_gaps() -> None:
    arrivals = [session.arrival_s or 0.0 for session in islice(m1_stream(SHAPE, 1.7, burstiness=3.0), 20_000)]
    gaps = np.diff(arrivals)
    assert gaps.mean() == pytest.approx(1.0, rel=0.15)
    assert gaps.std() / gaps.mean() == pytest.approx(3.0, rel=0.2)


@pytest.mark.parametrize("wrong", [{"users": 0}, {"scale": 0}, {"turns": 0.5}, {"document_share": 0.99}])
def test_invalid_shapes_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"at least|exceed"):
        M1Shape(**wrong)  # type: ignore[arg-type]  # one field each


def test_ideal_rates_of_a_scaled_workload() -> None:
    requests = [request for session in m1_sessions(SHAPE, 2000) for request in session.requests]
    alone = ideal_rates(requests, keeps_answers=True)
    assert 0.3 < alone.within < 0.9
    assert 0.02 < alone.across < 0.4
    # Without answers, a next turn is found only to the end of the question before.
    assert ideal_rates(requests, keeps_answers=False).within < alone.within


def test_the_ideal_cache_distinguishes_own_shared_and_evident_hits() -> None:
    cache = IdealCache(keeps_answers=False, promotion_subjects=2, page_tokens=16)
    by_user = {request.user: request for session in m1_sessions(SHAPE, 500) for request in session.requests}
    first, second, third = list(by_user.values())[:3]
    assert cache.ask(first).shared_by_all == 0
    again = cache.ask(first)
    assert again.own == again.shared_by_all == (first.input_tokens - 1) // 16 * 16
    assert again.evident == 0
    for number, user in enumerate(("second", "third", "fourth"), start=1):
        other = type(first)(first.segments, 1, user=user)
        hit = cache.ask(other)
        assert hit.own == 0
        assert hit.shared_by_all == again.shared_by_all
        assert hit.evident == (again.shared_by_all if number >= 2 else 0)
    assert cache.ask(second).own == cache.ask(third).own == 0

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.cache.tiers.rate_limit import RateLimit
from services.scheduler.cache.tiers.storage_reads import Prefetch, Run
from services.scheduler.cache.types import PUBLIC_SCOPE

ANN = ("t", "ann")


def play(
    prefetch: Prefetch, own: set[int], public: set[int], choose: st.DataObject | None = None, room: int = 1000
) -> list[Run]:
    """Answer runs from what is stored, in any order; return them all."""
    asked, under_way = [], []
    while not prefetch.is_done:
        while (run := prefetch.peek_run()) is not None:
            under_way.append(prefetch.take_run(min(run.pages, room)))
            asked.append(under_way[-1])
        run = under_way.pop(choose.draw(st.integers(0, len(under_way) - 1)) if choose else 0)
        there = own if run.scope == ANN else public
        done = next((n for n in range(run.pages) if run.first + n not in there), run.pages)
        before = prefetch.position
        new = prefetch.arrive(run, done)
        assert prefetch.position == before + new
        assert 0 <= new <= done
    return asked


def expected(own: set[int], public: set[int], start: int, end: int) -> int:
    return next((page for page in range(start, end) if page not in own | public), end)


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)), st.integers(0, 20), st.integers(1, 9), st.data())
def test_prefetch_finds_the_longest_prefix_stored_under_any_scope(
    own: set[int], public: set[int], start: int, room: int, data: st.DataObject
) -> None:
    prefetch = Prefetch((ANN, PUBLIC_SCOPE), start, 40)
    play(prefetch, own, public, data, room)
    assert prefetch.position == expected(own, public, start, 40)


def test_if_nothing_is_stored_one_page_per_scope_is_requested() -> None:
    prefetch = Prefetch((ANN, PUBLIC_SCOPE), 3, 100)
    assert play(prefetch, set(), set()) == [Run(ANN, 3, 1), Run(PUBLIC_SCOPE, 3, 1)]


def test_a_long_prefix_takes_few_round_trips() -> None:
    prefetch = Prefetch((ANN,), 0, 512)
    runs = play(prefetch, set(range(512)), set())
    assert [run.pages for run in runs] == [1, 8, 64, 439]
    assert prefetch.position == 512


def test_prefetch_asks_only_for_its_own_scopes() -> None:
    prefetch = Prefetch((ANN, PUBLIC_SCOPE), 0, 64)
    assert {run.scope for run in play(prefetch, set(range(5)), set(range(3, 50)))} == {ANN, PUBLIC_SCOPE}


def test_a_stopped_prefetch_counts_its_open_run_and_starts_no_other() -> None:
    prefetch = Prefetch((ANN,), 0, 64)
    run = prefetch.take_run(1)
    prefetch.stop()
    assert not prefetch.is_done
    assert prefetch.arrive(run, 1) == 1
    assert prefetch.is_done


def test_a_rate_is_kept_over_time() -> None:
    limit, taken, now = RateLimit(100.0), 0.0, 0.0
    while now < 10.0:
        if limit.available(now) > 0:
            limit.take(7.0, now)
            taken += 7.0
        now += 0.01
    assert taken == pytest.approx(1100, abs=10)


def test_a_rate_of_zero_means_no_limit() -> None:
    limit = RateLimit(0.0)
    limit.take(1e12, 0.0)
    assert limit.available(0.0) == float("inf")

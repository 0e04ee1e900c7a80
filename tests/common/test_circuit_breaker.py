from __future__ import annotations

from common.circuit_breaker import (
    FAILURES_TO_OPEN,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    SILENCES_TO_OPEN,
    CircuitBreaker,
)
from common.settings import WorkerStorageSettings


def opened(now: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.fail(now)
    return breaker


def test_single_failures_do_not_open_it() -> None:
    breaker = CircuitBreaker()
    for _ in range(10):
        breaker.fail(0.0)
        breaker.succeed()
    assert breaker.allows(0.0)


def test_consecutive_failures_open_the_breaker_for_a_pause() -> None:
    breaker = opened()
    assert breaker.is_open
    assert not breaker.allows(FIRST_PAUSE_S / 2)


def test_after_the_pause_one_call_is_tried_at_a_time() -> None:
    breaker = opened()
    assert breaker.allows(FIRST_PAUSE_S)
    assert not breaker.allows(FIRST_PAUSE_S)
    breaker.succeed()
    assert breaker.allows(FIRST_PAUSE_S)


def test_whether_a_call_may_be_made_can_be_asked_without_making_one() -> None:
    breaker = opened()
    assert not breaker.is_ready(FIRST_PAUSE_S / 2)
    assert breaker.is_ready(FIRST_PAUSE_S)
    assert breaker.is_ready(FIRST_PAUSE_S)
    breaker.begin()
    assert not breaker.is_ready(FIRST_PAUSE_S)


def test_a_closed_breaker_counts_no_call_as_the_one_after_a_pause() -> None:
    breaker = CircuitBreaker()
    breaker.begin()
    for _ in range(FAILURES_TO_OPEN):
        breaker.fail(0.0)
    assert breaker.is_ready(FIRST_PAUSE_S)


def test_pauses_double_up_to_a_limit() -> None:
    breaker, now, pauses = opened(), 0.0, []
    for _ in range(10):
        start = now
        while not breaker.allows(now):
            now += 0.5
        pauses.append(now - start)
        breaker.fail(now)
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_calls_that_began_before_do_not_lengthen_the_pause() -> None:
    breaker = opened()
    for _ in range(5):
        breaker.fail(0.5)
    assert breaker.allows(FIRST_PAUSE_S)


def test_fewer_calls_without_an_answer_suffice() -> None:
    breaker = CircuitBreaker()
    for _ in range(SILENCES_TO_OPEN - 1):
        breaker.fail(0.0, is_silent=True)
    assert breaker.allows(0.0)
    breaker.fail(0.0, is_silent=True)
    assert not breaker.allows(0.0)


def test_with_the_default_limit_a_silent_server_is_noticed_within_5_seconds() -> None:
    assert SILENCES_TO_OPEN * WorkerStorageSettings().timeout_s < 5

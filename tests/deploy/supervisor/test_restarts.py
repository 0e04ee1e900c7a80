from __future__ import annotations

from deploy.supervisor.supervisor import RestartHistory, RestartPolicy

POLICY = RestartPolicy(first_delay_s=0.1, max_delay_s=0.5, stable_after_s=10.0, give_up_after=6)


def delays(*lives_s: float, has_answered: bool = True) -> list[float | None]:
    history = RestartHistory(POLICY)
    return [history.delay_after(lived_s, has_answered=has_answered) for lived_s in lives_s]


def test_the_pause_doubles_with_each_quick_death_up_to_its_maximum() -> None:
    assert delays(*[1.0] * 5) == [0.1, 0.2, 0.4, 0.5, 0.5]
    assert delays(*[1.0] * 5, has_answered=False) == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_too_many_quick_deaths_of_a_service_that_never_answered_are_the_end() -> None:
    assert [delay is None for delay in delays(*[1.0] * 6, has_answered=False)] == [False] * 5 + [True]


def test_a_service_that_has_answered_once_is_never_given_up() -> None:
    history = RestartHistory(POLICY)
    assert history.delay_after(1.0, has_answered=True) == 0.1
    later = [history.delay_after(1.0, has_answered=False) for _ in range(2000)]
    assert later[-1] == 0.5
    assert None not in later


def test_a_configuration_that_is_refused_again_and_again_is_the_end_however_long_that_takes() -> None:
    history = RestartHistory(POLICY)
    refused = [history.delay_after(100.0, has_answered=True, is_refused=True) for _ in range(6)]
    assert [delay is None for delay in refused] == [False] * 5 + [True]
    assert history.delay_after(1.0, has_answered=True) is not None


def test_deaths_after_a_long_life_are_no_series() -> None:
    assert delays(*[1.0] * 4, 11.0, 1.0)[-2:] == [0.1, 0.2]
    assert delays(*[11.0] * 20, has_answered=False) == [0.1] * 20

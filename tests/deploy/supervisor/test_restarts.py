from __future__ import annotations

from deploy.supervisor.supervisor import RestartHistory, RestartPolicy

POLICY = RestartPolicy(first_delay_s=0.1, max_delay_s=0.5, stable_after_s=10.0, give_up_after=6)


def test_the_pause_doubles_with_each_quick_death_up_to_its_maximum() -> None:
    history = RestartHistory(POLICY)
    assert [history.delay_after(1.0) for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_too_many_quick_deaths_in_a_row_are_the_end() -> None:
    history = RestartHistory(POLICY)
    assert [history.delay_after(1.0) is None for _ in range(6)] == [False] * 5 + [True]


def test_a_service_that_had_worked_starts_a_new_series() -> None:
    history = RestartHistory(POLICY)
    for _ in range(4):
        history.delay_after(1.0)
    assert history.delay_after(11.0) == 0.1
    assert history.delay_after(1.0) == 0.2

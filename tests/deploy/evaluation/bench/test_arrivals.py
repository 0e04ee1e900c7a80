from __future__ import annotations

import numpy as np
import pytest

from deploy.evaluation.bench.arrivals import gamma_arrivals, scale_times


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 3.0])
def test_gaps_have_the_rate_and_the_variation_asked_for(burstiness: float) -> None:
    gaps = np.diff(gamma_arrivals(40_000, 8.0, burstiness, seed=1))
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness, rel=0.1)


def test_zero_burstiness_is_a_metronome() -> None:
    assert gamma_arrivals(4, 2.0, 0.0) == [0.0, 0.5, 1.0, 1.5]


def test_arrivals_are_a_function_of_the_seed() -> None:
    assert gamma_arrivals(9, 1.0, seed=3) == gamma_arrivals(9, 1.0, seed=3)
    assert gamma_arrivals(9, 1.0, seed=3) != gamma_arrivals(9, 1.0, seed=4)


def test_arrivals_begin_at_zero_and_never_go_back() -> None:
    times = gamma_arrivals(100, 5.0, 3.0, seed=2)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert gamma_arrivals(0, 5.0) == []


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (1.0, -0.1)])
def test_impossible_arrivals_are_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="must"):
        gamma_arrivals(3, rate, burstiness)


def test_recorded_times_are_scaled_from_their_first() -> None:
    assert scale_times([5000, 5000, 9000], 2.0) == [0.0, 0.0, 2.0]
    assert scale_times([]) == []
    with pytest.raises(ValueError, match="speed"):
        scale_times([1], 0)

"""Arrival times of requests in an open loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable


def gamma_arrivals(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Return `count` arrival times in seconds with an average of `rate` per second, the first at 0.

    Gaps are Gamma-distributed with a coefficient of variation of `burstiness`: 1 is Poisson, larger values are bursty,
    0 is a constant interval.
    """
    if rate <= 0:
        raise ValueError("the rate must be positive")
    if burstiness < 0:
        raise ValueError("burstiness must not be negative")
    if burstiness == 0:
        gaps = np.full(count, 1 / rate)
    else:
        shape = 1 / burstiness**2
        gaps = np.random.default_rng(seed).gamma(shape, 1 / (rate * shape), size=count)
    times = np.cumsum(gaps)
    return [float(time) for time in times - times[:1]]


def scale_times(timestamps_ms: Iterable[float], speed: float = 1.0) -> list[float]:
    """Return the arrival times of a recorded trace in seconds after its first, replayed `speed` times as fast."""
    if speed <= 0:
        raise ValueError("the speed must be positive")
    times = list(timestamps_ms)
    first = min(times, default=0.0)
    return [(time - first) / 1000 / speed for time in times]

"""Arrival times of requests in an open loop, and the requests of sessions in order of arrival."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from deploy.evaluation.bench.records import BenchRequest, WorkloadSession


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


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that arrives at `time_s`, in seconds after the start."""

    time_s: float
    request: BenchRequest


def by_time(sessions: Iterable[WorkloadSession], token_s: float) -> Iterator[Arrival]:
    """Yield the requests of sessions, which must be in order of arrival.

    A turn arrives after the previous answer has been generated, at `token_s` seconds per token, and the user's delay.
    Prefill times are ignored, so that every cache under test gets the same requests at the same times.
    """
    pending: list[tuple[float, int, int, WorkloadSession]] = []
    for number, session in enumerate(sessions):
        start = session.arrival_s or 0.0
        while pending and pending[0][0] <= start:
            yield _next(pending, token_s)
        heapq.heappush(pending, (start, number, 0, session))
    while pending:
        yield _next(pending, token_s)


def _next(pending: list[tuple[float, int, int, WorkloadSession]], token_s: float) -> Arrival:
    time_s, number, turn, session = pending[0]
    request = session.requests[turn]
    if turn + 1 < len(session.requests):
        due = time_s + request.output_tokens * token_s + session.requests[turn + 1].delay_s
        heapq.heapreplace(pending, (due, number, turn + 1, session))
    else:
        heapq.heappop(pending)
    return Arrival(time_s, request)

"""Conversion of sessions to single requests in order of arrival."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from deploy.evaluation.bench.records import BenchRequest, WorkloadSession


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

"""Sessions as single requests in the order of time."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from deploy.bench.records import BenchRequest, Session


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that is due at `time_s` and, if nothing delays it, runs for `duration_s` after its prefill."""

    time_s: float
    request: BenchRequest


def by_time(sessions: Iterable[Session], token_s: float) -> Iterator[Arrival]:
    """Yield the requests of sessions that come in order of arrival.

    A next turn is due when the answer before it has been written, at `token_s` per token, and thought about: no
    matter how long the prompt before it took, so that every cache under test is asked the same at the same times.
    """
    pending: list[tuple[float, int, int, Session]] = []
    for number, session in enumerate(sessions):
        start = session.arrival_s or 0.0
        while pending and pending[0][0] <= start:
            yield _next(pending, token_s)
        heapq.heappush(pending, (start, number, 0, session))
    while pending:
        yield _next(pending, token_s)


def _next(pending: list[tuple[float, int, int, Session]], token_s: float) -> Arrival:
    time_s, number, turn, session = pending[0]
    request = session.requests[turn]
    if turn + 1 < len(session.requests):
        due = time_s + request.output_tokens * token_s + session.requests[turn + 1].delay_s
        heapq.heapreplace(pending, (due, number, turn + 1, session))
    else:
        heapq.heappop(pending)
    return Arrival(time_s, request)

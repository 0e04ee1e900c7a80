"""Plays sessions against a server: in a closed loop (N at a time) or an open loop (each at its arrival time)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from deploy.evaluation.bench.records import LoadResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deploy.evaluation.bench.clock import Clock
    from deploy.evaluation.bench.records import BenchRequest, RequestRecord, WorkloadSession


class Sender(Protocol):
    """Sends requests and records their responses."""

    async def send(self, request: BenchRequest, late_s: float = 0.0) -> RequestRecord:
        """Send `request` and return its record; never raises for a failed request."""
        ...


def _ignore(_record: RequestRecord) -> None:
    pass


async def run_closed_loop(
    sender: Sender,
    sessions: Sequence[WorkloadSession],
    concurrency: int,
    clock: Clock,
    on_record: Callable[[RequestRecord], None] = _ignore,
) -> LoadResult:
    """Play all sessions in order, `concurrency` at a time."""
    player = _Player(sender, clock, on_record)
    waiting = iter(sessions)

    async def play_next() -> None:
        for session in waiting:
            await player.play(session)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, len(sessions))):
            tasks.create_task(play_next())
    return player.result()


async def run_open_loop(
    sender: Sender,
    sessions: Sequence[WorkloadSession],
    clock: Clock,
    on_record: Callable[[RequestRecord], None] = _ignore,
) -> LoadResult:
    """Start each session at its arrival time, independently of the number of open ones."""
    player = _Player(sender, clock, on_record)
    start = clock.now()
    async with asyncio.TaskGroup() as tasks:
        for session in sorted(sessions, key=lambda session: session.arrival_s or 0.0):
            due = start + (session.arrival_s or 0.0)
            await clock.sleep(due - clock.now())
            tasks.create_task(player.play(session, due))
    return player.result()


class _Player:
    """Plays sessions and collects the records."""

    def __init__(self, sender: Sender, clock: Clock, on_record: Callable[[RequestRecord], None]) -> None:
        self._sender = sender
        self._clock = clock
        self._on_record = on_record
        self._records: list[RequestRecord] = []

    async def play(self, session: WorkloadSession, due: float | None = None) -> None:
        """Send the requests of a session one after the other; a failure ends the session, as in a real conversation."""
        for request in session.requests:
            await self._clock.sleep(request.delay_s)
            late = max(0.0, self._clock.now() - due - request.delay_s) if due is not None else 0.0
            due = None
            record = await self._sender.send(request, late)
            self._records.append(record)
            self._on_record(record)
            if record.error is not None:
                return

    def result(self) -> LoadResult:
        if not self._records:
            return LoadResult((), 0.0)
        first = min(record.started_s for record in self._records)
        last = max(record.ended_s for record in self._records)
        return LoadResult(tuple(self._records), last - first)

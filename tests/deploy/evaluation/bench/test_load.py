from __future__ import annotations

import pytest

from deploy.evaluation.bench.measure import run_closed_loop, run_open_loop
from deploy.evaluation.bench.records import BenchRequest, RequestRecord, Segment, WorkloadSession
from tests.fakes.virtual_clock import VirtualClock


class TimedSender:
    """Takes as many seconds as a request has output tokens; requests of user `fails` fail."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.open = 0
        self.most_open = 0
        self.order: list[str] = []

    async def send(self, request: BenchRequest, late_s: float = 0.0) -> RequestRecord:
        self.order.append(request.segments[0].key)
        started = self.clock.now()
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        await self.clock.sleep(request.output_tokens)
        self.open -= 1
        error = "http_500" if request.user == "fails" else None
        return RequestRecord(started, self.clock.now(), error=error, late_s=late_s)


def request(key: str, seconds: int = 1, **more: object) -> BenchRequest:
    return BenchRequest((Segment(key, 1),), seconds, **more)  # type: ignore[arg-type]  # user and delay_s only


def session(key: str, seconds: int = 1, arrival_s: float | None = None) -> WorkloadSession:
    return WorkloadSession((request(key, seconds),), arrival_s)


async def test_closed_loop_keeps_as_many_open_as_asked() -> None:
    clock = VirtualClock()
    sender = TimedSender(clock)
    sessions = [session(str(i), 2) for i in range(10)]
    result = await clock.run(run_closed_loop(sender, sessions, 3, clock))
    assert sender.most_open == 3
    assert sender.order == [str(i) for i in range(10)]
    assert len(result.records) == 10
    assert result.duration_s == 8.0  # four waves of two seconds


async def test_closed_loop_refills_at_once() -> None:
    clock = VirtualClock()
    sender = TimedSender(clock)
    sessions = [session("long", 10), *(session(str(i), 1) for i in range(9))]
    assert (await clock.run(run_closed_loop(sender, sessions, 2, clock))).duration_s == 10.0


async def test_open_loop_starts_each_session_when_due_whatever_is_open() -> None:
    clock = VirtualClock()
    start = clock.now()
    sender = TimedSender(clock)
    sessions = [session("c", 9, 3.0), session("a", 9, 0.0), session("b", 9, 0.5)]
    result = await clock.run(run_open_loop(sender, sessions, clock))
    assert sorted(record.started_s - start for record in result.records) == [0.0, 0.5, 3.0]
    assert sender.order == ["a", "b", "c"]
    assert sender.most_open == 3
    assert all(record.late_s == 0 for record in result.records)
    assert result.duration_s == 12.0


async def test_open_loop_says_how_late_it_was() -> None:
    clock = VirtualClock()

    class Stalling(TimedSender):
        async def send(self, request: BenchRequest, late_s: float = 0.0) -> RequestRecord:
            clock.time += 4.0  # the event loop is held up
            return await super().send(request, late_s)

    result = await clock.run(run_open_loop(Stalling(clock), [session("a", 1, 0.0), session("b", 1, 1.0)], clock))
    assert [record.late_s for record in result.records] == [0.0, pytest.approx(3.0)]


async def test_requests_of_a_session_follow_each_other_with_time_to_think() -> None:
    clock = VirtualClock()
    start = clock.now()
    turns = (request("1", 2), request("2", 2, delay_s=5.0), request("3", 2, delay_s=1.0))
    result = await clock.run(run_open_loop(TimedSender(clock), [WorkloadSession(turns, 1.0)], clock))
    assert [record.started_s - start for record in result.records] == [1.0, 8.0, 11.0]
    assert all(record.late_s == 0 for record in result.records)


async def test_a_failed_turn_ends_its_session_but_no_other() -> None:
    clock = VirtualClock()
    sender = TimedSender(clock)
    sessions = [WorkloadSession((request("1", 1, user="fails"), request("2"))), session("3")]
    result = await clock.run(run_closed_loop(sender, sessions, 1, clock))
    assert sender.order == ["1", "3"]
    assert [record.error for record in result.records] == ["http_500", None]


async def test_every_record_is_reported_as_it_comes() -> None:
    clock = VirtualClock()
    seen: list[RequestRecord] = []
    await clock.run(run_closed_loop(TimedSender(clock), [session("a"), session("b")], 1, clock, seen.append))
    assert len(seen) == 2


async def test_no_sessions_are_no_load() -> None:
    clock = VirtualClock()
    assert (await clock.run(run_open_loop(TimedSender(clock), [], clock))).records == ()

from __future__ import annotations

from services.scheduler.cache.types import CacheEvent, CacheEventKind
from services.scheduler.event_backlog import EventBacklog


def event(sequence: int) -> CacheEvent:
    return CacheEvent(sequence, CacheEventKind.FLUSHED, None)


async def taken(backlog: EventBacklog) -> list[int]:
    sequences = []
    while (found := await backlog.next(0.01)) is not None:
        sequences.append(found.sequence)
    return sequences


async def test_events_come_in_their_order() -> None:
    backlog = EventBacklog(limit=4)
    for sequence in range(1, 4):
        backlog.add(event(sequence))
    assert await taken(backlog) == [1, 2, 3]
    assert backlog.take_lost() == 0


async def test_an_overflow_counts_all_waiting_events_as_lost() -> None:
    backlog = EventBacklog(limit=4)
    for sequence in range(1, 11):
        backlog.add(event(sequence))
    assert await taken(backlog) == []
    assert backlog.take_lost() == 10
    backlog.add(event(11))
    assert await taken(backlog) == [11]
    assert backlog.take_lost() == 0


async def test_the_backlog_is_bounded_without_a_reader() -> None:
    backlog = EventBacklog(limit=4)
    for sequence in range(100_000):
        backlog.add(event(sequence))
    assert len(backlog._events) <= 4
    assert backlog.take_lost() == 100_000

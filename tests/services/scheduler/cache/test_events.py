from __future__ import annotations

from services.scheduler.cache.events import CacheEvents
from services.scheduler.cache.types import (
    CacheEvent,
    CacheEventKind,
    NodeId,
    NodeSnapshot,
)
from tests.services.scheduler.cache.driver import ANN, BOB, Driver


def watched() -> tuple[Driver, list[CacheEvent]]:
    driver = Driver()
    events: list[CacheEvent] = []
    driver.cache.events.subscribe(events.append)
    return driver, events


def short(event: CacheEvent) -> tuple[CacheEventKind, list[int], int]:
    assert event.node is not None
    return event.kind, event.node.token_ids.tolist(), event.node.depth_tokens


def test_insert_split_and_eviction_are_reported_in_order() -> None:
    driver, events = watched()
    driver.serve(ANN, [1, 2, 3, 4])
    driver.serve(ANN, [1, 2, 5, 6])
    driver.cache.evict(1)
    assert [short(event) for event in events] == [
        (CacheEventKind.INSERTED, [1, 2, 3, 4], 4),
        (CacheEventKind.SPLIT, [1, 2], 2),
        (CacheEventKind.SPLIT, [3, 4], 4),
        (CacheEventKind.INSERTED, [5, 6], 4),
        (CacheEventKind.SOFT_FREED, [3, 4], 4),
        (CacheEventKind.RECLAIMED, [], 2),
    ]
    assert [event.sequence for event in events] == [1, 2, 3, 4, 5, 6]


def test_split_halves_were_last_used_when_the_whole_was() -> None:
    driver, events = watched()
    driver.serve(ANN, [1, 2, 3, 4])
    (whole,) = driver.cache.dump()
    driver.serve(ANN, [1, 2, 5])
    halves = [event.node for event in events if event.kind is CacheEventKind.SPLIT]
    assert [half.last_access for half in halves if half] == [whole.last_access] * 2


def test_tail_of_a_leaf_is_split_off_before_it_goes() -> None:
    driver, events = watched()
    driver.serve(ANN, [1, 2, 3, 4])
    driver.cache.evict(1)
    assert [short(event) for event in events[1:]] == [
        (CacheEventKind.SPLIT, [1, 2], 2),
        (CacheEventKind.SPLIT, [3, 4], 4),
        (CacheEventKind.SOFT_FREED, [3, 4], 4),
        (CacheEventKind.RECLAIMED, [], 2),
    ]


def test_flush_reports_each_removed_node_before_the_flushed_event() -> None:
    driver, events = watched()
    driver.serve(ANN, [1, 2])
    driver.serve(BOB, [3, 4])
    driver.cache.flush()
    assert [event.kind for event in events[2:]] == [
        CacheEventKind.SOFT_FREED,
        CacheEventKind.RECLAIMED,
        CacheEventKind.SOFT_FREED,
        CacheEventKind.RECLAIMED,
        CacheEventKind.FLUSHED,
    ]
    assert events[-1].node is None


def test_snapshot_and_events_together_give_the_tree() -> None:
    driver = Driver()
    driver.serve(ANN, [1, 2, 3, 4])
    mirror: dict[NodeId, NodeSnapshot] = {node.node_id: node for node in driver.cache.dump()}

    def apply(event: CacheEvent) -> None:
        if event.node is None:
            return
        if event.node.edge_tokens:
            mirror[event.node.node_id] = event.node
        else:
            del mirror[event.node.node_id]

    driver.cache.events.subscribe(apply)
    driver.serve(ANN, [1, 2, 3, 4, 5, 6, 7, 8])
    driver.serve(BOB, [1, 2])
    driver.serve(ANN, [1, 2, 9, 9])
    driver.cache.evict(3)

    def shape(nodes: list[NodeSnapshot]) -> list[tuple[object, ...]]:
        return sorted(
            (node.node_id, node.parent_id, node.token_ids.tolist(), node.pages.tolist(), node.depth_tokens)
            for node in nodes
        )

    assert shape(list(mirror.values())) == shape(list(driver.cache.dump()))


def test_event_sequence_numbers_rise_without_subscribers() -> None:
    driver = Driver()
    driver.serve(ANN, [1, 2])
    assert driver.cache.events.sequence == 1
    events: list[CacheEvent] = []
    driver.cache.events.subscribe(events.append)
    driver.serve(ANN, [3, 4])
    assert events[0].sequence == 2


def test_an_unsubscribed_listener_gets_no_events_and_others_still_do() -> None:
    driver, events = watched()
    others: list[CacheEvent] = []
    unsubscribe = driver.cache.events.subscribe(others.append)
    unsubscribe()
    unsubscribe()
    driver.serve(ANN, [1, 2])
    assert (len(events), len(others)) == (1, 0)


def test_events_are_counted_by_kind() -> None:
    events = CacheEvents()
    events.emit(CacheEventKind.INSERTED)
    events.emit(CacheEventKind.INSERTED)
    assert (events.count(CacheEventKind.INSERTED), events.count(CacheEventKind.SPLIT)) == (2, 0)
    assert not events.is_heard(CacheEventKind.INSERTED)

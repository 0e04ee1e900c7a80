from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.cache.types import CacheEvent, CacheEventKind
from tests.services.scheduler.cache.driver import ANN, BOB, CID, DAN, PLAIN, Driver, int32

SYSTEM = [1, 2, 3, 4, 5, 6]


@pytest.fixture(params=["isolated_pinned", "user_aware"])
def driver(request: Any) -> Driver:
    return Driver(request.param, config=PLAIN, capacity=100)


def test_a_pinned_prompt_is_public_once_any_subject_has_computed_it(driver: Driver) -> None:
    assert driver.cache.pin(int32(SYSTEM)) == 6
    driver.next_epoch()
    assert driver.peek(ANN, [*SYSTEM, 9]) == 0
    driver.serve(ANN, [*SYSTEM, 8, 8])
    assert driver.public == [SYSTEM]
    assert driver.peek(BOB, [*SYSTEM, 8, 8, 1]) == 6
    assert driver.peek(ANN, [*SYSTEM, 8, 8, 1]) == 8
    driver.check()


def test_private_copies_of_a_pinned_prompt_become_public(driver: Driver) -> None:
    rows = [driver.admit(user, [*SYSTEM, 7, number]) for number, user in enumerate((ANN, BOB))]
    for row in rows:
        driver.insert(row)
    driver.cache.pin(int32(SYSTEM))
    assert driver.peek(CID, [*SYSTEM, 9]) == 0
    promoted: list[CacheEvent] = []
    driver.cache.events.subscribe(promoted.append, [CacheEventKind.PROMOTED])
    driver.next_epoch()
    assert [event.node.pinned for event in promoted if event.node] == [True]
    assert driver.public == [SYSTEM]
    assert driver.peek(CID, [*SYSTEM, 9]) == 6
    driver.check(*rows)
    for row in rows:
        driver.end(row)
    driver.check()


def test_half_a_page_is_not_pinned(driver: Driver) -> None:
    assert driver.cache.pin(int32([*SYSTEM, 7])) == 6
    assert driver.cache.pin(int32([1])) == 0
    driver.next_epoch()
    driver.serve(ANN, [*SYSTEM, 7, 7])
    assert driver.public == [SYSTEM]


def test_chunks_of_a_pinned_prompt_are_public_one_by_one(driver: Driver) -> None:
    driver.cache.pin(int32(SYSTEM))
    driver.next_epoch()
    row = driver.admit(ANN, [*SYSTEM, 7, 7])
    for end in range(2, 9, 2):
        driver.insert(row, end)
        assert driver.peek(BOB, [*SYSTEM, 7, 7]) == min(end, 6)
        driver.check(row)
    driver.end(row)
    assert driver.edges() == [SYSTEM, [7, 7]]


def test_prompt_that_leaves_the_pin_is_private_from_there(driver: Driver) -> None:
    driver.cache.pin(int32(SYSTEM))
    driver.next_epoch()
    driver.serve(ANN, [1, 2, 3, 4, 9, 9])
    assert driver.public == [[1, 2, 3, 4]]
    assert driver.peek(BOB, [1, 2, 3, 4, 9, 9, 0]) == 4


def test_pinned_nodes_are_evicted_last(driver: Driver) -> None:
    driver.cache.pin(int32(SYSTEM))
    driver.next_epoch()
    driver.serve(ANN, SYSTEM)
    driver.next_epoch()
    for number in range(10):
        driver.serve(BOB, [100 + number, 0])
    driver.cache.evict(10)
    assert driver.edges() == [SYSTEM]
    driver.cache.evict(1)
    assert driver.edges() == [[1, 2, 3, 4]]


def test_unpinned_prompt_stays_while_it_is_cached_and_is_private_when_computed_again(driver: Driver) -> None:
    driver.cache.pin(int32(SYSTEM))
    driver.cache.pin(int32(SYSTEM[:4]))
    driver.next_epoch()
    driver.serve(ANN, SYSTEM)
    assert driver.cache.unpin(int32(SYSTEM))
    assert not driver.cache.unpin(int32(SYSTEM))
    assert [node.pinned for node in driver.cache.dump()] == [True, False]
    assert driver.peek(BOB, [*SYSTEM, 9]) == 6
    driver.check()
    driver.cache.flush()
    driver.serve(ANN, SYSTEM)
    assert driver.public == [[1, 2, 3, 4]]


def test_probing_a_pinned_prompt_changes_nothing(driver: Driver) -> None:
    driver.cache.pin(int32(SYSTEM))
    driver.next_epoch()
    driver.serve(ANN, SYSTEM)
    for _ in range(4):
        for user in (BOB, CID):
            for _ in range(50):
                driver.end(driver.admit(user, [*SYSTEM, 9]))
        driver.next_epoch()
    assert driver.public == [SYSTEM]
    assert driver.peek(DAN, [*SYSTEM, 9]) == driver.peek(BOB, [*SYSTEM, 9]) == 6


def test_pins_mean_nothing_to_other_modes() -> None:
    for mode in ("isolated", "shared", "chunk"):
        driver = Driver(mode, config=PLAIN)
        driver.cache.pin(int32(SYSTEM))
        driver.next_epoch()
        driver.serve(ANN, SYSTEM)
        assert driver.peek(BOB, [*SYSTEM, 9]) == (6 if mode == "shared" else 0)


def test_pin_that_has_not_taken_effect_can_be_taken_back(driver: Driver) -> None:
    driver.cache.pin(int32(SYSTEM))
    assert driver.cache.unpin(int32(SYSTEM))
    driver.next_epoch()
    driver.serve(ANN, SYSTEM)
    assert driver.public == []

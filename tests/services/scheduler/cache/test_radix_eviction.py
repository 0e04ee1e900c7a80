from __future__ import annotations

from tests.services.scheduler.cache.driver import ANN, BOB, Driver


def test_least_recently_used_goes_first() -> None:
    driver = Driver()
    driver.serve(ANN, [1, 2])
    driver.serve(BOB, [3, 4])
    driver.serve(ANN, [1, 2, 9])
    assert driver.cache.evict(1) == 1
    assert driver.edges() == [[1, 2]]


def test_recency_counts_from_the_end_of_use() -> None:
    driver = Driver()
    long_running = driver.admit(ANN, [1, 2])
    driver.insert(long_running)
    driver.serve(BOB, [3, 4])
    driver.end(long_running)
    driver.cache.evict(1)
    assert driver.edges() == [[1, 2]]


def test_never_frees_locked_pages() -> None:
    driver = Driver()
    row = driver.admit(ANN, [1, 2, 3, 4])
    driver.insert(row)
    driver.serve(ANN, [1, 2, 5, 6, 7, 8])
    assert driver.cache.evict(64) == 2
    assert driver.edges() == [[1, 2], [3, 4]]
    assert driver.cache.evict(1) == 0


def test_long_leaf_loses_only_the_tail_that_is_needed() -> None:
    driver = Driver()
    driver.serve(ANN, list(range(20)))
    assert driver.cache.evict(3) == 3
    assert driver.edges() == [list(range(14))]
    assert driver.peek(ANN, list(range(20))) == 14
    assert driver.cache.evict(2) == 2
    assert driver.edges() == [list(range(10))]


def test_parent_goes_after_its_children() -> None:
    driver = Driver()
    driver.serve(ANN, [1, 2, 3, 4])
    driver.serve(ANN, [1, 2, 5, 6])
    driver.cache.evict(1)
    assert driver.edges() == [[1, 2], [5, 6]]
    driver.cache.evict(1)
    assert driver.edges() == [[1, 2]]
    driver.cache.evict(1)
    assert driver.edges() == []


def test_trimmed_pages_can_be_inserted_again() -> None:
    driver = Driver()
    driver.serve(ANN, [1, 2, 3, 4, 5, 6])
    driver.cache.evict(2)
    assert driver.serve(ANN, [1, 2, 3, 4, 5, 6]) == 2
    assert driver.peek(ANN, [1, 2, 3, 4, 5, 6, 7]) == 6


def test_evicting_more_pages_than_exist_frees_all() -> None:
    driver = Driver()
    driver.serve(ANN, [1, 2, 3, 4])
    assert driver.cache.evict(100) == 2
    assert driver.cache.evict(100) == 0


def test_flush_drops_all_pages_that_are_not_in_use() -> None:
    driver = Driver()
    driver.serve(ANN, [1, 2, 3, 4])
    row = driver.admit(ANN, [1, 2, 9])
    assert driver.cache.flush() == 1
    assert driver.edges() == [[1, 2]]
    driver.end(row)
    assert driver.cache.flush() == 1
    assert driver.allocator.free_pages == 64

from __future__ import annotations

import pytest

from services.scheduler.cache.debug.audit import account
from tests.services.scheduler.cache.driver import ANN, Driver


def test_the_chunk_cache_never_finds_anything() -> None:
    driver = Driver("chunk")
    assert driver.serve(ANN, [1, 2, 3, 4]) == 0
    assert driver.serve(ANN, [1, 2, 3, 4]) == 0
    assert driver.peek(ANN, [1, 2, 3, 4, 5]) == 0
    assert list(driver.cache.dump()) == []


def test_row_keeps_its_own_pages_and_gives_them_all_back() -> None:
    driver = Driver("chunk")
    row = driver.admit(ANN, [1, 2, 3, 4, 5])
    insertion = driver.insert(row)
    assert insertion.pages.tolist() == row.table[:2].tolist()
    assert len(insertion.duplicates) == 0
    assert account(driver.allocator, driver.cache, row_references=3).is_exact
    driver.end(row)
    assert driver.allocator.free_pages == 64


def test_there_is_nothing_to_evict_or_flush() -> None:
    driver = Driver("chunk")
    driver.serve(ANN, [1, 2, 3, 4])
    assert driver.cache.evict(1) == driver.cache.flush() == 0


def test_released_lease_is_dead() -> None:
    driver = Driver("chunk")
    row = driver.admit(ANN, [1, 2])
    driver.cache.release(row.lock)
    with pytest.raises(AssertionError, match="released before"):
        driver.cache.release(row.lock)
    with pytest.raises(AssertionError, match="released before"):
        driver.insert(row)

from __future__ import annotations

import pytest

from tests.services.scheduler.cache.driver import ANN, Driver


def test_duplicate_pages_are_returned_with_their_canonical_ones() -> None:
    driver = Driver()
    prompt = [1, 2, 3, 4, 5, 6, 7]
    first, second = driver.admit(ANN, prompt), driver.admit(ANN, [*prompt[:5], 9, 9])
    driver.insert(first)
    insertion = driver.insert(second)
    assert insertion.duplicates.tolist() == second.table[:2].tolist()
    assert insertion.canonical.tolist() == first.table[:2].tolist()
    assert insertion.pages.tolist() == [*first.table[:2], second.table[2]]
    assert insertion.first_duplicate == 0


def test_first_duplicate_counts_from_the_start_of_the_table() -> None:
    driver = Driver()
    driver.serve(ANN, [1, 2, 3])
    first, second = driver.admit(ANN, [1, 2, 3, 4, 5]), driver.admit(ANN, [1, 2, 3, 4, 6])
    driver.insert(first)
    insertion = driver.insert(second)
    assert insertion.first_duplicate == 1
    assert insertion.duplicates.tolist() == [second.table[1]]


def test_duplicates_are_reported_once() -> None:
    driver = Driver()
    first, second = driver.admit(ANN, [1, 2, 3, 4]), driver.admit(ANN, [1, 2, 3, 4])
    driver.insert(first)
    assert len(driver.insert(second, 2).duplicates) == 1
    insertion = driver.insert(second)
    assert insertion.duplicates.tolist() == [second.table[1]]
    assert insertion.pages.tolist() == first.table.tolist()
    assert driver.insert(second).first_duplicate is None


def test_duplicate_pages_are_kept_while_a_row_references_them() -> None:
    driver = Driver(capacity=8)
    first, second = driver.admit(ANN, [1, 2, 3, 4]), driver.admit(ANN, [1, 2, 3, 4])
    driver.insert(first)
    driver.insert(second)
    driver.end(first)
    driver.cache.release(second.lock)
    driver.cache.flush()
    # The row was not repointed: nobody else may get its pages.
    others = driver.allocator.try_allocate(driver.allocator.free_pages)
    assert others is not None
    assert not set(others.tolist()) & set(second.table.tolist())


def test_repointed_row_holds_the_canonical_pages() -> None:
    driver = Driver(capacity=8)
    first, second = driver.admit(ANN, [1, 2, 3, 4]), driver.admit(ANN, [1, 2, 3, 4])
    driver.insert(first)
    insertion = driver.insert(second)
    second.table = insertion.pages
    assert driver.allocator.exchange(insertion.duplicates, insertion.canonical) == 2
    assert driver.allocator.counts[insertion.pages].tolist() == [3, 3]
    driver.end(first)
    driver.end(second)
    driver.cache.flush()
    assert driver.allocator.free_pages == 8


def test_released_lease_cannot_be_released_again() -> None:
    driver = Driver()
    row = driver.admit(ANN, [1, 2, 3])
    driver.cache.release(row.lock)
    with pytest.raises(AssertionError, match="released or replaced before"):
        driver.cache.release(row.lock)


def test_replaced_lease_is_dead() -> None:
    driver = Driver()
    row = driver.admit(ANN, [1, 2, 3, 4])
    old = row.lock
    driver.insert(row)
    with pytest.raises(AssertionError, match="released or replaced before"):
        driver.cache.release(old)
    with pytest.raises(AssertionError, match="released or replaced before"):
        driver.cache.insert(old, row.ids, row.table, 4)
    assert driver.violations() == []


def test_table_shorter_than_the_tokens_is_an_assertion() -> None:
    driver = Driver()
    row = driver.admit(ANN, [1, 2, 3, 4])
    with pytest.raises(AssertionError, match="page table"):
        driver.cache.insert(row.lock, row.ids, row.table[:1], 4)


def test_the_tree_keeps_its_pages_whatever_the_row_does_to_its_table() -> None:
    driver = Driver()
    row = driver.admit(ANN, [1, 2, 3, 4, 5])
    insertion = driver.insert(row)
    pages = row.table[:2].tolist()
    row.table[:] = 0
    assert insertion.pages.tolist() == pages
    assert driver.admit(ANN, [1, 2, 3, 4, 5]).lock.pages.tolist() == pages

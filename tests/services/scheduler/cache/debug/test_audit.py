from __future__ import annotations

from services.scheduler.cache.debug.audit import account, audit, repair
from tests.services.scheduler.cache.driver import ANN, BOB, Driver, int32


def test_the_four_terms_add_up_to_the_capacity() -> None:
    driver = Driver(capacity=10)
    driver.serve(ANN, [1, 2, 3, 4])
    row = driver.admit(BOB, [5, 6, 7, 8, 9])
    driver.insert(row, 4)
    accounting = account(driver.allocator, driver.cache, row_references=len(row.table))
    assert (accounting.free, accounting.soft_free, accounting.evictable, accounting.protected) == (5, 0, 2, 3)
    assert accounting.capacity == 10
    assert accounting.is_exact


def test_a_forgotten_row_shows_as_unaccounted_references() -> None:
    driver = Driver()
    row = driver.admit(ANN, [1, 2, 3])
    driver.cache.release(row.lock)
    accounting = account(driver.allocator, driver.cache, row_references=0)
    assert accounting.unaccounted_references == 2
    assert not accounting.is_exact


def test_an_audit_of_consistent_accounts_is_clean() -> None:
    driver = Driver()
    driver.serve(ANN, [1, 2, 3, 4])
    row = driver.admit(ANN, [1, 2, 3, 4, 5])
    assert audit(driver.allocator, driver.cache, {"row": row.table}).is_clean


def test_audit_names_a_leaked_page_and_its_owner() -> None:
    driver = Driver()
    driver.serve(ANN, [1, 2])
    pages = driver.allocator.try_allocate(1, owner=42)
    assert pages is not None
    report = audit(driver.allocator, driver.cache, {})
    (fault,) = report.leaked
    assert (fault.page, fault.references, fault.holders, fault.owner) == (pages[0], 1, 0, 42)
    assert not report.dangling


def test_audit_names_the_holders_of_a_page_with_one_reference_too_many() -> None:
    driver = Driver()
    row = driver.admit(ANN, [1, 2, 3])
    driver.insert(row)
    driver.allocator.retain(row.table[:1])
    (node,) = driver.cache.dump()
    (fault,) = audit(driver.allocator, driver.cache, {"request-1/0": row.table}).leaked
    assert (fault.rows, fault.nodes, fault.references) == (("request-1/0",), (node.node_id,), 3)


def test_audit_finds_a_page_that_a_row_names_without_a_reference() -> None:
    driver = Driver()
    row = driver.admit(ANN, [1, 2, 3])
    driver.allocator.release(row.table[1:])
    report = audit(driver.allocator, driver.cache, {"row": row.table})
    (fault,) = report.dangling
    assert not report.leaked
    assert (fault.page, fault.references, fault.rows) == (row.table[1], 0, ("row",))


def test_repair_frees_leaked_pages_and_keeps_the_cache() -> None:
    driver = Driver(capacity=8)
    driver.serve(ANN, [1, 2, 3, 4])
    driver.allocator.try_allocate(3)
    (node,) = driver.cache.dump()
    driver.allocator.retain(node.pages)
    assert repair(driver.allocator, driver.cache, {}) == 3
    assert driver.peek(ANN, [1, 2, 3, 4, 5]) == 4
    assert audit(driver.allocator, driver.cache, {}).is_clean
    assert driver.cache.flush() == 2
    assert driver.allocator.free_pages == 8


def test_repair_flushes_a_cache_whose_pages_others_may_have_written() -> None:
    driver = Driver(capacity=8)
    driver.serve(ANN, [1, 2, 3, 4])
    driver.allocator.release(int32([0]))
    repair(driver.allocator, driver.cache, {})
    assert driver.peek(ANN, [1, 2, 3, 4, 5]) == 0
    assert driver.allocator.free_pages == 8
    assert audit(driver.allocator, driver.cache, {}).is_clean


def test_repairing_consistent_accounts_changes_nothing() -> None:
    driver = Driver(capacity=8)
    driver.serve(ANN, [1, 2, 3, 4])
    driver.allocator.try_allocate(1)
    driver.allocator.release(int32([2]))
    assert repair(driver.allocator, driver.cache, {}) == 0
    assert driver.allocator.free_pages == 6

from __future__ import annotations

from dataclasses import replace

import pytest

from common.types import Subject, View
from services.scheduler.cache.config import CacheConfig
from services.scheduler.cache.types import Visibility
from tests.services.scheduler.cache.driver import ANN, BOB, CID, DAN, EVE, PLAIN, Driver

SYSTEM = [1, 2, 3, 4, 5, 6]


def user_aware(**changes: object) -> Driver:
    return Driver("user_aware", config=replace(PLAIN, **changes), capacity=200)  # type: ignore[arg-type]


def test_a_chain_with_enough_subjects_is_promoted_at_the_epoch_boundary() -> None:
    driver = user_aware()
    for user in (ANN, BOB, CID):
        driver.serve(user, [*SYSTEM, 7, 7])
    assert driver.tenants == []
    assert driver.peek(DAN, [*SYSTEM, 9]) == 0
    driver.next_epoch()
    assert driver.tenants == [[*SYSTEM, 7, 7]]
    assert driver.peek(DAN, [*SYSTEM, 9]) == 6
    driver.check()


def test_too_few_subjects_promote_nothing_however_often_they_ask() -> None:
    driver = user_aware()
    for _ in range(10):
        for user in (ANN, BOB):
            driver.serve(user, [*SYSTEM, 9])
        driver.next_epoch()
    assert driver.tenants == []
    assert driver.peek(CID, [*SYSTEM, 9]) == 0


def test_only_the_common_part_is_promoted_and_the_rest_stays_with_its_owners() -> None:
    driver = user_aware()
    for number, user in enumerate((ANN, BOB, CID)):
        driver.serve(user, [*SYSTEM, 10 + number, 0, 20 + number, 0])
    driver.next_epoch()
    assert driver.tenants == [SYSTEM]
    assert driver.peek(ANN, [*SYSTEM, 10, 0, 20, 0, 1]) == 10
    assert driver.peek(BOB, [*SYSTEM, 10, 0, 20, 0, 1]) == 6
    driver.check()


def test_each_branch_with_enough_subjects_is_promoted() -> None:
    driver = Driver("user_aware", config=PLAIN, capacity=400)
    for number in range(6):
        driver.serve(View(Subject("tenant", f"{number}")), [*SYSTEM, number % 2, 8, 30 + number, 0])
    driver.next_epoch()
    assert sorted(driver.tenants) == [[0, 8], SYSTEM, [1, 8]]
    driver.check()


def test_owners_duplicates_are_freed() -> None:
    driver = user_aware()
    for user in (ANN, BOB, CID):
        driver.serve(user, SYSTEM)
    assert driver.cache.held_references == 9
    free = driver.allocator.free_pages
    driver.next_epoch()
    assert driver.cache.held_references == 3
    assert driver.allocator.free_pages == free + 6


def test_running_rows_keep_their_own_pages_and_their_place() -> None:
    driver = user_aware()
    rows = [driver.admit(user, [*SYSTEM, 40 + number, 0]) for number, user in enumerate((ANN, BOB, CID))]
    for row in rows:
        driver.insert(row, 6)
    tables = [row.table.copy() for row in rows]
    driver.next_epoch()
    driver.check(*rows)
    assert driver.tenants == [SYSTEM]
    # All three lock the canonical copy; nothing that a row names was freed.
    (public,) = [node for node in driver.cache.dump() if node.owner is None]
    assert public.lock_ref == 3
    assert driver.cache.evict(100) == 0
    for row, table in zip(rows, tables, strict=True):
        assert row.table.tolist() == table.tolist()
        assert (driver.allocator.counts[table] > 0).all()
        insertion = driver.insert(row)
        assert len(insertion.duplicates) == 0
        driver.end(row)
    assert driver.peek(ANN, [*SYSTEM, 40, 0, 1]) == 8
    driver.check()


def test_locks_and_children_of_all_owners_are_carried_over() -> None:
    driver = user_aware()
    for number, user in enumerate((ANN, BOB, CID)):
        driver.serve(user, [*SYSTEM, 50 + number, 0])
    row = driver.admit(BOB, [*SYSTEM, 51, 0, 1])
    driver.next_epoch()
    driver.check(row)
    locked = [node.token_ids.tolist() for node in driver.cache.dump() if node.lock_ref]
    assert locked == [SYSTEM, [51, 0]]
    driver.end(row)
    assert driver.cache.protected_pages == 0
    driver.check()


def test_generated_tokens_are_no_evidence() -> None:
    driver = user_aware()
    for user in (ANN, BOB, CID):
        driver.serve(user, SYSTEM, prompt_tokens=4)
    driver.next_epoch()
    assert driver.tenants == [[1, 2, 3, 4]]
    assert driver.peek(ANN, [*SYSTEM, 9]) == 6


def test_page_that_is_half_generated_is_no_evidence() -> None:
    driver = user_aware()
    for user in (ANN, BOB, CID):
        driver.serve(user, SYSTEM, prompt_tokens=5)
    driver.next_epoch()
    assert driver.tenants == [[1, 2, 3, 4]]


def test_evidence_expires() -> None:
    driver = user_aware(promotion_epochs=3)
    driver.serve(ANN, SYSTEM)
    driver.serve(BOB, SYSTEM)
    driver.next_epoch(4)
    driver.serve(CID, SYSTEM)
    driver.next_epoch()
    assert driver.tenants == []
    driver.serve(DAN, SYSTEM)
    driver.serve(EVE, SYSTEM)
    driver.next_epoch()
    assert driver.tenants == [SYSTEM]


def test_an_opted_out_subject_is_no_evidence_but_uses_shared_prefixes() -> None:
    driver = user_aware()
    driver.serve(ANN, [*SYSTEM, 8, 8], may_promote=False)
    driver.serve(BOB, SYSTEM)
    driver.serve(CID, SYSTEM)
    driver.next_epoch()
    assert driver.tenants == []
    driver.serve(DAN, SYSTEM)
    driver.next_epoch()
    assert driver.tenants == [SYSTEM]
    assert driver.peek(ANN, [*SYSTEM, 8, 8, 1]) == 8
    driver.check()


def test_request_without_cache_is_no_evidence() -> None:
    driver = user_aware()
    driver.serve(ANN, SYSTEM)
    driver.serve(BOB, SYSTEM)
    row = driver.admit(CID, SYSTEM, may_use_cache=False)
    driver.insert(row)
    driver.end(row)
    driver.next_epoch()
    assert driver.tenants == []


def test_own_hits_are_neither_counted_nor_new_evidence() -> None:
    driver = user_aware(promotion_epochs=1)
    driver.serve(ANN, SYSTEM)
    for _ in range(3):
        driver.serve(ANN, [*SYSTEM, 9])
        driver.next_epoch()
    driver.serve(BOB, SYSTEM)
    driver.serve(CID, SYSTEM)
    driver.next_epoch()
    assert driver.tenants == []
    assert all(node.hits == 0 for node in driver.cache.dump())


@pytest.mark.parametrize("mode", ["isolated", "isolated_pinned"])
def test_isolated_modes_promote_nothing(mode: str) -> None:
    driver = Driver(mode, capacity=200)  # type: ignore[arg-type]  # from the names
    for user in (ANN, BOB, CID, DAN):
        driver.serve(user, SYSTEM)
    driver.next_epoch()
    assert driver.tenants == []
    assert driver.peek(EVE, [*SYSTEM, 1]) == 0


def test_later_users_use_the_shared_copy_and_take_no_memory() -> None:
    driver = user_aware()
    for user in (ANN, BOB, CID):
        driver.serve(user, SYSTEM)
    driver.next_epoch()
    free = driver.allocator.free_pages
    for number in range(20):
        assert driver.serve(View(Subject("tenant", f"later {number}")), [*SYSTEM, 9]) == 6
    assert driver.allocator.free_pages == free


def test_epochs_only_advance() -> None:
    driver = Driver("user_aware", config=CacheConfig())
    driver.cache.advance(5)
    driver.cache.advance(5)
    assert driver.cache.epoch == 5
    with pytest.raises(AssertionError, match="only advance"):
        driver.cache.advance(4)


def test_enough_evidence_is_shared_within_an_epoch_without_closing_its_windows() -> None:
    driver = user_aware()
    driver.serve(ANN, SYSTEM)
    driver.serve(BOB, SYSTEM)
    driver.cache.share()
    assert driver.tenants == []
    driver.serve(CID, SYSTEM)
    assert driver.peek(DAN, [*SYSTEM, 1]) == 0
    driver.cache.share()
    assert driver.serve(DAN, [*SYSTEM, 1]) == len(SYSTEM)
    driver.cache.share()
    assert driver.cache.epoch == 0
    assert [node.hits for node in driver.cache.dump() if node.visibility is Visibility.TENANT] == [1]

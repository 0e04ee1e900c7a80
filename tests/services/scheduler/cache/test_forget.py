from __future__ import annotations

from services.scheduler.cache.interface import CacheEventKind
from tests.services.scheduler.cache.driver import ANN, BOB, CID, PLAIN, Driver

SYSTEM = [1, 2, 3, 4, 5, 6]


def test_all_that_is_private_to_a_principal_goes_at_once() -> None:
    driver = Driver("user_aware", config=PLAIN)
    driver.serve(ANN, [*SYSTEM, 7, 7])
    driver.serve(ANN, [9, 9])
    driver.serve(BOB, SYSTEM)
    assert driver.cache.forget(ANN) == 5
    assert driver.edges() == [SYSTEM]
    assert driver.cache.events.sequence == 5
    assert driver.radix.events.count(CacheEventKind.EVICTED) == 2
    driver.check()


def test_running_rows_go_on_and_leave_nothing() -> None:
    driver = Driver("user_aware", config=PLAIN)
    driver.serve(ANN, SYSTEM)
    rows = [driver.admit(ANN, [*SYSTEM, 7, 7]), driver.admit(ANN, [8, 8, 8, 8]), driver.admit(BOB, SYSTEM)]
    driver.insert(rows[1], 2)
    driver.cache.forget(ANN)
    driver.check(*rows)
    for row in rows:
        assert (driver.allocator.counts[row.table] > 0).all()
        driver.insert(row)
        driver.end(row)
    assert driver.edges() == [SYSTEM]
    assert driver.edges(ANN) == []
    driver.check()


def test_public_part_stays_and_the_name_goes() -> None:
    driver = Driver("user_aware", config=PLAIN)
    for user in (ANN, BOB, CID):
        driver.serve(user, [*SYSTEM, 7, 7] if user is ANN else SYSTEM)
    driver.next_epoch()
    driver.cache.forget(ANN)
    (node,) = driver.cache.dump()
    assert (node.token_ids.tolist(), node.creators) == (SYSTEM, 2)
    driver.check()


def test_evidence_of_the_forgotten_does_not_count() -> None:
    driver = Driver("user_aware", config=PLAIN)
    for user in (ANN, BOB, CID):
        driver.serve(user, SYSTEM)
    driver.cache.forget(CID)
    driver.next_epoch()
    assert driver.public == []


def test_unknown_principal_is_forgotten_easily() -> None:
    driver = Driver("user_aware", config=PLAIN)
    assert driver.cache.forget(ANN) == 0
    assert driver.radix.store.accounts.all() == []

from __future__ import annotations

from services.scheduler.cache.types import CacheEventKind
from tests.services.scheduler.cache.driver import ANN, BOB, CID, PLAIN, Driver

SYSTEM = [1, 2, 3, 4, 5, 6]


def test_all_private_nodes_of_a_forgotten_subject_go_at_once() -> None:
    driver = Driver("user_aware", config=PLAIN)
    driver.serve(ANN, [*SYSTEM, 7, 7])
    driver.serve(ANN, [9, 9])
    driver.serve(BOB, SYSTEM)
    assert driver.cache.forget(ANN.subject) == 5
    assert driver.edges() == [SYSTEM]
    assert driver.cache.events.sequence == 5
    assert driver.radix.events.count(CacheEventKind.EVICTED) == 2
    driver.check()


def test_running_rows_of_a_forgotten_subject_continue_and_cache_nothing() -> None:
    driver = Driver("user_aware", config=PLAIN)
    driver.serve(ANN, SYSTEM)
    rows = [driver.admit(ANN, [*SYSTEM, 7, 7]), driver.admit(ANN, [8, 8, 8, 8]), driver.admit(BOB, SYSTEM)]
    driver.insert(rows[1], 2)
    driver.cache.forget(ANN.subject)
    driver.check(*rows)
    for row in rows:
        assert (driver.allocator.counts[row.table] > 0).all()
        driver.insert(row)
        driver.end(row)
    assert driver.edges() == [SYSTEM]
    assert driver.edges(ANN) == []
    driver.check()


def test_forgetting_keeps_a_shared_part_and_removes_its_creator() -> None:
    driver = Driver("user_aware", config=PLAIN)
    for user in (ANN, BOB, CID):
        driver.serve(user, [*SYSTEM, 7, 7] if user is ANN else SYSTEM)
    driver.next_epoch()
    driver.cache.forget(ANN.subject)
    (node,) = driver.cache.dump()
    assert (node.token_ids.tolist(), node.creators) == (SYSTEM, 2)
    driver.check()


def test_evidence_of_a_forgotten_subject_does_not_count() -> None:
    driver = Driver("user_aware", config=PLAIN)
    for user in (ANN, BOB, CID):
        driver.serve(user, SYSTEM)
    driver.cache.forget(CID.subject)
    driver.next_epoch()
    assert driver.tenants == []


def test_session_alone_can_be_forgotten() -> None:
    driver = Driver("user_aware", config=PLAIN)
    driver.serve(ANN, [*SYSTEM, 7, 7], session="monday")
    driver.serve(ANN, [*SYSTEM, 7, 7, 8, 8], session="monday")
    driver.serve(ANN, [*SYSTEM, 9, 9], session="tuesday")
    driver.serve(BOB, SYSTEM, session="monday")
    assert driver.cache.forget(ANN.subject, "monday") == 2
    assert [driver.peek(ANN, [*SYSTEM, *end, 0]) for end in ([7, 7], [9, 9])] == [6, 8]
    assert driver.peek(BOB, [*SYSTEM, 0]) == 6
    driver.check()
    assert driver.cache.forget(ANN.subject, "tuesday") == 4
    assert driver.edges(ANN) == []


def test_pages_also_used_without_a_session_are_forgotten_only_with_the_subject() -> None:
    driver = Driver("user_aware", config=PLAIN)
    driver.serve(ANN, [*SYSTEM, 7, 7], session="monday")
    driver.serve(ANN, [*SYSTEM, 8])
    assert driver.cache.forget(ANN.subject, "monday") == 1
    assert driver.edges(ANN) == [SYSTEM]
    assert driver.cache.forget(ANN.subject) == 3
    driver.check()


def test_running_rows_of_a_forgotten_session_leave_nothing_and_others_go_on() -> None:
    driver = Driver("user_aware", config=PLAIN)
    rows = [driver.admit(ANN, [*SYSTEM, 7, 7, number, 0], session=name) for number, name in enumerate(("one", "other"))]
    for row in rows:
        insertion = driver.insert(row, 8)
        if insertion.first_duplicate is not None:
            row.table[insertion.first_duplicate : len(insertion.pages)] = insertion.pages[insertion.first_duplicate :]
            driver.allocator.exchange(insertion.duplicates, insertion.canonical)
    driver.cache.forget(ANN.subject, "one")
    driver.check(*rows)
    for row in rows:
        driver.insert(row)
        driver.end(row)
    assert driver.edges(ANN) == [[*SYSTEM, 7, 7, 1, 0]]
    driver.check()


def test_a_prefix_shared_by_two_sessions_goes_when_both_are_forgotten() -> None:
    driver = Driver("user_aware", config=PLAIN)
    driver.serve(ANN, SYSTEM, session="one")
    rows = [driver.admit(ANN, [*SYSTEM, number, 0], session=name) for number, name in enumerate(("one", "other"))]
    driver.cache.forget(ANN.subject, "other")
    assert driver.edges(ANN) == [SYSTEM]
    driver.cache.forget(ANN.subject, "one")
    assert driver.edges(ANN) == []
    driver.check(*rows)
    for row in rows:
        driver.end(row)
    assert driver.allocator.free_pages == driver.allocator.capacity


def test_name_of_a_session_means_nothing_to_other_users() -> None:
    driver = Driver("user_aware", config=PLAIN)
    driver.serve(ANN, SYSTEM, session="monday")
    assert driver.cache.forget(BOB.subject, "monday") == driver.cache.forget(ANN.subject, "unknown") == 0
    assert driver.edges(ANN) == [SYSTEM]


def test_a_prompt_used_by_very_many_sessions_belongs_to_none() -> None:
    driver = Driver("user_aware", config=PLAIN, capacity=200)
    for number in range(100):
        driver.serve(ANN, [*SYSTEM, number, 0], session=f"{number}")
    assert all(driver.cache.forget(ANN.subject, f"{number}") == 1 for number in range(63))
    assert driver.peek(ANN, [*SYSTEM, 0]) == 6


def test_forgetting_an_unknown_subject_does_nothing() -> None:
    driver = Driver("user_aware", config=PLAIN)
    assert driver.cache.forget(ANN.subject) == 0
    assert driver.radix.store.accounts.all() == []

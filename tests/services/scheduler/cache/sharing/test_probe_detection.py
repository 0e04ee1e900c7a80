from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.settings import CacheSettings
from common.types import Subject, View
from services.scheduler.cache.factory import resolve_cache
from tests.services.scheduler.cache.driver import ANN, BOB, CID, DAN, EVE, PLAIN, Driver, with_rules

SECRET = [1, 2, 3, 4, 5, 6]
FAY = View(Subject("tenant", "fay"))


def published(**changes: Any) -> Driver:
    """Ann, Bob and Cid have made something public that should not be."""
    driver = Driver("user_aware", config=with_rules(PLAIN, **changes), capacity=400)
    for user in (ANN, BOB, CID):
        driver.serve(user, [*SECRET, 7, 7])
    driver.next_epoch()
    assert driver.tenants == [[*SECRET, 7, 7]]
    return driver


def probe(driver: Driver, user: View, times: int = 20) -> int:
    """Ask for the secret, compute nothing of it; return the hits."""
    hits = 0
    for _ in range(times):
        row = driver.admit(user, [*SECRET, 7, 7, 9])
        hits += row.lock.matched_tokens > 0
        driver.end(row)
    return hits


def test_hits_count_once_per_request_and_node() -> None:
    driver = published()
    driver.serve(DAN, [*SECRET, 8])
    driver.serve(DAN, [*SECRET, 7, 7, 8])
    driver.serve(EVE, [*SECRET, 7, 7, 8])
    counts = [(node.token_ids.tolist(), node.hits, node.users) for node in driver.cache.dump() if node.owner is None]
    assert counts == [(SECRET, 3, 2), ([7, 7], 2, 2)]


def test_repeated_commits_of_a_request_are_no_hits() -> None:
    driver = published()
    row = driver.admit(DAN, [*SECRET, 9])
    again = driver.admit(DAN, [*SECRET, 9], repeated=True)
    assert [node.hits for node in driver.cache.dump() if node.owner is None] == [1, 0]
    driver.end(row)
    driver.end(again)


def test_a_peek_is_not_counted_as_a_hit() -> None:
    driver = published()
    for _ in range(100):
        driver.peek(DAN, [*SECRET, 9])
    assert [node.hits for node in driver.cache.dump()] == [0]


def test_creators_hits_are_not_counted() -> None:
    driver = published()
    for _ in range(100):
        driver.serve(ANN, [*SECRET, 7, 7, 9])
    assert [node.hits for node in driver.cache.dump()] == [0]


def test_prober_of_a_quiet_node_is_quarantined_after_one_window() -> None:
    driver = published()
    driver.next_epoch()
    assert probe(driver, DAN) == 20
    driver.next_epoch()
    assert probe(driver, DAN) == 0
    assert driver.peek(EVE, [*SECRET, 9]) == 6
    assert driver.peek(ANN, [*SECRET, 9]) == 6
    assert driver.edges(DAN) == []
    driver.check()


def test_prober_of_a_quiet_node_is_quarantined_after_one_window_if_promotion_requires_more_subjects() -> None:
    profile = resolve_cache(CacheSettings(promotion_subjects=8)).profile
    driver = Driver("user_aware", config=replace(PLAIN, promotion_subjects=8, profile=profile), capacity=400)
    for number in range(8):
        driver.serve(View(Subject("tenant", f"creator {number}")), [*SECRET, 7, 7])
    driver.next_epoch()
    assert driver.tenants == [[*SECRET, 7, 7]]
    driver.next_epoch()
    assert probe(driver, DAN) == 20
    driver.next_epoch()
    assert probe(driver, DAN) == 0
    assert driver.peek(EVE, [*SECRET, 9]) == 6
    driver.check()


def test_steady_prober_is_quarantined_after_two_windows() -> None:
    driver = published(jump_factor=1_000_000)
    assert probe(driver, DAN) == 20
    driver.next_epoch()
    assert probe(driver, DAN) == 20
    driver.next_epoch()
    assert probe(driver, DAN) == 0


def test_few_hits_do_not_lead_to_quarantine() -> None:
    driver = published()
    for _ in range(10):
        assert probe(driver, DAN, times=15) == 15
        driver.next_epoch()


def test_a_quarantined_subject_sees_a_prefix_again_after_computing_it() -> None:
    driver = published()
    probe(driver, DAN)
    driver.next_epoch()
    assert driver.serve(DAN, [*SECRET, 7, 7, 9]) == 0
    assert driver.peek(DAN, [*SECRET, 7, 7, 9]) == 8
    assert driver.tenants == [[*SECRET, 7, 7]]
    # It is one of the creators now, and its hits are no probes.
    probe(driver, DAN, times=100)
    driver.next_epoch()
    assert probe(driver, DAN) == 20
    driver.check()


def test_a_quarantined_subject_sees_a_part_again_after_computing_it() -> None:
    driver = published()
    probe(driver, DAN)
    driver.next_epoch()
    driver.serve(DAN, [1, 2, 9, 9])
    assert driver.peek(DAN, [*SECRET, 9]) == 2
    assert driver.peek(EVE, [*SECRET, 7, 7, 9]) == 8
    driver.check()


def test_hot_healthy_prompt_is_not_demoted() -> None:
    driver = published()
    for _ in range(3):
        for user in (DAN, EVE, FAY):
            probe(driver, user, times=2_000)
        driver.next_epoch()
    assert driver.tenants == [[*SECRET, 7, 7]]
    assert all(node.quarantined == 0 for node in driver.cache.dump())
    assert probe(driver, DAN) == 20


def test_frequent_hits_by_creators_alone_demote_nothing() -> None:
    driver = published()
    for _ in range(3):
        for user in (ANN, BOB, CID):
            probe(driver, user, times=1000)
        driver.next_epoch()
    assert driver.tenants == [[*SECRET, 7, 7]]


def test_several_probers_demote_a_prefix_for_all_but_its_creators() -> None:
    driver = published()
    probe(driver, DAN)
    driver.next_epoch()
    probe(driver, EVE)
    references = driver.cache.held_references
    driver.next_epoch()
    assert driver.tenants == []
    for user in (DAN, EVE, FAY):
        assert driver.peek(user, [*SECRET, 7, 7, 9]) == 0
    free = driver.allocator.free_pages
    for user in (ANN, BOB, CID):
        assert driver.peek(user, [*SECRET, 7, 7, 9]) == 8
    # They keep it without copying.
    assert driver.cache.held_references == 3 * references
    assert driver.allocator.free_pages == free == 400 - references
    assert {node.generation for node in driver.cache.dump()} == {1}
    driver.check()


def test_a_demoted_prefix_needs_twice_as_many_subjects() -> None:
    driver = published()
    probe(driver, DAN)
    probe(driver, EVE)
    driver.next_epoch()
    assert driver.tenants == []
    for number in range(2):
        driver.serve(View(Subject("tenant", f"{number}")), SECRET)
    driver.next_epoch()
    assert driver.tenants == []
    driver.serve(View(Subject("tenant", "sixth")), SECRET)
    driver.next_epoch()
    assert driver.tenants == [SECRET]
    assert [node.generation for node in driver.cache.dump() if node.owner is None] == [1]
    driver.check()


def test_a_demotion_is_remembered_after_all_its_nodes_are_gone() -> None:
    driver = published()
    probe(driver, DAN)
    probe(driver, EVE)
    driver.next_epoch()
    driver.cache.flush()
    for user in (ANN, BOB, CID, FAY):
        driver.serve(user, [*SECRET, 7, 7])
    driver.next_epoch()
    assert driver.tenants == []


def test_rows_of_creators_go_on_through_a_demotion() -> None:
    driver = published()
    mine = driver.admit(ANN, [*SECRET, 7, 7, 8, 8])
    probe(driver, DAN)
    probe(driver, EVE)
    driver.next_epoch()
    driver.check(mine)
    driver.insert(mine)
    driver.end(mine)
    assert driver.peek(ANN, [*SECRET, 7, 7, 8, 8, 1]) == 10
    driver.check()


def test_running_rows_keep_their_pages_through_a_demotion_and_leak_none() -> None:
    driver = published()
    theirs = driver.admit(DAN, [*SECRET, 7, 7, 8, 8])
    driver.insert(theirs)
    driver.serve(DAN, [*SECRET, 6, 6])
    probe(driver, DAN)
    probe(driver, EVE)
    driver.next_epoch()
    driver.check(theirs)
    driver.cache.flush()
    assert (driver.allocator.counts[theirs.table] > 0).all()
    driver.check(theirs)
    assert len(driver.insert(theirs).duplicates) == 0
    driver.end(theirs)
    assert driver.peek(DAN, [*SECRET, 7, 7, 8, 8, 1]) == 0
    driver.cache.flush()
    assert driver.allocator.free_pages == 400


def test_private_continuations_stay_with_creators_and_go_with_others() -> None:
    driver = published()
    driver.serve(ANN, [*SECRET, 8, 8])
    driver.serve(DAN, [*SECRET, 6, 6])
    probe(driver, DAN)
    probe(driver, EVE)
    driver.next_epoch()
    assert driver.peek(ANN, [*SECRET, 8, 8, 1]) == 8
    assert driver.peek(DAN, [*SECRET, 6, 6, 1]) == 0
    assert driver.edges(DAN) == []
    driver.check()


def test_a_subject_that_tries_many_continuations_is_quarantined() -> None:
    driver = published(continuation_limit=30, hit_min=1_000)
    for number in range(30):
        row = driver.admit(DAN, [*SECRET, 100 + number, 0, 1])
        driver.end(row)
        row = driver.admit(EVE, [*SECRET, 100 + number % 29, 0, 1])
        driver.end(row)
    driver.next_epoch()
    assert driver.peek(DAN, [*SECRET, 9]) == 0
    assert driver.peek(EVE, [*SECRET, 9]) == 6


@pytest.mark.parametrize("gap", [2, 7])
def test_windows_that_are_not_consecutive_are_no_sign(gap: int) -> None:
    driver = published(jump_factor=1_000_000)
    for _ in range(5):
        probe(driver, DAN)
        driver.next_epoch(gap)
    assert probe(driver, DAN) == 20

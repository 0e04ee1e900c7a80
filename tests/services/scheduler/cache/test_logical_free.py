from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.types import Subject, View
from services.scheduler.cache.config import EvictionPolicy
from services.scheduler.cache.types import CacheEventKind, NodeState
from tests.services.scheduler.cache.driver import ANN, BOB, CID, DAN, PLAIN, Driver


def driver_with(name: str = "isolated", capacity: int = 64, **changes: Any) -> Driver:
    return Driver(name, capacity=capacity, config=replace(PLAIN, **changes))  # type: ignore[arg-type]  # from the names


def soft(driver: Driver) -> list[list[int]]:
    return [node.token_ids.tolist() for node in driver.cache.dump() if node.state is NodeState.SOFT_FREE]


class TestSoftFree:
    def test_quota_marks_own_cold_pages_as_free_and_leaves_them_to_be_found(self) -> None:
        driver = driver_with(quota_share=4 / 64)
        driver.serve(ANN, [1, 2, 3, 4])
        driver.serve(ANN, [5, 6, 7, 8])
        driver.serve(ANN, [9, 10])
        assert soft(driver) == [[3, 4]]
        assert driver.cache.soft_free_pages == 1
        assert driver.peek(ANN, [1, 2, 3, 4, 0]) == 4
        driver.check()

    def test_revival_costs_nothing(self) -> None:
        driver = driver_with(quota_share=4 / 64)
        for ids in ([1, 2, 3, 4], [5, 6, 7, 8], [9, 10]):
            driver.serve(ANN, ids)
        free = driver.allocator.free_pages
        row = driver.admit(ANN, [1, 2, 3, 4, 0])
        assert row.lock.matched_tokens == 4
        assert soft(driver) == []
        assert driver.allocator.free_pages == free - 1
        driver.check(row)

    def test_a_partial_match_revives_only_the_matched_pages(self) -> None:
        driver = driver_with(headroom_share=0.5, capacity=12)
        driver.serve(ANN, list(range(20)))
        driver.cache.evict(2)
        assert driver.cache.soft_free_pages == 6
        row = driver.admit(ANN, [*range(8), 99])
        assert row.lock.matched_tokens == 8
        assert driver.cache.soft_free_pages == 4
        driver.check(row)

    def test_soft_free_pages_are_reclaimed_first_and_oldest_first(self) -> None:
        driver = driver_with(quota_share=4 / 64)
        driver.serve(BOB, [1, 2])
        for first in (10, 20, 30, 40, 50, 60):
            driver.serve(ANN, [first, 0])
        assert soft(driver) == [[10, 0], [20, 0]]
        assert driver.cache.evict(1) == 1
        assert soft(driver) == [[20, 0]]
        assert driver.peek(BOB, [1, 2, 3]) == 2

    def test_eviction_soft_frees_pages_ahead_of_need(self) -> None:
        driver = driver_with(headroom_share=0.25, capacity=16)
        for first in range(16):
            driver.serve(ANN, [first, 0])
        assert driver.cache.evict(2) == 2
        assert (driver.allocator.free_pages, driver.cache.soft_free_pages) == (2, 4)
        driver.check()

    def test_allocation_may_count_on_soft_free_pages(self) -> None:
        driver = driver_with(headroom_share=0.25, capacity=16)
        for first in range(16):
            driver.serve(ANN, [first, 0])
        driver.cache.evict(1)
        assert driver.serve(BOB, list(range(100, 132))) == 0
        assert driver.peek(BOB, list(range(100, 132))) == 30

    def test_each_change_emits_an_event(self) -> None:
        driver = driver_with(quota_share=2 / 64)
        kinds: list[CacheEventKind] = []
        driver.cache.events.subscribe(lambda event: kinds.append(event.kind))
        for first in (10, 20, 30):
            driver.serve(ANN, [first, 0])
        driver.serve(ANN, [10, 0, 5])
        driver.cache.evict(1)
        assert kinds == [
            CacheEventKind.INSERTED,
            CacheEventKind.INSERTED,
            CacheEventKind.INSERTED,
            CacheEventKind.SOFT_FREED,
            CacheEventKind.REVIVED,
            CacheEventKind.SOFT_FREED,
            CacheEventKind.RECLAIMED,
        ]


class TestShares:
    def test_a_flood_of_one_subject_evicts_no_other_subject_s_pages(self) -> None:
        driver = driver_with(capacity=100, quota_share=0.3)
        modest = [View(Subject("tenant", f"modest {number}")) for number in range(8)]
        for number, user in enumerate(modest):
            driver.serve(user, [number, 1, number, 2, number, 3])
        for number in range(500):
            driver.serve(ANN, [1000 + number, 0, 1, 2, 3, 4])
        assert all(driver.peek(user, [n, 1, n, 2, n, 3, 0]) == 6 for n, user in enumerate(modest))
        driver.check()

    def test_most_over_quota_goes_first(self) -> None:
        driver = driver_with(capacity=40, quota_share=0.25)
        # Rows in flight can exceed the quota; when they end, the rest is soft-free at once.
        rows = [
            driver.admit(user, list(range(first, first + 2 * pages)))
            for user, first, pages in ((BOB, 0, 12), (ANN, 100, 16), (CID, 200, 4))
        ]
        for row in rows:
            driver.insert(row)
        for row in rows:
            driver.end(row)
        live = {
            user: sum(len(node.pages) for node in driver.cache.dump(user) if node.state is NodeState.LIVE)
            for user in (ANN, BOB, CID)
        }
        assert live == {ANN: 10, BOB: 10, CID: 4}

    def test_pages_within_an_active_subject_s_floor_are_evicted_last(self) -> None:
        driver = driver_with(capacity=20, floor_share=0.2, active_epochs=2)
        driver.serve(ANN, [1, 2, 3, 4])
        for first in range(10, 26):
            driver.serve(BOB, [first, 0])
        assert driver.cache.evict(12) == 12
        assert driver.peek(ANN, [1, 2, 3, 4, 5]) == 4
        # Now both are within their floors, and recency decides.
        driver.cache.evict(2)
        assert driver.peek(ANN, [1, 2, 3, 4, 5]) == 0

    def test_floor_ends_with_activity(self) -> None:
        driver = driver_with(capacity=20, floor_share=0.2, active_epochs=2)
        driver.serve(ANN, [1, 2, 3, 4])
        driver.next_epoch(3)
        for first in range(10, 26):
            driver.serve(BOB, [first, 0])
        driver.cache.evict(2)
        assert driver.peek(ANN, [1, 2, 3, 4, 5]) == 0
        assert driver.cache.evictable_pages == 16

    def test_a_subject_s_quota_does_not_depend_on_others_holding_the_same_pages(self) -> None:
        driver = driver_with("user_aware", quota_share=4 / 64, promotion_subjects=3)
        for user in (ANN, BOB):
            driver.serve(user, [1, 2, 3, 4])
        driver.next_epoch()
        assert driver.allocator.free_pages == 62
        driver.serve(ANN, [5, 6, 7, 8])
        driver.serve(ANN, [9, 10])
        assert driver.cache.soft_free_pages == 0
        assert [node.state for node in driver.cache.dump(ANN)].count(NodeState.SOFT_FREE) == 1


class TestOrder:
    def test_older_epochs_go_before_newer_ones(self) -> None:
        driver = driver_with()
        driver.serve(ANN, [1, 2])
        driver.next_epoch()
        driver.serve(BOB, [3, 4])
        driver.serve(CID, [5, 6])
        driver.cache.evict(1)
        assert driver.edges() == [[3, 4], [5, 6]]

    def test_public_nodes_outlive_private_ones_by_their_users(self) -> None:
        driver = driver_with("user_aware", capacity=200)
        for user in (ANN, BOB, CID):
            driver.serve(user, [1, 2, 3, 4])
        driver.next_epoch()
        for number in range(8):
            driver.serve(View(Subject("tenant", f"{number}")), [1, 2, 3, 4, 5])
        driver.next_epoch()
        driver.serve(DAN, [1, 2, 3, 4, 5])
        driver.next_epoch()
        driver.serve(DAN, [7, 8])
        driver.cache.evict(1)
        assert driver.edges() == [[1, 2, 3, 4]]
        driver.serve(DAN, [7, 8])
        driver.next_epoch(30)
        driver.serve(DAN, [9, 9])
        driver.cache.evict(2)
        assert driver.edges() == [[1, 2], [9, 9]]

    @pytest.mark.parametrize(
        ("policy", "first"),
        [(EvictionPolicy.LRU, [3, 4]), (EvictionPolicy.LFU, [5, 6]), (EvictionPolicy.SLRU, [5, 6])],
    )
    def test_eviction_policies_weigh_uses_differently(self, policy: EvictionPolicy, first: list[int]) -> None:
        driver = driver_with(eviction=policy)
        for ids in ([3, 4], [3, 4, 0], [3, 4, 0], [3, 4, 0], [5, 6]):
            driver.serve(ANN, ids)
        driver.cache.evict(1)
        assert first not in driver.edges()

    def test_low_priority_pages_are_evicted_first_under_the_priority_policy_only(self) -> None:
        for policy, left in ((EvictionPolicy.PRIORITY, [1, 2]), (EvictionPolicy.LRU, [3, 4])):
            driver = driver_with(eviction=policy)
            driver.serve(ANN, [1, 2], priority=5)
            driver.serve(ANN, [3, 4], priority=1)
            driver.cache.evict(1)
            assert driver.edges() == [left]

    def test_use_by_a_request_of_high_priority_raises_the_path(self) -> None:
        driver = driver_with(eviction=EvictionPolicy.PRIORITY)
        driver.serve(ANN, [1, 2])
        driver.serve(ANN, [3, 4], priority=1)
        driver.serve(ANN, [1, 2, 0], priority=2)
        driver.cache.evict(1)
        assert driver.edges() == [[1, 2]]


def test_accounts_of_invented_subjects_are_removed() -> None:
    driver = driver_with(capacity=16)
    for number in range(1000):
        driver.serve(View(Subject("tenant", f"{number}")), [number, 0, 1, 2])
        driver.peek(View(Subject("tenant", f"peek {number}")), [number, 0, 1, 2])
    assert len(driver.radix.store.accounts) <= 8
    driver.cache.flush()
    assert len(driver.radix.store.accounts) == 0
    driver.check()

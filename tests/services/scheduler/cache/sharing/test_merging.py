from __future__ import annotations

from dataclasses import replace
from typing import Any

from common.types import Subject, View
from services.scheduler.cache.types import CacheEventKind
from tests.services.scheduler.cache.driver import ANN, BOB, CID, PLAIN, Driver

DOCUMENT = list(range(20))


def driver_with(**changes: Any) -> Driver:
    return Driver("user_aware", config=replace(PLAIN, **changes), capacity=200)


class TestPages:
    def test_equal_private_pages_become_one_at_the_epoch_boundary(self) -> None:
        driver = driver_with()
        driver.serve(ANN, DOCUMENT)
        driver.serve(BOB, DOCUMENT)
        assert driver.allocator.free_pages == 180
        driver.next_epoch()
        assert driver.allocator.free_pages == 190
        assert driver.tenants == []
        assert driver.cache.held_references == 20
        driver.check()

    def test_merging_does_not_change_views(self) -> None:
        driver = driver_with()
        driver.serve(ANN, [*DOCUMENT, 50, 51])
        driver.serve(BOB, [*DOCUMENT, 60, 61])
        driver.next_epoch()
        assert driver.peek(ANN, [*DOCUMENT, 50, 51, 0]) == 22
        assert driver.peek(ANN, [*DOCUMENT, 60, 61, 0]) == 20
        assert driver.peek(CID, [*DOCUMENT, 0]) == 0
        assert driver.allocator.free_pages == 200 - 12

    def test_merged_pages_are_counted_once(self) -> None:
        driver = driver_with()
        driver.serve(ANN, DOCUMENT)
        driver.serve(BOB, DOCUMENT)
        driver.next_epoch()
        assert driver.cache.evictable_pages == 10
        row = driver.admit(ANN, [*DOCUMENT, 0])
        assert (driver.cache.evictable_pages, driver.cache.protected_pages) == (0, 10)
        # Bob's nodes go, and the pages stay, as Ann reads them.
        assert driver.cache.evict(5) == 0
        assert driver.peek(BOB, [*DOCUMENT, 0]) == 0
        driver.check(row)
        driver.end(row)
        assert driver.cache.evict(100) == 10
        driver.check()

    def test_page_is_free_when_the_last_of_its_nodes_is_gone(self) -> None:
        driver = driver_with()
        driver.serve(ANN, DOCUMENT)
        driver.serve(BOB, DOCUMENT)
        driver.next_epoch()
        assert driver.cache.forget(ANN.subject) == 0
        assert driver.peek(BOB, [*DOCUMENT, 0]) == 20
        assert driver.cache.forget(BOB.subject) == 10
        driver.check()

    def test_strict_numerics_never_merges(self) -> None:
        driver = driver_with(strict_numerics=True)
        driver.serve(ANN, DOCUMENT)
        driver.serve(BOB, DOCUMENT)
        driver.next_epoch()
        assert driver.allocator.free_pages == 180

    def test_pages_in_use_are_merged_later(self) -> None:
        driver = driver_with()
        driver.serve(ANN, DOCUMENT)
        driver.serve(BOB, DOCUMENT)
        rows = [driver.admit(user, [*DOCUMENT, 0]) for user in (ANN, BOB)]
        driver.next_epoch()
        driver.check(*rows)
        assert driver.cache.protected_pages == 20
        for row in rows:
            driver.end(row)
        driver.next_epoch()
        assert driver.allocator.free_pages == 190
        driver.check()

    def test_opted_out_pages_are_merged_too_because_merging_is_invisible(self) -> None:
        driver = driver_with(promotion_subjects=2)
        driver.serve(ANN, DOCUMENT, may_promote=False)
        driver.serve(BOB, DOCUMENT, may_promote=False)
        driver.next_epoch()
        assert driver.tenants == []
        assert driver.allocator.free_pages == 190

    def test_isolated_caches_merge_nothing(self) -> None:
        driver = Driver("isolated", capacity=200)
        driver.serve(ANN, DOCUMENT)
        driver.serve(BOB, DOCUMENT)
        driver.next_epoch()
        assert driver.allocator.free_pages == 180


class TestChains:
    def test_nodes_of_different_use_stay_apart(self) -> None:
        driver = driver_with()
        driver.serve(ANN, [1, 2, 3, 4, 5, 6])
        row = driver.admit(ANN, [1, 2, 3, 4, 0])
        driver.end(row)
        assert driver.edges() == [[1, 2, 3, 4], [5, 6]]
        driver.serve(ANN, [1, 2, 3, 4, 5, 6, 7])
        driver.serve(ANN, [1, 2, 3, 4, 5, 6, 7, 8])
        driver.next_epoch()
        # One has been used more often than the other.
        assert driver.edges() == [[1, 2, 3, 4], [5, 6, 7, 8]]
        driver.check()

    def test_halves_of_a_node_are_joined_when_the_reason_for_the_split_is_gone(self) -> None:
        driver = driver_with(headroom_share=2 / 200)
        driver.serve(ANN, [1, 2, 3, 4, 5, 6])
        driver.cache.evict(0)
        assert driver.edges() == [[1, 2], [3, 4, 5, 6]]
        row = driver.admit(ANN, [1, 2, 3, 4, 5, 6, 7])
        driver.next_epoch()
        assert driver.edges() == [[1, 2, 3, 4, 5, 6]]
        driver.check(row)
        driver.insert(row)
        driver.end(row)
        driver.check()

    def test_end_of_a_lease_stays_a_boundary(self) -> None:
        driver = driver_with()
        driver.serve(ANN, [1, 2, 3, 4, 5, 6])
        row = driver.admit(ANN, [1, 2, 3, 4, 0])
        driver.next_epoch()
        assert driver.edges() == [[1, 2, 3, 4], [5, 6]]
        driver.end(row)

    def test_mirror_of_the_events_is_the_tree(self) -> None:
        driver = driver_with(quota_share=0.06, headroom_share=0.05)
        mirror: dict[int, object] = {}

        def note(event: Any) -> None:
            if event.node is None:
                return
            node = event.node
            mirror.pop(node.node_id, None)
            if node.edge_tokens:
                mirror[node.node_id] = (
                    node.parent_id,
                    node.token_ids.tolist(),
                    node.pages.tolist(),
                    node.owner,
                    node.state,
                    node.visibility,
                )

        driver.cache.events.subscribe(note)
        kinds: set[CacheEventKind] = set()
        driver.cache.events.subscribe(lambda event: kinds.add(event.kind))
        for number in range(60):
            user = (ANN, BOB, CID)[number % 3]
            driver.serve(user, [1, 2, 3, 4, 5, 6, number // 3 % 7, 0, number % 5, 0])
            for prober in ("x", "y"):
                for _ in range(20):
                    driver.end(driver.admit(View(Subject(ANN.tenant, prober)), [1, 2, 3, 4, 0]))
            if number % 6 == 5:
                driver.next_epoch()
            if number % 10 == 9:
                driver.cache.evict(3)
        tree = {
            node.node_id: (
                node.parent_id,
                node.token_ids.tolist(),
                node.pages.tolist(),
                node.owner,
                node.state,
                node.visibility,
            )
            for node in driver.cache.dump()
        }
        assert mirror == tree
        assert kinds >= {
            CacheEventKind.PROMOTED,
            CacheEventKind.DEMOTED,
            CacheEventKind.QUARANTINED,
            CacheEventKind.MERGED,
            CacheEventKind.SOFT_FREED,
            CacheEventKind.RECLAIMED,
        }
        driver.check()

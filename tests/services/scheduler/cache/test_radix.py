from __future__ import annotations

import numpy as np
import pytest

from common.types import Subject, View
from services.scheduler.cache.types import Visibility
from tests.services.scheduler.cache.driver import ANN, BOB, Driver, int32


class TestMatching:
    def test_whole_pages_match_and_the_last_token_never_does(self) -> None:
        driver = Driver()
        driver.serve(ANN, [1, 2, 3, 4, 5])
        assert driver.peek(ANN, [1, 2, 3, 4, 5]) == 4
        assert driver.peek(ANN, [1, 2, 3, 4]) == 2
        assert driver.peek(ANN, [1, 2, 3]) == 2
        assert driver.peek(ANN, [1, 2]) == 0
        assert driver.peek(ANN, [1]) == 0
        assert driver.peek(ANN, []) == 0

    def test_one_wrong_token_in_a_page_is_no_match(self) -> None:
        driver = Driver(page_size=4)
        driver.serve(ANN, list(range(1, 17)))
        for wrong in range(16):
            ids = [*range(1, 17), 99]
            ids[wrong] = 77
            assert driver.peek(ANN, ids) == wrong // 4 * 4

    def test_peek_changes_nothing(self) -> None:
        driver = Driver()
        driver.serve(ANN, [1, 2, 3, 4, 5, 6])
        before = list(map(str, driver.cache.dump()))
        assert driver.peek(ANN, [1, 2, 3, 4, 9]) == 4
        assert list(map(str, driver.cache.dump())) == before
        assert driver.allocator.references == driver.cache.held_references == 3

    def test_commit_returns_the_pages_that_were_inserted(self) -> None:
        driver = Driver()
        first = driver.admit(ANN, [1, 2, 3, 4, 5])
        driver.insert(first)
        second = driver.admit(ANN, [1, 2, 3, 4, 6])
        assert second.lock.pages.tolist() == first.table[:2].tolist()
        assert second.lock.matched_tokens == 4
        assert second.lock.view == ANN

    def test_lease_pages_cannot_be_written_to(self) -> None:
        driver = Driver()
        driver.serve(ANN, [1, 2, 3, 4])
        with pytest.raises(ValueError, match="read-only"):
            driver.admit(ANN, [1, 2, 3]).lock.pages[0] = 9


class TestIsolation:
    def test_a_subject_never_finds_another_s_prompt(self) -> None:
        driver = Driver()
        driver.serve(ANN, [1, 2, 3, 4, 5])
        assert driver.peek(BOB, [1, 2, 3, 4, 5]) == 0
        assert driver.serve(BOB, [1, 2, 3, 4, 5]) == 0

    def test_two_subjects_keep_separate_nodes_with_the_same_page(self) -> None:
        driver = Driver()
        driver.serve(ANN, [1, 2, 3, 4])
        driver.serve(BOB, [1, 2, 3, 4])
        assert driver.peek(ANN, [1, 2, 3, 4, 5]) == driver.peek(BOB, [1, 2, 3, 4, 5]) == 4
        assert driver.cache.held_references == 4
        pages = [set(node.pages.tolist()) for node in driver.cache.dump()]
        assert not pages[0] & pages[1]

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (View(Subject("tenant", "ann")), View(Subject("tenant2", "ann"))),
            (View(Subject("a/b", "c")), View(Subject("a", "b/c"))),
            (View(Subject("ab", "c")), View(Subject("a", "bc"))),
            (View(Subject("", "ann")), View(Subject("ann", ""))),
            (View(Subject("", "")), View(Subject("", "ann"))),
            (View(Subject("1", "1")), View(Subject("1", "01"))),
        ],
    )
    def test_views_that_differ_in_any_part_share_nothing(self, one: View, other: View) -> None:
        driver = Driver()
        driver.serve(one, [1, 2, 3])
        assert driver.peek(one, [1, 2, 3]) == 2
        assert driver.peek(other, [1, 2, 3]) == 0

    def test_a_subject_with_an_empty_name_is_private_and_not_public(self) -> None:
        driver = Driver()
        nobody = View(Subject("", ""))
        driver.serve(nobody, [1, 2, 3])
        driver.serve(ANN, [5, 6, 7])
        assert driver.peek(ANN, [1, 2, 3]) == 0
        assert driver.peek(nobody, [5, 6, 7]) == 0
        (node,) = driver.cache.dump(nobody)
        assert (node.visibility, node.owner) == (Visibility.PRIVATE, nobody)

    def test_the_dump_of_a_view_shows_only_its_nodes(self) -> None:
        driver = Driver()
        driver.serve(ANN, [1, 2])
        driver.serve(BOB, [3, 4])
        assert driver.edges(ANN) == [[1, 2]]
        assert driver.edges(BOB) == [[3, 4]]
        assert driver.edges(View(Subject("tenant", "cid"))) == []
        assert driver.edges() == [[1, 2], [3, 4]]

    def test_shared_mode_is_one_public_view(self) -> None:
        driver = Driver("shared")
        driver.serve(ANN, [1, 2, 3, 4])
        assert driver.peek(BOB, [1, 2, 3, 4, 5]) == 4
        (node,) = driver.cache.dump(BOB)
        assert (node.visibility, node.owner) == (Visibility.PUBLIC, None)

    def test_row_without_cache_reads_nothing_and_leaves_nothing(self) -> None:
        driver = Driver()
        driver.serve(ANN, [1, 2, 3, 4])
        row = driver.admit(ANN, [1, 2, 3, 4, 5, 6], may_use_cache=False)
        assert row.lock.matched_tokens == 0
        insertion = driver.insert(row)
        assert insertion.pages.tolist() == row.table.tolist()
        assert len(insertion.duplicates) == 0
        driver.end(row)
        assert driver.peek(ANN, [1, 2, 3, 4, 5, 6, 7]) == 4
        assert driver.cache.protected_pages == 0


class TestTree:
    def test_branch_splits_the_edge_at_the_page(self) -> None:
        driver = Driver()
        driver.serve(ANN, [1, 2, 3, 4, 5, 6])
        driver.serve(ANN, [1, 2, 3, 9, 9, 9])
        assert driver.edges() == [[1, 2], [3, 4, 5, 6], [3, 9, 9, 9]]

    def test_split_keeps_locks_and_pages_of_both_halves(self) -> None:
        driver = Driver()
        first = driver.admit(ANN, [1, 2, 3, 4, 5, 6])
        driver.insert(first)
        second = driver.admit(ANN, [1, 2, 9])
        upper, lower = driver.cache.dump()
        assert (upper.lock_ref, lower.lock_ref) == (2, 1)
        assert [*upper.pages, *lower.pages] == first.table.tolist()
        assert (lower.parent_id, upper.parent_id) == (upper.node_id, None)
        assert (upper.depth_tokens, lower.depth_tokens) == (2, 6)
        driver.end(first)
        upper, lower = driver.cache.dump()
        assert (upper.lock_ref, lower.lock_ref) == (1, 0)
        driver.end(second)
        assert driver.cache.protected_pages == 0

    def test_chunks_of_one_prompt_become_one_node(self) -> None:
        driver = Driver()
        row = driver.admit(ANN, list(range(20)))
        for computed in range(2, 21, 2):
            driver.insert(row, computed)
        assert driver.edges() == [list(range(20))]
        assert driver.cache.protected_pages == 10

    def test_partial_page_stays_the_rows_own(self) -> None:
        driver = Driver()
        row = driver.admit(ANN, [1, 2, 3])
        driver.insert(row)
        assert driver.cache.held_references == 1
        driver.end(row)
        assert driver.allocator.free_pages == 63

    def test_boundary_of_another_lease_is_not_extended(self) -> None:
        driver = Driver()
        driver.serve(ANN, [1, 2, 3, 4])
        first = driver.admit(ANN, [1, 2, 3, 4, 5, 6])
        second = driver.admit(ANN, [1, 2, 3, 4, 7, 8])
        driver.insert(first)
        driver.insert(second)
        assert driver.edges() == [[1, 2, 3, 4], [5, 6], [7, 8]]
        driver.end(first)
        assert driver.cache.evict(64) == 1
        assert driver.edges() == [[1, 2, 3, 4], [7, 8]]

    def test_insert_without_a_new_whole_page_keeps_the_lease(self) -> None:
        driver = Driver()
        row = driver.admit(ANN, [1, 2, 3, 4])
        lock = driver.insert(row, 3).lock
        assert driver.insert(row, 3).lock == lock
        driver.end(row)
        assert driver.violations() == []

    def test_insert_touches_the_path(self) -> None:
        driver = Driver()
        row = driver.admit(ANN, [1, 2, 3, 4])
        driver.insert(row, 2)
        (before,) = driver.cache.dump()
        driver.insert(row, 4)
        (after,) = driver.cache.dump()
        assert after.last_access > before.last_access


def test_page_size_one_and_prompts_of_one_token_work() -> None:
    driver = Driver(page_size=1)
    assert driver.serve(ANN, [7]) == 0
    assert driver.serve(ANN, [7]) == 0
    assert driver.serve(ANN, [7, 7, 7]) == 1
    assert driver.peek(ANN, [7, 7, 7]) == 2


def test_equal_operations_give_equal_trees_and_pages() -> None:
    def run() -> list[str]:
        random = np.random.default_rng(1)
        driver = Driver(capacity=40)
        log: list[str] = []
        driver.cache.events.subscribe(lambda event: log.append(str(event)))
        for _ in range(300):
            ids = random.integers(0, 2, random.integers(1, 16)).tolist()
            needed = -(-len(ids) // 2)
            driver.cache.evict(max(needed - driver.allocator.free_pages, 0))
            driver.serve([ANN, BOB][random.integers(2)], ids)
        return [*log, *map(str, driver.cache.dump())]

    assert run() == run()


def test_ids_of_any_integer_type_match() -> None:
    driver = Driver()
    driver.serve(ANN, [1, 2, 3])
    assert driver.cache.peek(ANN, np.array([1, 2, 3], np.int64)) == 2
    assert driver.cache.peek(ANN, int32([1, 0, 2, 0, 3, 0])[::2]) == 2

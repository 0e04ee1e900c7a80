"""Mistakes that others have made in such caches, one test each; those about identity are where identity is tested.

Storage keys without the scope: `test_object_keys.py`. Names that nobody gave:
`tests/gateway/identity/test_identity.py`.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import services.scheduler.cache as package
from common.types import Subject, View
from tests.services.scheduler.cache.driver import ANN, BOB, CID, DAN, EVE, PLAIN, Driver

if TYPE_CHECKING:
    from services.scheduler.cache.factory import CacheName

TEXT = [1, 2, 3, 4, 5, 6, 7, 8]
PRIVATE_MODES: list[CacheName] = ["user_aware", "isolated", "isolated_pinned"]
NOBODY = View(Subject("tenant", ""))


def published(capacity: int = 400) -> Driver:
    driver = Driver("user_aware", config=PLAIN, capacity=capacity)
    for user in (ANN, BOB, CID):
        driver.serve(user, TEXT)
    driver.next_epoch()
    assert driver.tenants == [TEXT]
    return driver


@pytest.mark.parametrize("name", PRIVATE_MODES)
def test_missing_user_is_checked_like_any_other_owner(name: CacheName) -> None:
    driver = Driver(name, config=PLAIN)
    driver.serve(ANN, TEXT)
    driver.serve(NOBODY, [9, 9, 9, 9])
    assert driver.peek(NOBODY, [*TEXT, 0]) == 0
    assert driver.peek(ANN, [9, 9, 9, 9, 0]) == 0
    assert driver.peek(NOBODY, [9, 9, 9, 9, 0]) == 4
    assert driver.admit(NOBODY, [*TEXT, 0]).lock.matched_tokens == 0


@pytest.mark.parametrize("name", PRIVATE_MODES)
def test_owners_are_compared_in_both_parts_and_not_as_one_text(name: CacheName) -> None:
    alike = [
        ("a/b", "c"),
        ("a", "b/c"),
        ("a", "b"),
        ("ab", ""),
        ("", "ab"),
        ("a", "B"),
        ("('a', 'b')", ""),
        ("a", "b "),
    ]
    for owner in alike:
        driver = Driver(name, config=PLAIN)
        driver.serve(View(Subject(*owner)), TEXT)
        found = [driver.peek(View(Subject(*other)), [*TEXT, 0]) for other in alike]
        assert found == [8 if other == owner else 0 for other in alike]


def test_a_quarantine_does_not_apply_to_subjects_with_similar_names() -> None:
    driver = published()
    driver.next_epoch()
    for _ in range(20):
        driver.end(driver.admit(View(Subject("te", "nantdan")), [*TEXT, 0]))
    driver.next_epoch()
    assert driver.peek(View(Subject("te", "nantdan")), [*TEXT, 0]) == 0
    assert driver.peek(DAN, [*TEXT, 0]) == driver.peek(View(Subject("tenant", "dan ")), [*TEXT, 0]) == 8


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("change", [1, 256, 65_536, 2**24])
def test_key_with_one_wrong_token_never_matches_its_page(place: int, change: int) -> None:
    driver = Driver("user_aware", config=PLAIN)
    driver.serve(ANN, TEXT)
    wrong = [token + change * (at == place) for at, token in enumerate(TEXT)]
    assert driver.peek(ANN, [*wrong, 0]) == place // 2 * 2
    assert driver.admit(ANN, [*wrong, 0]).lock.matched_tokens == place // 2 * 2


@pytest.mark.parametrize("name", PRIVATE_MODES)
def test_child_of_one_user_never_takes_the_place_of_anothers(name: CacheName) -> None:
    driver = Driver(name, config=replace(PLAIN, promotion_subjects=9, strict_numerics=True))
    for number, user in enumerate((ANN, BOB, CID)):
        driver.serve(user, [*TEXT, number, 0])
        driver.serve(user, [*TEXT, number, 1])
    for number, user in enumerate((ANN, BOB, CID)):
        assert [driver.peek(user, [*TEXT, other, 0, 5]) for other in range(3)] == [
            8 + 2 * (other == number) for other in range(3)
        ]
    driver.cache.forget(BOB.subject)
    assert [driver.peek(user, [*TEXT, 0]) for user in (ANN, BOB, CID)] == [8, 0, 8]
    driver.check()


def test_first_hit_of_a_window_does_not_drop_the_window_before() -> None:
    driver = published()
    for user in (DAN, EVE, DAN):
        driver.serve(user, [*TEXT, 0])
    driver.next_epoch()
    driver.serve(DAN, [*TEXT, 0])
    (node,) = [node for node in driver.cache.dump() if node.owner is None]
    assert (node.hits, node.users, node.previous_hits, node.previous_users) == (1, 1, 3, 2)


@pytest.mark.parametrize("gap", [2, 3, 100])
def test_gap_of_several_epochs_leaves_no_window_before(gap: int) -> None:
    driver = published()
    driver.serve(DAN, [*TEXT, 0])
    driver.next_epoch(gap)
    driver.serve(EVE, [*TEXT, 0])
    (node,) = [node for node in driver.cache.dump() if node.owner is None]
    assert (node.hits, node.previous_hits, node.previous_users, node.epoch) == (1, 0, 0, driver.cache.epoch)


def test_halves_of_a_split_count_on_by_themselves() -> None:
    driver = published()
    driver.serve(DAN, [*TEXT, 0])
    driver.serve(EVE, [1, 2, 3, 4, 0])
    driver.next_epoch(0)
    upper, lower = [node for node, _ in driver.radix.store.tree.walk() if node.is_shared]
    assert (upper.distinct_users, lower.distinct_users) == (2, 1)
    assert upper.u_cnt_l is not lower.u_cnt_l
    assert upper.creators is not lower.creators
    upper.creators.clear()  # type: ignore[union-attr]  # PUBLIC nodes have some
    assert lower.creators


def test_the_cache_uses_no_clock_and_no_randomness() -> None:
    modules = list(Path(*package.__path__).rglob("*.py"))
    assert len(modules) > 20
    forbidden = {"time", "datetime", "random", "secrets", "uuid", "os", "threading", "asyncio"}
    for module in modules:
        for node in ast.walk(ast.parse(module.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not forbidden.intersection(name.partition(".")[0] for name in names), module


@pytest.mark.parametrize("cause", ["demotion", "forgetting", "flush", "eviction"])
def test_subtree_with_a_running_row_inside_keeps_its_pages(cause: str) -> None:
    driver = published()
    row = driver.admit(ANN if cause == "forgetting" else DAN, [*TEXT, 9, 9, 9, 9])
    driver.insert(row, 10)
    match cause:
        case "demotion":
            for prober in (DAN, EVE):
                for _ in range(30):
                    driver.end(driver.admit(prober, [*TEXT, 0]))
            driver.next_epoch()
            assert driver.tenants == []
        case "forgetting":
            driver.cache.forget(ANN.subject)
        case "flush":
            driver.cache.flush()
        case _:
            driver.cache.evict(1_000)
    driver.check(row)
    fresh = driver.allocator.try_allocate(driver.allocator.free_pages)
    assert fresh is not None
    assert not set(fresh.tolist()) & set(row.table.tolist())
    driver.allocator.release(fresh)
    driver.insert(row)
    driver.end(row)
    driver.check()


def test_duplicates_are_not_freed_while_a_running_row_points_to_them() -> None:
    driver = Driver("user_aware", config=PLAIN)
    row, twin = driver.admit(ANN, TEXT), driver.admit(ANN, TEXT)
    driver.insert(row)
    insertion = driver.insert(twin)
    assert insertion.duplicates.tolist() == twin.table.tolist()
    for _ in range(2):
        assert (driver.allocator.counts[twin.table] == 1).all()
        driver.next_epoch()
        driver.cache.flush()
    assert driver.allocator.exchange(insertion.duplicates, insertion.canonical) == 4
    assert (driver.allocator.counts[insertion.canonical] == 3).all()


@pytest.mark.parametrize("allowed", [0, 1, -1])
def test_a_verdict_that_allows_at_most_one_token_publishes_nothing(allowed: int) -> None:
    driver = Driver("user_aware", config=replace(PLAIN, content_check=True))
    for user in (ANN, BOB, CID):
        driver.serve(user, TEXT)
    driver.next_epoch()
    (candidate,) = driver.cache.take_candidates()
    assert len(candidate.token_ids) == len(TEXT), "a check is never asked about nothing"
    driver.cache.resolve(candidate.candidate_id, allowed)
    for _ in range(40):
        driver.serve(DAN, TEXT)
        driver.next_epoch()
        assert driver.tenants == []
        for again in driver.cache.take_candidates():
            driver.cache.resolve(again.candidate_id, allowed)

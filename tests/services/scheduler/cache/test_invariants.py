"""A checker that finds nothing proves nothing: each kind of damage must be seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from services.scheduler.cache.invariants import violations
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.cache.radix import RadixCache
from tests.services.scheduler.cache.driver import ANN, BOB, int32

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.scheduler.cache.tree import Node


def make_cache() -> RadixCache:
    """Ann: a parent, a locked child and two unlocked ones; Bob: one node."""
    allocator = PageAllocator(32)
    cache = RadixCache(allocator, 2)
    for principal, ids in [(ANN, [1, 2, 3, 4]), (ANN, [1, 2, 5, 6]), (ANN, [1, 2, 7, 8]), (BOB, [1, 2])]:
        array = int32(ids)
        lease = cache.commit(principal, array)
        fresh = allocator.try_allocate(len(ids) // 2 - len(lease.pages))
        assert fresh is not None
        cache.release(cache.insert(lease, array, int32([*lease.pages, *fresh]), len(ids)).lease)
    cache.commit(ANN, int32([1, 2, 3, 4, 0]))
    return cache


def nodes(cache: RadixCache) -> dict[tuple[str, ...], Node]:
    return {(node.scope[1], *map(str, node.key[::4])): node for node, _ in cache.tree.walk()}


def drop_lock(cache: RadixCache) -> None:
    nodes(cache)["ann", "1", "2"].lock_ref = 0


def negative_lock(cache: RadixCache) -> None:
    nodes(cache)["ann", "5", "6"].lock_ref = -1


def cross_scope(cache: RadixCache) -> None:
    nodes(cache)["ann", "5", "6"].scope = ("tenant", "bob")


def public_sibling(cache: RadixCache) -> None:
    cache.tree.attach(cache.tree.root, (), int32([1, 2]).tobytes(), int32([30]))


def lose_key(cache: RadixCache) -> None:
    nodes(cache)["ann", "5", "6"].key = b""


def share_page(cache: RadixCache) -> None:
    nodes(cache)["ann", "5", "6"].pages = nodes(cache)["ann", "7", "8"].pages


def grow_unnoticed(cache: RadixCache) -> None:
    cache.tree.extend(nodes(cache)["ann", "5", "6"], int32([9, 9]).tobytes(), int32([31]))


def detach_unnoticed(cache: RadixCache) -> None:
    cache.tree.detach(nodes(cache)["ann", "5", "6"])


def forget_unlocked(cache: RadixCache) -> None:
    del cache.locks.unlocked[nodes(cache)["ann", "5", "6"]]


def reorder(cache: RadixCache) -> None:
    cache.locks.unlocked.move_to_end(nodes(cache)["ann", "5", "6"])


def use_before_parent(cache: RadixCache) -> None:
    nodes(cache)["ann", "3", "4"].last_access += 100


def test_sound_tree_has_no_violations() -> None:
    assert violations(make_cache()) == []


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (drop_lock, "locked more often than its parent"),
        (negative_lock, "locked -1 times"),
        (cross_scope, "hangs below"),
        (cross_scope, "not found under its own scope"),
        (public_sibling, "public sibling"),
        (lose_key, "0 key bytes"),
        (share_page, "in two nodes"),
        (grow_unnoticed, "pages, counted"),
        (detach_unnoticed, "not in the tree"),
        (forget_unlocked, "wrong side"),
        (reorder, "used later"),
        (use_before_parent, "used after its parent"),
    ],
)
def test_damage_is_found(damage: Callable[[RadixCache], None], found: str) -> None:
    cache = make_cache()
    damage(cache)
    assert any(found in violation for violation in violations(cache)), violations(cache)


def test_parent_before_child_in_eviction_order_is_found() -> None:
    cache = make_cache()
    lease = cache.commit(ANN, int32([1, 2, 3, 4, 0]))
    cache.release(lease)
    parent = nodes(cache)["ann", "1", "2"]
    parent.lock_ref = 0
    nodes(cache)["ann", "3", "4"].lock_ref = 0
    cache.locks.unlocked[parent] = None
    cache.locks.unlocked[nodes(cache)["ann", "3", "4"]] = None
    assert any("before its children" in violation for violation in violations(cache))

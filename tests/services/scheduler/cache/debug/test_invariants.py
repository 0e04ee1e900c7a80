"""A checker that finds nothing proves nothing: each kind of damage must be seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from services.scheduler.cache.config import CacheConfig, Mode
from services.scheduler.cache.debug.invariants import violations
from services.scheduler.cache.node import Account
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.cache.radix import RadixCache
from services.scheduler.cache.types import NodeState
from tests.services.scheduler.cache.driver import ANN, BOB, int32

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.scheduler.cache.node import Node


def make_cache() -> RadixCache:
    """Ann: a parent, a locked child and two unlocked ones; Bob: one node."""
    allocator = PageAllocator(32)
    cache = RadixCache(allocator, 2, CacheConfig(mode=Mode.ISOLATED))
    for view, ids in [(ANN, [1, 2, 3, 4]), (ANN, [1, 2, 5, 6]), (ANN, [1, 2, 7, 8]), (BOB, [1, 2])]:
        array = int32(ids)
        lock = cache.commit(view, array)
        fresh = allocator.try_allocate(len(ids) // 2 - len(lock.pages))
        assert fresh is not None
        cache.release(cache.insert(lock, array, int32([*lock.pages, *fresh]), len(ids)).lock)
    cache.commit(ANN, int32([1, 2, 3, 4, 0]))
    return cache


def nodes(cache: RadixCache) -> dict[tuple[str, ...], Node]:
    return {(node.owner_id[1], *map(str, node.key[::4])): node for node, _ in cache.store.tree.walk()}


def drop_lock(cache: RadixCache) -> None:
    nodes(cache)["ann", "1", "2"].lock_ref = 0


def negative_lock(cache: RadixCache) -> None:
    nodes(cache)["ann", "5", "6"].lock_ref = -1


def cross_owner(cache: RadixCache) -> None:
    nodes(cache)["ann", "5", "6"].owner = nodes(cache)["bob", "1", "2"].owner


def forget_owner(cache: RadixCache) -> None:
    nodes(cache)["ann", "5", "6"].owner = Account(("tenant", "ann", ""))


def public_sibling(cache: RadixCache) -> None:
    cache.store.tree.attach(cache.store.tree.root, cache.store.accounts.public, int32([1, 2]).tobytes(), int32([30]))


def public_below_private(cache: RadixCache) -> None:
    cache.store.tree.hand_over(nodes(cache)["ann", "5", "6"], cache.store.accounts.public)


def lose_key(cache: RadixCache) -> None:
    nodes(cache)["ann", "5", "6"].key = b""


def share_page(cache: RadixCache) -> None:
    nodes(cache)["ann", "5", "6"].pages = nodes(cache)["ann", "7", "8"].pages


def grow_unnoticed(cache: RadixCache) -> None:
    cache.store.tree.extend(nodes(cache)["ann", "5", "6"], int32([9, 9]).tobytes(), int32([31]))


def detach_unnoticed(cache: RadixCache) -> None:
    node = nodes(cache)["ann", "5", "6"]
    cache.store.soft[node] = None
    cache.store.tree.detach(node)


def forget_candidate(cache: RadixCache) -> None:
    cache.store.queue.discard(nodes(cache)["ann", "5", "6"])


def use_before_parent(cache: RadixCache) -> None:
    nodes(cache)["ann", "3", "4"].last_access += 100


def soften_unnoticed(cache: RadixCache) -> None:
    nodes(cache)["ann", "5", "6"].state = NodeState.SOFT_FREE


def count_hits_of_nobody(cache: RadixCache) -> None:
    nodes(cache)["bob", "1", "2"].hit_cur = 1


def run_ahead(cache: RadixCache) -> None:
    nodes(cache)["bob", "1", "2"].epoch = 1


def miscount_a_subject(cache: RadixCache) -> None:
    cache.store.queue.charge(nodes(cache)["bob", "1", "2"].owner, 100)


def miscount_a_tenant(cache: RadixCache) -> None:
    queue = cache.store.queue
    queue._tenants[nodes(cache)["bob", "1", "2"].owner.holder.tenant].pages += 1


def forget_a_view(cache: RadixCache) -> None:
    nodes(cache)["bob", "1", "2"].owner.holder.members -= 1


def miscount_snapshots(cache: RadixCache) -> None:
    nodes(cache)["bob", "1", "2"].owner.snapshots += 1


def reorder_candidates(cache: RadixCache) -> None:
    queue = cache.store.queue
    queue._subjects[nodes(cache)["ann", "5", "6"].owner.holder].heap.reverse()


def test_sound_tree_has_no_violations() -> None:
    assert violations(make_cache()) == []


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (drop_lock, "locked more often than its parent"),
        (negative_lock, "locked -1 times"),
        (cross_owner, "hangs below"),
        (forget_owner, "without account"),
        (public_sibling, "public sibling"),
        (public_below_private, "hangs below one of"),
        (lose_key, "0 key bytes"),
        (share_page, "not joint"),
        (grow_unnoticed, "soft-free, counted"),
        (detach_unnoticed, "other nodes than the tree"),
        (forget_candidate, "can be evicted, and the eviction queue has"),
        (use_before_parent, "used after its parent"),
        (soften_unnoticed, "other nodes than the tree"),
        (soften_unnoticed, "miscounts its LIVE children"),
        (count_hits_of_nobody, "counts others"),
        (run_ahead, "later epoch"),
        (miscount_a_subject, "subjects and tenants have"),
        (miscount_a_tenant, "subjects and tenants have"),
        (forget_a_view, "has 1 accounts, counted 0"),
        (miscount_snapshots, "has 0 snapshots, counted 1"),
        (reorder_candidates, "not the most urgent"),
    ],
)
def test_damage_is_found(damage: Callable[[RadixCache], None], found: str) -> None:
    cache = make_cache()
    damage(cache)
    assert any(found in violation for violation in violations(cache)), violations(cache)


def test_parent_before_child_in_reclaim_order_is_found() -> None:
    cache = make_cache()
    found = nodes(cache)
    for name in [("ann", "1", "2"), ("ann", "5", "6")]:
        cache.store.soft[found[name]] = None
    assert any("before its children" in violation for violation in violations(cache))

"""Users that ask for as much as they can: others keep their shares, memory stays bounded, and the accounts exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import pytest

from common.types import Subject, View
from services.scheduler.cache.config import CacheConfig, EvictionPolicy
from services.scheduler.cache.debug.audit import account, audit
from services.scheduler.cache.factory import CacheName
from services.scheduler.cache.types import NodeState
from tests.services.scheduler.cache.driver import ANN, BOB, CID, DAN, EVE, PLAIN, Driver, with_rules

if TYPE_CHECKING:
    from services.scheduler.cache.radix import RadixCache

CAPACITY = 1_000
NAMES: list[CacheName] = list(get_args(CacheName))
MODEST = [View(Subject("tenant", f"modest {number}")) for number in range(8)]
PAGES_EACH = 20


def assert_exact(driver: Driver) -> None:
    driver.check()
    assert account(driver.allocator, driver.cache, 0).is_exact
    assert audit(driver.allocator, driver.cache, {}).is_clean
    driver.cache.flush()
    assert driver.allocator.free_pages == driver.allocator.capacity


def remembered(cache: RadixCache) -> int:
    """Return how many things the cache keeps in whichever list."""
    store = cache.store
    accounts = [*store.accounts.all(), store.accounts.public]
    entries = store.queue.entries + sum(len(account.tops) for account in accounts)
    lists = (store.soft, store.touched, store.fresh, store.loose, cache._detector._tries)
    return store.tree.node_count + len(store.accounts) + entries + sum(map(len, lists))


def flood(prefixes: int, epoch_every: int) -> Driver:
    """One user asks for so many different prompts, among eight modest ones."""
    driver = Driver("user_aware", config=CacheConfig(), capacity=CAPACITY)
    for number, user in enumerate(MODEST):
        driver.serve(user, [number, *range(1, 2 * PAGES_EACH)])
    for number in range(prefixes):
        driver.serve(EVE, [100 + number, 0, number % 7, 1])
        if number % epoch_every == 0:
            driver.next_epoch()
            for user_number, user in enumerate(MODEST):
                driver.end(driver.admit(user, [user_number, *range(1, 2 * PAGES_EACH)]))
    return driver


def assert_others_keep_their_shares(driver: Driver) -> None:
    found = [driver.peek(user, [number, *range(1, 2 * PAGES_EACH), 0]) for number, user in enumerate(MODEST)]
    assert found == [2 * PAGES_EACH] * len(MODEST)
    live = sum(len(node.pages) for node in driver.cache.dump(EVE) if node.state is NodeState.LIVE)
    assert live <= CAPACITY * driver.radix.config.quota_share
    assert remembered(driver.radix) <= 8 * CAPACITY


def test_flood_of_prefixes_takes_nothing_from_others() -> None:
    driver = flood(10_000, epoch_every=1_000)
    assert_others_keep_their_shares(driver)
    assert_exact(driver)


def test_a_flood_within_one_epoch_takes_nothing_from_others() -> None:
    driver = flood(10_000, epoch_every=1_000_000)
    assert_others_keep_their_shares(driver)
    assert_exact(driver)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_million_prefixes_of_one_user_take_nothing_from_others() -> None:
    driver = flood(1_000_000, epoch_every=10_000)
    assert_others_keep_their_shares(driver)
    assert_exact(driver)


def test_floor_of_each_user_survives_many_users_within_their_quotas() -> None:
    """Nobody is over its quota here; who is active keeps its floor all the same."""
    driver = Driver("user_aware", config=with_rules(PLAIN, floor_share=0.01, active_epochs=30), capacity=CAPACITY)
    for number, user in enumerate(MODEST):
        driver.serve(user, [number, *range(1, 20)])
    for number in range(400):
        crowd = View(Subject("crowd", f"{number % 4}"))
        driver.serve(crowd, [1_000 + number, *range(1, 20)])
    assert [driver.peek(user, [number, *range(1, 20), 0]) for number, user in enumerate(MODEST)] == [20] * len(MODEST)
    assert_exact(driver)


def test_invented_subjects_probing_a_shared_prompt_fill_no_memory() -> None:
    driver = Driver("user_aware", config=with_rules(PLAIN, watched_pairs=100), capacity=CAPACITY)
    for user in (ANN, BOB, CID):
        driver.serve(user, [1, 2])
    driver.next_epoch()
    for number in range(2_000):
        driver.end(driver.admit(View(Subject("tenant", f"{number}")), [1, 2, number, number, 0]))
    assert len(driver.radix._detector._tries) == 100
    assert remembered(driver.radix) < 1_000
    driver.next_epoch()
    assert driver.radix._detector._tries == {}
    assert_exact(driver)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", list(EvictionPolicy))
@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_the_smallest_pools_serve_requests_that_fit(name: CacheName, policy: EvictionPolicy, capacity: int) -> None:
    driver = Driver(name, config=CacheConfig(eviction=policy), capacity=capacity)
    for number in range(60):
        for user in (ANN, BOB, CID, DAN):
            length = 1 + number % (2 * capacity)
            driver.serve(user, [number % 3, *range(1, length)], priority=number % 4)
        if number % 5 == 0:
            driver.next_epoch()
    assert driver.allocator.references == driver.cache.held_references
    if name != "chunk":
        assert_exact(driver)


def test_row_that_fills_the_whole_pool_leaves_nothing_locked() -> None:
    driver = Driver("user_aware", capacity=2)
    row = driver.admit(ANN, [1, 2, 3])
    driver.insert(row)
    assert driver.allocator.try_allocate(1) is None
    assert driver.cache.evict(1) == 0
    driver.end(row)
    assert driver.serve(BOB, [4, 5, 6]) == 0
    assert_exact(driver)

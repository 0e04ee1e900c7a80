from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.types import Subject, View
from services.scheduler.cache.debug.invariant_sampler import InvariantSampler
from tests.services.scheduler.cache.debug.test_replay import RecordedDriver
from tests.services.scheduler.cache.driver import ANN, BOB, CID, PLAIN, Driver

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.scheduler.cache.node import Node

SYSTEM = [1, 2, 3, 4]


def grove() -> Driver:
    """A public prompt with forty private ends of twenty users, some of them freed, and a running row."""
    driver = Driver("user_aware", config=PLAIN, capacity=400)
    for user in (ANN, BOB, CID):
        driver.serve(user, SYSTEM)
    driver.next_epoch()
    for number in range(40):
        driver.serve(View(Subject("tenant", f"{number % 20}")), [*SYSTEM, 10 + number, 0])
    driver.insert(driver.admit(ANN, [*SYSTEM, 7, 7, 7]))
    for _ in range(5):
        node = driver.radix.store.queue.first()
        assert node is not None
        driver.radix.store.soften(node, 1)
    return driver


def found_by_samples(driver: Driver, turns: int, paths: int = 2) -> list[str]:
    sampler = InvariantSampler(driver.radix)
    return [violation for _ in range(turns) for violation in sampler.check(paths)]


def test_sound_tree_has_no_violations_on_any_path() -> None:
    driver = grove()
    assert driver.violations() == []
    assert found_by_samples(driver, 100) == []


def forget_epoch(node: Node) -> None:
    node.epoch += 1_000


def outlock_parent(node: Node) -> None:
    node.lock_ref += 1_000


def publish_alone(node: Node) -> None:
    node.prompt_epoch = 1


@pytest.mark.parametrize("damage", [forget_epoch, outlock_parent])
def test_damage_of_any_leaf_is_found_in_the_end(damage: Callable[[Node], None]) -> None:
    def kinds(driver: Driver) -> list[Node]:
        leaves = [node for node, _ in driver.radix.store.tree.walk() if not node.children]
        running, idle = [node for node in leaves if node.lock_ref], [node for node in leaves if node.queued]
        # Of the soft-free ones, those that are reclaimed next.
        return [next(iter(driver.radix.store.soft)), running[-1], idle[0], idle[-1]]

    for number in range(4):
        driver = grove()
        damage(kinds(driver)[number])
        assert found_by_samples(driver, 100)


def test_damage_of_a_shared_node_is_found_at_once() -> None:
    driver = grove()
    (shared,) = [node for node, _ in driver.radix.store.tree.walk() if node.is_shared]
    publish_alone(shared)
    assert found_by_samples(driver, 1) == [f"node {shared.node_id} is shared and still evidence"]


def test_recorded_caches_are_sampled_inside_and_caches_without_a_tree_are_not() -> None:
    recorded = RecordedDriver()
    recorded.serve(ANN, SYSTEM)
    sampler = InvariantSampler.of(recorded.cache)
    assert sampler is not None
    assert sampler.check(4) == []
    assert InvariantSampler.of(Driver("chunk").cache) is None


def test_empty_tree_can_be_sampled() -> None:
    assert found_by_samples(Driver("user_aware"), 3) == []

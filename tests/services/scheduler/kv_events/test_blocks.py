"""The published blocks are those that the tree holds, after each event and whatever happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.fleet.names import FleetKeys
from common.types import Subject, View
from services.scheduler.cache.config import CacheConfig
from services.scheduler.cache.keys import chain_hashes
from services.scheduler.kv_events.blocks import BlockIndex, UnknownParentError
from services.scheduler.kv_events.messages import MEDIUM_DEVICE, BlockRemoved, BlockStored
from tests.services.scheduler.cache.driver import ANN, BOB, CID, DAN, Driver, int32, with_rules
from tests.services.scheduler.cache.random_lives import live_through
from tests.services.scheduler.cache.user_aware_machine import UserAwareMachine

if TYPE_CHECKING:
    from services.scheduler.cache.interface import PrefixCache
    from services.scheduler.cache.types import CacheEvent

KEYS = FleetKeys("s" * 32)
PAGE = 2


def names(scope: tuple[str, ...], *tokens: int) -> list[int]:
    return [KEYS.block(scope, chain) for chain in chain_hashes(int32(tokens).tobytes(), PAGE * 4)]


def followed(cache: PrefixCache) -> tuple[BlockIndex, list[BlockStored | BlockRemoved]]:
    index = BlockIndex(KEYS.block, PAGE)
    published: list[BlockStored | BlockRemoved] = []

    def hear(event: CacheEvent) -> None:
        if event.node is not None:
            published.extend(index.apply(event.node))

    cache.events.subscribe(hear)
    return index, published


def test_a_new_prompt_is_one_run_of_blocks_and_its_continuation_names_its_parent() -> None:
    driver = Driver()
    _, published = followed(driver.cache)
    driver.serve(ANN, [1, 2, 3, 4])
    driver.serve(ANN, [1, 2, 3, 4, 5, 6])
    ann = ("tenant", "ann", "")
    first, second, third = names(ann, 1, 2, 3, 4, 5, 6)
    assert published == [
        BlockStored([first, second], None, [], PAGE, medium=MEDIUM_DEVICE),
        BlockStored([third], second, [], PAGE, medium=MEDIUM_DEVICE),
    ]


def test_blocks_with_images_have_names_of_their_own() -> None:
    driver = Driver()
    index, published = followed(driver.cache)
    ann = ("tenant", "ann", "")
    cat, dog = [1, -2, -3, -4, 5, 6], [1, -7, -8, -9, 5, 6]
    for prompt in (cat, dog, [*cat, 7, 8]):
        driver.serve(ANN, prompt)
    assert published == [
        BlockStored(names(ann, *cat), None, [], PAGE, medium=MEDIUM_DEVICE),
        BlockStored(names(ann, *dog), None, [], PAGE, medium=MEDIUM_DEVICE),
        BlockStored(names(ann, *cat, 7, 8)[-1:], names(ann, *cat)[-1], [], PAGE, medium=MEDIUM_DEVICE),
    ]
    assert len(index.stored[MEDIUM_DEVICE]) == 7
    # Two questions after the same image: the node that is divided has no text.
    for prompt in ([-2, -3, 5, 6], [-2, -3, 7, 8]):
        driver.serve(ANN, prompt)
    assert published[-1] == BlockStored(
        names(ann, -2, -3, 7, 8)[1:], names(ann, -2, -3)[0], [], PAGE, medium=MEDIUM_DEVICE
    )


def test_a_split_changes_nothing_and_an_eviction_removes_what_is_gone() -> None:
    driver = Driver()
    _, published = followed(driver.cache)
    driver.serve(ANN, [1, 2, 3, 4])
    driver.serve(ANN, [1, 2, 5, 6])
    ann = ("tenant", "ann", "")
    first, second = names(ann, 1, 2, 3, 4)
    other = names(ann, 1, 2, 5, 6)[1]
    assert published[1:] == [BlockStored([other], first, [], PAGE, medium=MEDIUM_DEVICE)]
    driver.cache.evict(1)
    assert published[2:] == [BlockRemoved([second], medium=MEDIUM_DEVICE)]


def test_equal_blocks_in_a_row_keep_their_own_names() -> None:
    """The end of such an edge is cut off; what is left is its beginning, although it equals the end."""
    driver = Driver()
    index, _ = followed(driver.cache)
    driver.serve(ANN, [7] * 8)
    driver.cache.evict(2)
    assert index.stored[MEDIUM_DEVICE] == frozenset(names(("tenant", "ann", ""), 7, 7, 7, 7))


def test_no_message_tells_what_was_sent_or_that_two_users_sent_the_same() -> None:
    driver = Driver()
    _, published = followed(driver.cache)
    driver.serve(ANN, [1, 2, 3, 4])
    driver.serve(BOB, [1, 2, 3, 4])
    driver.serve(View(Subject("rival", "ann")), [1, 2, 3, 4])
    stored = [event for event in published if isinstance(event, BlockStored)]
    assert all(event.token_ids == [] for event in stored)
    assert len({name for event in stored for name in event.block_hashes}) == 3 * 2


def test_a_shared_prompt_has_the_name_of_its_tenant() -> None:
    driver = Driver("user_aware", config=with_rules(CacheConfig(), promotion_subjects=3))
    index, published = followed(driver.cache)
    for user in (ANN, BOB, CID):
        driver.serve(user, [1, 2, 3, 4, 9])
    driver.next_epoch()
    assert driver.peek(DAN, [1, 2, 3, 4, 8]) == 4
    shared = names(("tenant",), 1, 2, 3, 4)
    assert set(shared) <= index.stored[MEDIUM_DEVICE]
    assert [event.block_hashes for event in published if isinstance(event, BlockStored)][-1] == shared


def test_a_node_below_an_unknown_one_is_refused() -> None:
    driver = Driver()
    driver.serve(ANN, [1, 2, 3, 4])
    driver.serve(ANN, [1, 2, 5, 6])
    late = BlockIndex(KEYS.block, PAGE)
    child = next(node for node in driver.cache.dump() if node.parent_id is not None)
    with pytest.raises(UnknownParentError):
        late.apply(child)


class PublishingMachine(UserAwareMachine):
    """Also follows the cache's events."""

    def start(self, config: CacheConfig, capacity: int) -> None:
        super().start(config=config, capacity=capacity)
        self.index, self.published = followed(self.cache)
        self.seen: set[tuple[str | None, int]] = set()
        self.read = 0

    def every_reference_has_a_holder(self) -> None:
        super().every_reference_has_a_holder()
        fresh = BlockIndex(KEYS.block, PAGE)
        for node in self.cache.dump():
            fresh.apply(node)
        assert self.index.stored == fresh.stored
        # Whoever reads the messages sees the same.
        for event in self.published[self.read :]:
            found = {(event.medium, name) for name in event.block_hashes}
            if isinstance(event, BlockStored):
                assert not found & self.seen
                self.seen |= found
            else:
                assert found <= self.seen
                self.seen -= found
        self.read = len(self.published)
        assert self.seen == {(medium, name) for medium, stored in fresh.stored.items() for name in stored}


def test_messages_and_tree_agree_over_random_lives() -> None:
    assert live_through(range(10), 100, PublishingMachine) == 1_000

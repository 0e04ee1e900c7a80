"""Nodes that change, or lack slots for snapshots, before they are copied to the host: all of them is copied, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.transfers import TransferAck
from services.scheduler.cache.debug.invariants import violations
from services.scheduler.cache.radix import RadixCache
from services.scheduler.cache.sharing.merging import compress_chains
from tests.services.scheduler.core.test_host_snapshots import (
    PROMPT,
    host_states,
    lose_snapshots,
    make_harness,
    serve,
)

if TYPE_CHECKING:
    from common.types import SnapshotSlot
    from services.scheduler.cache.node import Node
    from services.scheduler.cache.tiers.host_tier import HostTier
    from tests.services.scheduler.core.harness import Harness

# Of the prompt, with a snapshot after each fourth one.
WHOLE_PAGES, SNAPSHOTS = 12, 3


def with_a_node(**options: object) -> tuple[Harness, HostTier, Node]:
    """Return a harness with a node of twelve pages, which is on the host with its snapshots."""
    harness = make_harness(**options)
    serve(harness, "cold", PROMPT[: 4 * WHOLE_PAGES + 1], max_tokens=1)
    assert isinstance(harness.cache, RadixCache)
    host = harness.cache.host
    assert host is not None
    # It was computed in several chunks.
    compress_chains(harness.cache.store)
    [node] = [node for node, _ in harness.cache.store.tree.walk()]
    assert node.size == WHOLE_PAGES
    return harness, host, node


def lose(harness: Harness, host: HostTier, *, pages: bool) -> None:
    """Evict all snapshots from the host, which are to be copied again, and on demand the pages."""
    if pages:
        host.flush()
    lose_snapshots(harness, on_host=True)
    host_states(harness).want_all()


def ask_for(host: HostTier, node: Node, by: str) -> None:
    """Have a node copied: as it was used, or as the device is about to be given back."""
    if by == "use":
        host.note(node)
    else:
        host.back_up_all()


def copied(host: HostTier) -> tuple[int, int]:
    """Return the numbers of pages and snapshots that are copied in all."""
    started = []
    while transfers := host.plan_backups():
        started += transfers
    return sum(one.pages for one in started if len(one.host_pages)), sum(len(one.host_snapshots) for one in started)


@pytest.mark.parametrize("by", ["use", "giving back"])
@pytest.mark.parametrize("is_copied", [True, False])
def test_both_halves_of_a_node_are_copied(by: str, is_copied: bool) -> None:
    harness, host, node = with_a_node()
    lose(harness, host, pages=not is_copied)
    ask_for(host, node, by)
    assert isinstance(harness.cache, RadixCache)
    harness.cache.store.split(node, 5)
    assert copied(host) == (0 if is_copied else WHOLE_PAGES, SNAPSHOTS)


@pytest.mark.parametrize("by", ["use", "giving back"])
def test_the_upper_half_of_a_node_is_copied_if_the_lower_one_is_evicted_before(by: str) -> None:
    harness, host, node = with_a_node()
    lose(harness, host, pages=True)
    ask_for(host, node, by)
    assert isinstance(harness.cache, RadixCache)
    harness.cache.store.split(node, 5)
    harness.cache.store.remove(node)
    assert copied(host) == (5, 1)


@pytest.mark.parametrize("by", ["use", "giving back"])
@pytest.mark.parametrize("has_child", [True, False])
def test_a_node_that_is_joined_with_its_child_is_copied(by: str, has_child: bool) -> None:
    """`has_child`: the child is to be copied, too."""
    harness, host, node = with_a_node()
    assert isinstance(harness.cache, RadixCache)
    store, states = harness.cache.store, host_states(harness)
    upper = store.split(node, 5)
    halves = (upper, node) if has_child else (upper,)
    for half in halves:
        assert half.host_pages is not None
        states.host.leave(half.host_pages, half.owner.scope)
    states.want_all()
    for half in halves:
        ask_for(host, half, by)
    compress_chains(store)
    assert upper.is_dead
    assert copied(host) == (0, SNAPSHOTS if has_child else 1)


def taken_slots(harness: Harness) -> list[SnapshotSlot]:
    """Take all slots of the host that copies may fill, as if so many copies were open."""
    pool, slots = host_states(harness).host, []
    while (slot := pool.try_reserve()) is not None:
        slots.append(slot)
    assert not pool.can_reserve
    return slots


def without_a_slot(*, pages: bool = False) -> tuple[Harness, HostTier, Node, list[SnapshotSlot]]:
    """Return a node that was used while the host has no slot for its snapshots, and the slots that are taken.

    `pages`: its pages are to be copied, too.
    """
    harness, host, node = with_a_node()
    lose(harness, host, pages=pages)
    slots = taken_slots(harness)
    host.note(node)
    return harness, host, node, slots


def depths_on_host(harness: Harness, node: Node) -> list[int]:
    assert node.host_pages is not None
    return [index + 1 for index, _ in host_states(harness).host.on(node.host_pages)]


def test_the_deepest_snapshot_is_copied_when_a_slot_is_freed_that_it_lacked() -> None:
    harness, host, node, slots = without_a_slot()
    assert copied(host) == (0, 0)
    assert not host.plan_backups()
    assert not host.has_backups_to_begin
    host_states(harness).host.cancel(slots.pop())
    # Though nothing is used, and no transfer is open.
    harness.run()
    harness.audit()
    assert depths_on_host(harness, node) == [WHOLE_PAGES]
    # The others are copied after their next use.
    for slot in slots:
        host_states(harness).host.cancel(slot)
    harness.run()
    assert depths_on_host(harness, node) == [WHOLE_PAGES]


def test_a_snapshot_without_a_slot_waits_until_its_pages_are_copied() -> None:
    harness, host, _, slots = without_a_slot(pages=True)
    [pages] = harness.core.memory.loads.take_transfers(0.0) if harness.core.memory.loads else ()
    assert (pages.pages, len(pages.host_snapshots)) == (WHOLE_PAGES, 0)
    host_states(harness).host.cancel(slots.pop())
    assert not host.plan_backups()
    host.finish(TransferAck(pages.transfer_id, WHOLE_PAGES, 1), 0.0)
    assert copied(host) == (0, 1)
    assert not host.unplaced()


@pytest.mark.parametrize("is_in_upper", [False, True])
def test_a_snapshot_without_a_slot_is_copied_after_its_node_was_split(is_in_upper: bool) -> None:
    harness, host, node, slots = without_a_slot()
    assert isinstance(harness.cache, RadixCache)
    assert harness.cache.snapshots is not None
    if is_in_upper:
        harness.cache.snapshots.leave(node.pages[5:], node.owner.scope)
    assert copied(host) == (0, 0)
    upper = harness.cache.store.split(node, 5)
    host_states(harness).host.cancel(slots.pop())
    [transfer] = host.plan_backups()
    assert len(transfer.host_snapshots) == 1
    host.finish(TransferAck(transfer.transfer_id, 0), 0.0)
    assert depths_on_host(harness, upper if is_in_upper else node) == [4 if is_in_upper else WHOLE_PAGES - 5]
    assert violations(harness.cache) == []


def test_a_snapshot_without_a_slot_is_copied_after_its_node_was_joined() -> None:
    harness, host, node, slots = without_a_slot()
    assert isinstance(harness.cache, RadixCache)
    assert harness.cache.snapshots is not None
    store = harness.cache.store
    # That of the upper half has no slot; the lower one is gone from the device.
    upper = store.split(node, 5)
    harness.cache.snapshots.leave(node.pages, node.owner.scope)
    assert copied(host) == (0, 0)
    assert host.unplaced() == {upper}
    compress_chains(store)
    assert host.unplaced() == {node}
    host_states(harness).host.cancel(slots.pop())
    assert copied(host) == (0, 1)


def test_a_snapshot_without_a_slot_is_copied_after_its_node_was_merged() -> None:
    harness = make_harness(cache="user_aware", pages=128, snapshots=60, host_snapshots=60)
    users, prompt = ("alice", "bob", "carol"), PROMPT[: 4 * WHOLE_PAGES + 1]
    serve(harness, users[0], prompt, max_tokens=1, user=users[0])
    slots = taken_slots(harness)
    for user in users[1:]:
        serve(harness, user, prompt, max_tokens=1, user=user)
    assert isinstance(harness.cache, RadixCache)
    host, store = harness.cache.host, harness.cache.store
    assert host is not None
    assert {node.owner_id[1] for node in host.unplaced()} == {"bob", "carol"}
    harness.cache.advance(1)
    [node] = [node for node, _ in store.tree.walk()]
    assert node.is_shared
    assert host.unplaced() == {node}
    for slot in slots:
        host_states(harness).host.cancel(slot)
    harness.run()
    harness.audit()
    assert node.host_pages is not None
    deepest = [entry for index, entry in host_states(harness).host.on(node.host_pages) if index + 1 == WHOLE_PAGES]
    assert {entry.owner.scope[1] for entry in deepest} == set(users)
    assert not host.unplaced()


def test_a_snapshot_that_is_being_copied_is_not_copied_again() -> None:
    harness, host, node = with_a_node(snapshots=40)
    lose(harness, host, pages=False)
    ask_for(host, node, "use")
    [opened] = host.plan_backups()
    assert len(opened.host_snapshots) == SNAPSHOTS
    # As when the device is given back meanwhile.
    ask_for(host, node, "giving back")
    assert not host.has_backups_to_begin
    assert copied(host) == (0, 0)
    # Nor with another one of the node, which was not there before.
    assert isinstance(harness.cache, RadixCache)
    pool = harness.cache.snapshots
    assert pool is not None
    slot = pool.try_allocate()
    assert slot is not None
    pool.attach(int(node.pages[0]), node.owner_id, slot)
    ask_for(host, node, "use")
    assert copied(host) == (0, 1)
    for transfer in [each.transfer for each in host.ledger.all()]:
        host.finish(TransferAck(transfer.transfer_id, 0), 0.0)
    assert depths_on_host(harness, node) == [1, 4, 8, WHOLE_PAGES]
    assert violations(harness.cache) == []


@pytest.mark.parametrize("gone", ["snapshot", "node", "copy", "workers"])
def test_a_snapshot_without_a_slot_is_not_waited_for_when_it_is_gone(gone: str) -> None:
    harness, host, node, slots = without_a_slot()
    assert isinstance(harness.cache, RadixCache)
    assert harness.cache.snapshots is not None
    assert copied(host) == (0, 0)
    assert host.unplaced() == {node}
    match gone:
        case "snapshot":
            harness.cache.snapshots.leave(node.pages, node.owner.scope)
        case "node":
            harness.cache.store.remove(node)
            assert not host.unplaced()
        case "copy":
            host.flush()
        case "workers":
            host.forget_all()
            assert not host.unplaced()
    host_states(harness).host.cancel(slots.pop())
    assert copied(host) == (0, 0)
    assert not host.unplaced()

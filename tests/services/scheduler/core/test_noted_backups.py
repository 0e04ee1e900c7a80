"""Nodes that are split, or joined with their child, before they are copied to the host: all of them is copied, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

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
    from services.scheduler.cache.node import Node
    from services.scheduler.cache.tiers.host_tier import HostTier
    from tests.services.scheduler.core.harness import Harness

# Of the prompt, with a snapshot after each fourth one.
WHOLE_PAGES, SNAPSHOTS = 12, 3


def with_a_node() -> tuple[Harness, HostTier, Node]:
    """Return a harness with a node of twelve pages, which is on the host with its snapshots."""
    harness = make_harness()
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

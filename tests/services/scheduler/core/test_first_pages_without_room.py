"""Lookups of stored prompts for whose first page the host has no room, while others have turns or wait for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.types import RequestId
from services.scheduler.cache.tiers.storage_reads import LONGEST_HOLD_S
from tests.services.scheduler.core.read_turns import advance, host_of, submitted, with_no_row
from tests.services.scheduler.core.test_storage import PROMPT

if TYPE_CHECKING:
    from pathlib import Path

    from common.steps import PageIds
    from services.scheduler.cache.tiers.host_tier import HostTier
    from services.scheduler.cache.tiers.storage_reads import Fetch
    from tests.services.scheduler.core.test_storage import Server


def filled(host: HostTier) -> PageIds:
    """Take all of the host's pages that are free or can be evicted, as if transfers were open that need them."""
    room = host.pages.allocator.free_pages + host.pages.evictable
    pages = host.pages.try_allocate(room)
    assert pages is not None
    return pages


@pytest.mark.parametrize("ends", ["start", "room", "no room"])
def test_a_first_page_without_room_waits_for_the_turns_of_others_and_no_longer(keyring: Path, ends: str) -> None:
    server = with_no_row(keyring, ("alice", PROMPT), ("bob", PROMPT), ("dora", PROMPT))
    host, core = host_of(server), server.harness.core
    first, found = submitted(server, "alice"), submitted(server, "bob")
    advance(server)
    taken = filled(host)
    refused = submitted(server, "dora")
    advance(server)
    assert (first.is_done, found.awaits_turn, refused.waits_before_turns) == (True, True, True)
    match ends:
        case "start":
            # The turns of others may end by themselves meanwhile.
            server.harness.now += LONGEST_HOLD_S
            core.abort(RequestId("bob"))
            host.pages.allocator.release(taken)
            advance(server)
            assert refused.is_done
        case "room":
            host.pages.allocator.release(taken)
            advance(server)
            assert refused.awaits_turn
        case "no room":
            # Without others that wait for a turn, too, this one ends.
            core.abort(RequestId("bob"))
            server.harness.now += LONGEST_HOLD_S
            advance(server)
            server.harness.now += LONGEST_HOLD_S
            advance(server)
            assert first.turn is None
            host.pages.allocator.release(taken)
    server.finish()
    assert ("dora", 0) in server.harness.cached


def test_later_lookups_get_no_turn_before_a_first_page_without_room(keyring: Path) -> None:
    server = with_no_row(keyring, ("alice", PROMPT), ("bob", PROMPT), ("dora", PROMPT))
    host = host_of(server)
    submitted(server, "alice")
    advance(server)
    taken = filled(host)
    refused = submitted(server, "bob")
    advance(server)
    assert refused.waits_before_turns
    # One that has its first page.
    later = submitted(server, "dora")
    host.pages.allocator.release(taken[:1])
    refused.prefetch._next, kept = [], refused.prefetch._next
    advance(server)
    refused.prefetch._next = kept
    assert later.awaits_turn
    server.harness.core.abort(RequestId("alice"))
    taken = np.concatenate([taken[1:], filled(host)])
    server.harness.plan()
    assert later.awaits_turn
    host.pages.allocator.release(taken)
    server.finish()


def refused_beside_a_turn(keyring: Path) -> tuple[Server, Fetch, PageIds]:
    """Return a server without room, a lookup of a prompt of which it has three pages, and what takes the room.

    These pages are all that can be evicted, but the others are to be attached to them. The lookup has no turn yet; a
    request that came before it has one, and has all that it asked for.
    """
    server = with_no_row(keyring, ("alice", PROMPT[:13]), ("dora", PROMPT))
    pages = host_of(server).pages
    account = server.cache.store.accounts.owner(("tenant", "dora", ""))
    first = pages.try_allocate(3)
    assert first is not None
    key = np.array(PROMPT[:12], np.int32).tobytes()
    node = server.cache.store.attach_on_host(server.cache.store.tree.root, account, key, first)
    pages.allocator.release(first)
    hold = pages.hold(node)
    in_turn = submitted(server, "alice", PROMPT[:13])
    advance(server)
    assert (in_turn.is_done, in_turn.turn is None) == (True, False)
    taken = filled(host_of(server))
    pages.release(hold)
    refused = submitted(server, "dora")
    assert server.storage.has_work(server.harness.now)
    server.harness.plan()
    assert refused.waits_before_turns
    assert (pages.allocator.free_pages, pages.evictable) == (0, 3)
    return server, refused, taken


def test_a_first_page_without_room_asks_for_no_plan_until_it_has_some(keyring: Path) -> None:
    server, refused, taken = refused_beside_a_turn(keyring)
    storage, pages = server.storage, host_of(server).pages
    assert not storage.has_work(server.harness.now)
    pages.allocator.release(taken[:1])
    assert storage.has_work(server.harness.now)
    advance(server)
    assert refused.prefetch.position > refused.prefetch.first
    # The content of its first pages is nowhere.
    server.harness.core.abort(RequestId("dora"))
    pages.allocator.release(taken[1:])
    server.finish()


def test_a_first_page_without_room_is_given_up_when_no_turn_is_left(keyring: Path) -> None:
    server, refused, taken = refused_beside_a_turn(keyring)
    pages = host_of(server).pages
    server.harness.core.abort(RequestId("alice"))
    [beginning] = [node for node, _ in server.cache.store.tree.walk() if node.owner_id[1] == "dora"]
    hold = pages.hold(beginning)
    others = pages.try_allocate(3)
    pages.release(hold)
    assert others is not None, "what the turn held"
    assert server.storage.has_work(server.harness.now)
    advance(server)
    assert refused.is_done
    pages.allocator.release(np.concatenate([taken, others]))
    server.finish()


def test_a_first_page_without_room_is_given_up_when_the_pages_before_it_are_gone(keyring: Path) -> None:
    server, refused, taken = refused_beside_a_turn(keyring)
    pages = host_of(server).pages
    assert not server.storage.has_work(server.harness.now)
    others = pages.try_allocate(3)
    assert others is not None
    assert server.storage.has_work(server.harness.now)
    advance(server)
    assert refused.is_done
    pages.allocator.release(np.concatenate([taken, others]))
    server.finish()

"""Chats with recurrent layers that continue at the same time after a restart: each is read from storage in its turn."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest

from common.types import RequestId, Subject
from services.scheduler.cache.debug.invariants import violations
from services.scheduler.cache.sharing.merging import compress_chains
from services.scheduler.cache.tiers.ledger import Patience
from services.scheduler.cache.tiers.storage_reads import LONGEST_HOLD_S
from tests.services.scheduler.core.harness import make_request
from tests.services.scheduler.core.test_storage import PROMPT, WAIT
from tests.services.scheduler.core.test_stored_snapshots import DEPTHS, PAGE_SIZE, copies_of, hybrid

if TYPE_CHECKING:
    from pathlib import Path

    from services.scheduler.cache.tiers.host_tier import HostTier
    from services.scheduler.cache.tiers.storage_reads import Fetch
    from tests.fakes.storing_worker import Objects
    from tests.services.scheduler.core.test_storage import Server

CHATS = 12
ROOMY = {"host_pages": 1024, "host_snapshots": 512, "pages": 512, "snapshots": 256, "max_context": 256}


@pytest.fixture
def keyring(tmp_path: Path) -> Path:
    return tmp_path / "keyring.db"


def host_of(server: Server) -> HostTier:
    assert server.cache.host is not None
    return server.cache.host


def chats_of(keyring: Path, objects: Objects, random: Random) -> dict[str, tuple[list[int], int]]:
    """Have a first turn of each chat computed and stored; return the next turns, and what one alone finds of them."""
    server, turns = hybrid(keyring, objects, **ROOMY), {}
    alone = hybrid(keyring, objects, **ROOMY, config=replace(WAIT, writes=False))
    for number in range(CHATS):
        user, prompt = f"user{number}", [random.randrange(8, 250) for _ in range(48 - number % 7)]
        server.serve(user, prompt, user=user, max_tokens=4)
        turn = [*prompt, *server.harness.outputs[user, 0], *range(300, 310)]
        turns[user] = turn, alone.serve(user, turn, user=user)
    assert all(found > 36 for _, found in turns.values())
    return turns


def finish_slowly(server: Server, random: Random) -> None:
    """Go on until nothing is left to do, while transfers end in any order."""
    harness = server.harness
    for _ in range(20_000):
        harness.plan()
        harness.check_accounts()
        is_running = harness.result()
        ids = list(server.worker.open)
        random.shuffle(ids)
        for transfer_id in ids[: random.randint(0, len(ids))]:
            harness.complete(transfer_id, 0)
        if not (is_running or server.worker.open or harness.results or harness.core.queue):
            server.finish()
            return
    raise AssertionError("the core does not come to rest")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "room",
    [
        {"host_pages": 256, "host_snapshots": 8},
        {"host_pages": 256, "host_snapshots": 2},
        {"host_pages": 64, "host_snapshots": 32},
        # One of them at a time.
        {"host_pages": 20, "host_snapshots": 3},
        {"host_pages": 64, "host_snapshots": 1},
        {"host_pages": 64, "host_snapshots": 8, "snapshots": 4},
        {"host_pages": 64, "host_snapshots": 8, "snapshots": 3},
        {"host_pages": 128, "pages": 96, "max_rows": 12, "snapshots": 16},
    ],
    ids=lambda room: " ".join(f"{name}={value}" for name, value in room.items()),
)
def test_all_of_many_chats_at_once_are_found(keyring: Path, room: dict[str, int], seed: int) -> None:
    objects: Objects = {}
    random = Random(seed)
    turns = chats_of(keyring, objects, random)
    options = {**ROOMY, "host_snapshots": 32, "max_step_tokens": 32, **room}
    server = hybrid(keyring, objects, **options)
    for user, (turn, _) in turns.items():
        server.harness.core.submit(make_request(user, turn, user=user, max_tokens=3), 0.0)
    finish_slowly(server, random)
    found = {user: server.harness.cached[user, 0] for user in turns}
    assert found == {user: expected for user, (_, expected) in turns.items()}
    # Nothing is held once nothing is going on.
    assert not host_of(server).pages.held_nodes()
    assert copies_of(server).host.moving == 0
    assert not any(entry.readers for entry in copies_of(server).host.all())


def test_a_prompt_that_found_more_than_the_host_has_is_computed(keyring: Path) -> None:
    objects: Objects = {}
    hybrid(keyring, objects).serve("cold")
    small = hybrid(keyring, objects, host_pages=10)
    assert small.serve("computed") == 0
    # Nothing but the first page, which shows that there may be more.
    assert small.storage.fetched_pages == 1
    assert hybrid(keyring, objects, host_pages=12).serve("read") == DEPTHS[-1] * PAGE_SIZE


def submitted(server: Server, user: str, prompt: list[int] = PROMPT) -> Fetch:
    core = server.harness.core
    core.submit(make_request(user, prompt, user=user, max_tokens=2), server.harness.now)
    sequence = core.leader_of(RequestId(user))
    assert sequence is not None
    assert sequence.fetch is not None
    return sequence.fetch


def advance(server: Server, steps: int = 12) -> None:
    """Go on for so many steps, more than a prompt needs that need not wait."""
    for _ in range(steps):
        server.harness.plan()
        server.harness.result()
        server.harness.complete_all()


def held_up(keyring: Path) -> tuple[Server, Fetch, Fetch]:
    """Return a server whose one row is taken, and two lookups of stored prompts: one in its turn, one after it."""
    objects: Objects = {}
    for user in ("alice", "bob"):
        hybrid(keyring, objects).serve(user, user=user)
    server = hybrid(keyring, objects, host_pages=20, max_rows=1)
    server.harness.core.submit(make_request("long", [1, 2, 3], user="carol", max_tokens=100), 0.0)
    advance(server, 2)
    lookups = submitted(server, "alice"), submitted(server, "bob")
    advance(server)
    return server, *lookups


def test_a_request_that_has_not_started_for_long_gives_its_turn_to_others(keyring: Path) -> None:
    server, first, second = held_up(keyring)
    assert first.is_done
    assert second.awaits_turn
    server.harness.now += LONGEST_HOLD_S / 2
    advance(server)
    assert second.awaits_turn
    server.harness.now += LONGEST_HOLD_S / 2
    advance(server)
    assert (first.turn, second.is_done) == (None, True)
    server.finish()
    assert server.harness.cached["bob", 0] == DEPTHS[-1] * PAGE_SIZE


def test_those_that_found_little_do_not_pass_one_that_waits_for_much_room(keyring: Path) -> None:
    objects: Objects = {}
    lengths = {"alice": 3, "bob": 11, "dora": 3}
    for user in lengths:
        hybrid(keyring, objects).serve(user, user=user)
    server = hybrid(keyring, objects, host_pages=20, max_rows=1)
    server.harness.core.submit(make_request("long", [1, 2, 3], user="carol", max_tokens=100), 0.0)
    advance(server, 2)
    lookups = []
    for user, pages in lengths.items():
        lookups.append(submitted(server, user, PROMPT[: pages * PAGE_SIZE + 1]))
        advance(server)
    assert [fetch.awaits_turn for fetch in lookups] == [False, True, True]
    server.finish()
    assert all(server.harness.cached[user, 0] == pages * PAGE_SIZE for user, pages in lengths.items())


def test_a_request_that_ends_while_it_waits_leaves_its_turn_to_others(keyring: Path) -> None:
    server, first, second = held_up(keyring)
    server.harness.core.abort(RequestId("alice"))
    advance(server)
    assert (first.turn, second.is_done) == (None, True)
    server.finish()
    assert server.harness.cached["bob", 0] == DEPTHS[-1] * PAGE_SIZE


def test_lost_workers_end_all_turns(keyring: Path) -> None:
    server, first, second = held_up(keyring)
    server.replace_workers()
    assert first.turn is second.turn is None
    server.finish()
    assert not host_of(server).pages.held_nodes()
    for user in ("alice", "bob"):
        assert server.harness.cached[user, 0] == DEPTHS[-1] * PAGE_SIZE


def test_what_a_turn_holds_follows_the_tree(keyring: Path) -> None:
    server, first, _ = held_up(keyring)
    store, pages = server.cache.store, host_of(server).pages
    assert first.turn is not None
    assert first.turn.hold is not None
    node = first.turn.hold.node
    assert node is not None
    upper = store.split(node, 1)
    assert pages.held_nodes() >= {node, upper}
    hold = pages.hold(upper)
    assert violations(server.cache) == []
    compress_chains(store)
    assert hold.node is node
    pages.release(hold)
    assert violations(server.cache) == []
    # More than is left beside the pages that are held.
    assert pages.try_allocate(pages.allocator.capacity - DEPTHS[-1] + 1) is None
    server.cache.forget(Subject("tenant", "alice"))
    assert first.turn.hold.node is None
    assert not pages.held_nodes()
    server.finish()
    assert server.harness.cached["alice", 0] == 0


def test_what_a_turn_holds_is_held_with_the_node_that_takes_its_place(keyring: Path) -> None:
    server, first, _ = held_up(keyring)
    store, host = server.cache.store, host_of(server)
    assert first.turn is not None
    assert first.turn.hold is not None
    node = first.turn.hold.node
    assert node is not None
    assert node.parent is not None
    copy = host.pages.try_allocate(node.size)
    assert copy is not None
    other = store.attach_on_host(node.parent, store.accounts.view(("tenant", "dora", "")), node.key, copy)
    host.pages.allocator.release(copy)
    store.tier.take_over(node, other)
    assert first.turn.hold.node is other


def test_patience_lasts_for_the_transfers_that_were_open_when_it_began(keyring: Path) -> None:
    server = hybrid(keyring, {})
    ledger, patience = host_of(server).ledger, Patience()
    assert not patience.lasts(ledger)
    server.harness.core.submit(make_request("cold", PROMPT), 0.0)
    while not server.worker.open:
        server.harness.plan()
        server.harness.result()
    assert patience.lasts(ledger)
    oldest = set(server.worker.open)
    while server.worker.open.keys() & oldest:
        assert patience.lasts(ledger)
        server.harness.complete(next(iter(server.worker.open)), 0)
        server.harness.plan()
    assert not patience.lasts(ledger)
    patience.end()
    assert patience.lasts(ledger) is bool(server.worker.open)

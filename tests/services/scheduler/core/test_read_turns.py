"""Chats with recurrent layers that continue at the same time after a restart: each is read from storage in its turn."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest

from common.errors import UnavailableError
from common.types import RequestId, Subject
from services.scheduler.cache.debug.invariants import violations
from services.scheduler.cache.node import Node
from services.scheduler.cache.sharing.merging import compress_chains
from services.scheduler.cache.tiers.ledger import Patience
from services.scheduler.cache.tiers.read_turns import TurnOrder, Waits
from services.scheduler.cache.tiers.storage_reads import LONGEST_HOLD_S, Fetch
from tests.services.scheduler.core.harness import make_request
from tests.services.scheduler.core.read_turns import advance, host_of, submitted, with_no_row
from tests.services.scheduler.core.test_storage import PROMPT, WAIT
from tests.services.scheduler.core.test_stored_snapshots import DEPTHS, INTERVAL, PAGE_SIZE, copies_of, hybrid

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.storing_worker import Objects
    from tests.services.scheduler.core.test_storage import Server

CHATS = 12
ROOMY = {"host_pages": 1024, "host_snapshots": 512, "pages": 512, "snapshots": 256, "max_context": 256}


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


def held_up(keyring: Path) -> tuple[Server, Fetch, Fetch]:
    """Return a server without a free row, and two lookups of stored prompts: one in its turn, one after it."""
    server = with_no_row(keyring, ("alice", PROMPT), ("bob", PROMPT))
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


def test_a_user_with_many_lookups_leaves_the_next_turn_to_others(keyring: Path) -> None:
    others = [list(range(number, number + 48)) for number in (300, 400, 500)]
    server = with_no_row(keyring, *(("alice", prompt) for prompt in others), ("bob", PROMPT), ("dora", PROMPT))
    lookups = []
    for number, prompt in enumerate(others):
        lookups.append(submitted(server, "alice", prompt, f"alice {number}"))
        advance(server)
    later = submitted(server, "bob")
    advance(server)
    assert [fetch.awaits_turn for fetch in (*lookups, later)] == [False, True, True, True]
    # The turn of the first began before the last came.
    server.harness.core.abort(RequestId("alice 0"))
    advance(server)
    assert [fetch.awaits_turn for fetch in (*lookups[1:], later)] == [False, True, True]
    server.harness.core.abort(RequestId("alice 1"))
    advance(server)
    assert [fetch.awaits_turn for fetch in (lookups[2], later)] == [True, False]
    # Others that come now do not pass it.
    last = submitted(server, "dora")
    advance(server)
    server.harness.core.abort(RequestId("bob"))
    advance(server)
    assert [fetch.awaits_turn for fetch in (lookups[2], last)] == [False, True]
    server.finish()


def test_a_tenant_with_many_users_leaves_the_next_turn_to_others(keyring: Path) -> None:
    users = [f"user{number}" for number in range(4)]
    server = with_no_row(keyring, *((user, PROMPT) for user in users))
    stored = hybrid(keyring, server.worker.objects)
    stored.harness.core.submit(make_request("other", PROMPT, tenant="other", user="bob", max_tokens=2), 0.0)
    stored.finish()
    lookups = [submitted(server, user) for user in users]
    advance(server)
    other = submitted(server, "bob", tenant="other")
    advance(server)
    assert [fetch.awaits_turn for fetch in (*lookups, other)] == [False, True, True, True, True]
    # The turn of the first began before the other tenant's came.
    for user in users[:2]:
        server.harness.core.abort(RequestId(user))
        advance(server)
    assert [fetch.awaits_turn for fetch in (*lookups[2:], other)] == [True, True, False]
    server.harness.core.abort(RequestId("bob"))
    advance(server)
    assert [fetch.awaits_turn for fetch in lookups[2:]] == [False, True]
    server.finish()
    assert server.harness.cached["user3", 0] == DEPTHS[-1] * PAGE_SIZE


def all_found(server: Server, count: int) -> list[Fetch]:
    """Go on until `count` lookups have found something, all at the same time; return these, which have no turns yet."""
    lookups = list(server.storage._reads._fetches)
    for _ in range(2):
        server.harness.plan()
        server.harness.result()
        server.harness.complete_all()
    assert [fetch.awaits_turn for fetch in lookups] == [True] * count
    return lookups


def test_turns_that_begin_in_one_plan_are_those_of_several_tenants(keyring: Path) -> None:
    objects: Objects = {}
    long, short = PROMPT, PROMPT[: DEPTHS[0] * PAGE_SIZE + 1]
    requests = [("alice", "one", long), ("bob", "one", long), ("carol", "other", long), ("dora", "one", short)]
    for user, tenant, prompt in requests:
        stored = hybrid(keyring, objects)
        stored.harness.core.submit(make_request(user, prompt, tenant=tenant, user=user, max_tokens=2), 0.0)
        stored.finish()
    # There is room for two long ones and a short one, which does not pass the third long one of its tenant.
    server = hybrid(keyring, objects, host_pages=2 * (2 * DEPTHS[-1] + DEPTHS[0]), max_rows=1)
    server.harness.core.submit(make_request("long", [1, 2, 3], user="eve", max_tokens=100), 0.0)
    advance(server, 2)
    for user, tenant, prompt in requests:
        submitted(server, user, prompt, tenant=tenant)
    lookups = all_found(server, len(requests))
    server.harness.plan()
    assert [fetch.turn is not None for fetch in lookups] == [True, False, True, False]
    server.finish()


def test_places_in_the_order_of_turns_are_not_compared_again_for_each_turn_that_begins(
    keyring: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As thousands of turns may begin in one plan."""
    users = [f"user{number}" for number in range(40)]
    server = with_no_row(keyring, *((user, PROMPT) for user in users), **ROOMY)
    for user in users:
        submitted(server, user)
    lookups = all_found(server, len(users))
    place, looks = TurnOrder.place, list[int]()

    def looked_at(order: TurnOrder, waiting: Waits) -> tuple[bool, int, int]:
        looks.append(waiting.number)
        return place(order, waiting)

    monkeypatch.setattr(TurnOrder, "place", looked_at)
    server.harness.plan()
    assert all(fetch.turn is not None for fetch in lookups)
    assert len(looks) <= 5 * len(users)
    server.finish()


def test_a_batch_leaves_turns_to_others_at_once(keyring: Path) -> None:
    server = with_no_row(keyring, *((user, PROMPT) for user in ("alice", "bob", "dora")))
    first = submitted(server, "alice", is_batch=True)
    advance(server)
    second = submitted(server, "bob", is_batch=True)
    advance(server)
    assert (first.is_done, first.turn is None, second.awaits_turn) == (True, False, True)
    other = submitted(server, "dora")
    advance(server)
    assert (first.turn, second.awaits_turn, other.is_done) == (None, True, True)
    assert other.turn is not None
    server.finish()
    assert server.harness.cached["dora", 0] == server.harness.cached["bob", 0] == DEPTHS[-1] * PAGE_SIZE


def test_a_turn_goes_on_as_long_as_those_that_come_have_room(keyring: Path) -> None:
    server = with_no_row(keyring, ("alice", PROMPT[:13]), ("bob", PROMPT[:13]))
    first = submitted(server, "alice", PROMPT[:13])
    advance(server)
    server.harness.now += LONGEST_HOLD_S
    second = submitted(server, "bob", PROMPT[:13])
    advance(server)
    assert first.turn is not None
    assert second.turn is not None
    # Those that wait for a turn that cannot begin ask for no plan.
    storage = server.storage
    third = submitted(server, "dora")
    advance(server)
    assert third.is_done
    assert not storage.has_work(server.harness.now)
    server.finish()


def test_no_more_turns_end_than_one_that_waits_has_need_of(keyring: Path) -> None:
    short = PROMPT[:13]
    server = with_no_row(keyring, ("alice", short), ("bob", short), ("eve", short), ("dora", PROMPT[:17]))
    lookups = [submitted(server, user, short) for user in ("alice", "bob", "eve")]
    advance(server)
    other = submitted(server, "dora", PROMPT[:17])
    advance(server)
    assert other.awaits_turn
    server.harness.now += LONGEST_HOLD_S
    advance(server)
    assert [fetch.turn is None for fetch in lookups] == [True, False, False]
    assert other.turn is not None
    server.finish()


def shares_a_beginning(keyring: Path) -> tuple[Server, list[int], list[int]]:
    """Return a server whose one row is taken, and prompts of two users, which are stored.

    Of the first one, the host has the pages as the beginning of a longer prompt, and no snapshot.
    """
    objects: Objects = {}
    longer, other = [*PROMPT, *range(200, 224)], PROMPT[:29]
    hybrid(keyring, objects).serve("bob", other, user="bob")
    server = hybrid(keyring, objects, host_pages=20, max_rows=1)
    server.serve("longer", longer)
    server.cache.evict(server.harness.config.device_pages)
    for node, _ in server.cache.store.tree.walk():
        assert node.host_pages is not None
        copies_of(server).host.forget(node.host_pages)
    server.harness.core.submit(make_request("long", [1, 2, 3], user="carol", max_tokens=100), 0.0)
    advance(server, 2)
    return server, longer[: INTERVAL * PAGE_SIZE + 1], other


def test_a_turn_holds_nothing_of_a_longer_prompt_but_what_it_is_for(keyring: Path) -> None:
    server, beginning, other = shares_a_beginning(keyring)
    first = submitted(server, "alice", beginning)
    advance(server)
    assert first.turn is not None
    assert sum(node.size for node in host_of(server).pages.held_nodes()) == first.turn.pages == INTERVAL
    second = submitted(server, "bob", other)
    advance(server)
    assert second.turn is not None
    server.finish()
    assert (server.harness.cached["alice", 0], server.harness.cached["bob", 0]) == (len(beginning) - 1, len(other) - 1)


def test_what_a_turn_holds_as_nodes_were_joined_leaves_no_room_to_others(keyring: Path) -> None:
    server, beginning, other = shares_a_beginning(keyring)
    first = submitted(server, "alice", beginning)
    advance(server)
    compress_chains(server.cache.store)
    assert violations(server.cache) == []
    assert first.turn is not None
    assert first.turn.hold is not None
    assert first.turn.hold.pages > INTERVAL
    second = submitted(server, "bob", other)
    advance(server)
    assert second.awaits_turn
    server.harness.core.abort(RequestId("alice"))
    server.finish()
    assert server.harness.cached["bob", 0] == len(other) - 1


def test_turns_that_are_held_are_compared_with_lookups_that_wait_once(
    keyring: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not each with all of them, as there may be hundreds of the former and thousands of the latter."""
    short = PROMPT[:13]
    users = ("alice", "bob", "eve")
    server = with_no_row(keyring, *((user, short) for user in users), ("dora", PROMPT[:17]))
    reads = server.storage._reads
    looks: list[int] = []
    awaits_room = Fetch.awaits_room.fget  # type: ignore[attr-defined]  # it is a property

    def looked_at(fetch: Fetch) -> bool:
        looks.append(fetch.number)
        return bool(awaits_room(fetch))

    monkeypatch.setattr(Fetch, "awaits_room", property(looked_at))
    for user in users:
        submitted(server, user, short)
    advance(server)
    waiting = submitted(server, "dora", PROMPT[:17])
    advance(server)
    assert (len(reads._holding), waiting.awaits_turn) == (3, True)
    looks.clear()
    assert not reads.has_work(server.harness.now)
    assert looks == [waiting.number]
    server.finish()


def test_the_room_of_the_host_is_known_without_a_look_at_what_turns_hold(
    keyring: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is asked for each page of each lookup, and turns may hold thousands of nodes."""
    short = PROMPT[:13]
    server = with_no_row(keyring, ("alice", short), ("bob", short))
    lookups = [submitted(server, user, short) for user in ("alice", "bob")]
    advance(server)
    pages, turns = host_of(server).pages, [fetch.turn for fetch in lookups]
    assert all(turn is not None and turn.hold is not None and turn.hold.pages == turn.pages == 3 for turn in turns)
    with monkeypatch.context() as context:

        def looked_at(node: Node) -> int:
            raise AssertionError(f"node {node.node_id} was looked at")

        context.setattr(Node, "size", property(looked_at))
        assert pages.evictable == pages.references - 6
        assert not server.storage.has_work(server.harness.now)
    server.finish()
    assert pages.evictable == pages.references > 0


def test_turns_of_users_who_have_no_lookups_are_forgotten(keyring: Path) -> None:
    objects: Objects = {}
    users = [f"user{number}" for number in range(6)]
    for user in users:
        hybrid(keyring, objects).serve(user, user=user)
    server = hybrid(keyring, objects)
    for user in users:
        assert server.serve(user, user=user) == DEPTHS[-1] * PAGE_SIZE
    # The tenant, and the last one.
    assert len(server.storage._reads._order) == 2


def test_a_load_waits_for_a_slot_of_the_device_as_long_as_transfers_are_open_that_may_have_it(keyring: Path) -> None:
    server = hybrid(keyring, {})
    server.serve("cold")
    server.cache.evict(server.harness.config.device_pages)
    pool, harness = server.cache.snapshots, server.harness
    assert pool is not None
    slots = []
    while (slot := pool.try_reserve()) is not None:
        slots.append(slot)
    # Its transfers stay open.
    harness.core.submit(make_request("other", [*range(300, 320)], user="bob", max_tokens=1), 0.0)
    while not server.worker.open:
        harness.plan()
        harness.result()
    harness.core.submit(make_request("warm", PROMPT, max_tokens=1), 0.0)
    for _ in range(12):
        harness.plan()
        harness.result()
    assert server.worker.open
    assert ("warm", 0) not in harness.cached
    pool.cancel(slots.pop())
    harness.run()
    assert harness.cached["warm", 0] == DEPTHS[-1] * PAGE_SIZE
    for slot in slots:
        pool.cancel(slot)
    server.finish()


@pytest.mark.parametrize("ending", ["abort", "expiry", "failure of all"])
@pytest.mark.parametrize("user", ["alice", "bob"])
def test_a_waiting_request_that_ends_leaves_nothing(keyring: Path, ending: str, user: str) -> None:
    server = with_no_row(keyring, ("alice", PROMPT), ("bob", PROMPT))
    core = server.harness.core
    first, second = (submitted(server, name, timeout_ms=1000) for name in ("alice", "bob"))
    advance(server)
    assert second.awaits_turn
    match ending:
        case "abort":
            core.abort(RequestId(user))
        case "expiry":
            server.harness.now += 2.0
            core.expire(server.harness.now)
        case "failure of all":
            core.fail_all(UnavailableError("away"))
    advance(server)
    if ending != "abort":
        assert first.turn is second.turn is None
        assert not host_of(server).pages.held_nodes()
    server.finish()
    assert not server.storage._reads._holding
    assert not len(server.storage._reads._turns or ())
    assert copies_of(server).host.moving == 0


@pytest.mark.parametrize("lost", ["pages", "snapshots", "both"])
def test_what_is_lost_between_search_and_turn_ends_the_wait(keyring: Path, lost: str) -> None:
    server, _, second = held_up(keyring)
    assert second.awaits_turn
    # Has the same names as those of the objects.
    same = hybrid(keyring, {})
    same.serve("bob", user="bob")
    names = (
        *(() if lost == "snapshots" else same.worker.stored),
        *(() if lost == "pages" else same.worker.stored_states),
    )
    for name in names:
        del server.worker.objects[0, name]
    server.harness.core.abort(RequestId("alice"))
    advance(server, 40)
    assert second.is_done
    assert second.turn is None
    server.finish()
    assert server.harness.cached["bob", 0] == 0
    assert not host_of(server).pages.held_nodes()


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
    # As by a transfer: what is needed and held is counted once.
    evictable, ledger = pages.evictable, host_of(server).ledger
    for count in (1, -1):
        ledger.need(node, count)
        assert pages.evictable == evictable
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
    assert other in host.pages.held_nodes()
    assert node not in host.pages.held_nodes()
    assert host.pages.held == first.turn.hold.pages


def test_what_is_held_below_a_text_that_becomes_shared_is_held_with_it(keyring: Path) -> None:
    server = hybrid(keyring, {}, cache="user_aware", host_pages=256, pages=128)
    for user in ("alice", "bob", "carol"):
        server.serve(user, [*PROMPT, *range(300, 320)] if user == "bob" else PROMPT, user=user)
    store, pages = server.cache.store, host_of(server).pages
    compress_chains(store)
    owned = [node for node, _ in store.tree.walk() if node.owner_id[1] == "bob"]
    end = owned[-1]
    hold = pages.hold(end)
    assert hold.pages >= 16
    server.cache.advance(1)
    assert (end.owner_id[1], store.tree.depth_pages(end)) == ("bob", hold.pages)
    assert any(node.is_shared for node in pages.held_nodes())
    assert violations(server.cache) == []
    pages.release(hold)
    assert violations(server.cache) == []


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

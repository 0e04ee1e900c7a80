"""Storage that is read but refuses writes, as a full or a read-only disk does: few are tried, and none is lost."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.circuit_breaker import FAILURES_TO_OPEN, FIRST_PAUSE_S, LONGEST_PAUSE_S
from common.transfers import TransferAck
from services.scheduler.cache.config import CacheConfig, Mode
from services.scheduler.cache.keys import PagedKey, chain_hashes
from services.scheduler.cache.types import PUBLIC_SCOPE, Scope
from tests.fakes.storing_worker import DROP, FETCH, STORE, Objects
from tests.services.scheduler.core.harness import make_request
from tests.services.scheduler.core.test_storage import PROMPT, Server
from tests.services.scheduler.core.test_stored_snapshots import ALL_DEPTHS, hybrid

if TYPE_CHECKING:
    from pathlib import Path

    from services.scheduler.cache.node import Node

PAGES = 12
OTHER = list(range(200, 248))
ALICE = make_request("names alice's view", PROMPT).view
USERS = ("alice", "bob", "carol")
TENANT: Scope = ("tenant",)


def stores(server: Server) -> int:
    return sum(direction is STORE for direction in server.directions())


def refuse(server: Server, name: str = "refused") -> None:
    """Have storage refuse writes until they pause."""
    server.worker.is_full = True
    for number in range(FAILURES_TO_OPEN):
        server.serve(f"{name}-{number}")
    assert server.worker.objects == {}


def accept(server: Server) -> None:
    """Let storage take writes again, and wait until they are tried."""
    server.worker.is_full = False
    server.harness.now += LONGEST_PAUSE_S


def test_uses_while_storage_refuses_writes_try_few(keyring: Path) -> None:
    server = Server(keyring, {})
    refuse(server)
    for number in range(50):
        server.serve(f"again-{number}")
    assert stores(server) == FAILURES_TO_OPEN
    assert server.worker.open == {}


def test_one_write_is_tried_after_each_pause_and_pauses_double(keyring: Path) -> None:
    server = Server(keyring, {})
    refuse(server)
    seconds = 1000
    for second in range(seconds):
        server.harness.now += 1.0
        if second % 10 == 0:
            server.serve(f"{second}")
        server.finish()
    doublings = int(math.log2(LONGEST_PAUSE_S / FIRST_PAUSE_S)) + 1
    assert doublings <= stores(server) - FAILURES_TO_OPEN <= doublings + seconds / LONGEST_PAUSE_S


def test_what_was_refused_is_stored_once_when_storage_takes_it(keyring: Path) -> None:
    objects: Objects = {}
    server = Server(keyring, objects)
    refuse(server)
    server.serve("while it is refused", OTHER, user="bob")
    server.serve("wanted again")
    tried = len(server.worker.stored)
    accept(server)
    server.finish()
    assert len(objects) == 2 * PAGES
    server.serve("and again")
    assert len(server.worker.stored) == tried + 2 * PAGES
    assert Server(keyring, objects).serve("elsewhere") == 44


def test_after_a_pause_one_node_is_tried_before_the_others(keyring: Path) -> None:
    server = Server(keyring, {})
    refuse(server)
    for number in range(1, 6):
        server.serve(f"{number}", list(range(150 * number, 150 * number + 40)), user="bob")
    tried = stores(server)
    server.harness.now += FIRST_PAUSE_S
    server.finish()
    assert stores(server) == tried + 1
    accept(server)
    server.finish()
    assert len(server.worker.objects) >= 5 * 10


def test_reads_go_on_while_writes_pause(keyring: Path) -> None:
    objects: Objects = {}
    Server(keyring, objects).serve("stored earlier", OTHER)
    server = Server(keyring, objects)
    server.worker.is_full = True
    for number in range(FAILURES_TO_OPEN):
        server.serve(f"{number}")
    assert not server.storage._writes._breaker.is_ready(server.harness.now)
    assert server.serve("read", OTHER) == 44
    assert FETCH in server.directions()


def test_stored_pages_of_a_subject_are_dropped_while_writes_pause(keyring: Path) -> None:
    objects: Objects = {}
    server = Server(keyring, objects)
    server.serve("stored", OTHER)
    server.worker.is_full = True
    for number in range(FAILURES_TO_OPEN):
        server.serve(f"{number}")
    server.cache.forget(ALICE.subject)
    server.finish()
    server.serve("another's", [1, 2, 3], user="bob")
    assert DROP in server.directions()
    assert objects == {}
    accept(server)
    server.finish()
    assert len(objects) == 1, "the other user's"


def test_nothing_is_kept_of_nodes_that_are_gone_while_writes_pause(keyring: Path) -> None:
    server = Server(keyring, {})
    refuse(server)
    server.serve("noted", OTHER, user="bob")
    nodes = list(server.storage._writes._noted)
    assert nodes
    for node in nodes:
        server.cache.store.remove(node)
    assert not server.storage._writes._noted


def test_new_workers_are_asked_at_once(keyring: Path) -> None:
    server = Server(keyring, {})
    refuse(server)
    server.replace_workers()
    server.serve("stored")
    assert len(server.worker.objects) == PAGES


def test_snapshots_wait_as_well_and_are_stored_with_their_pages(keyring: Path) -> None:
    objects: Objects = {}
    server = hybrid(keyring, objects)
    refuse(server)
    tried = stores(server)
    server.serve("again")
    assert stores(server) == tried
    accept(server)
    server.serve("and again")
    assert len(objects) == PAGES + len(ALL_DEPTHS)
    assert hybrid(keyring, objects).serve("elsewhere") == 44


# --- what is refused to one owner, and becomes another's ---


@pytest.fixture
def objects() -> Objects:
    return {}


@pytest.fixture
def server(keyring: Path, objects: Objects) -> Server:
    return Server(keyring, objects, cache="user_aware", pages=128, rules=CacheConfig(mode=Mode.USER_AWARE))


def names(server: Server, scope: Scope) -> set[bytes]:
    """Return the names under which the prompt's pages are stored as those of a scope."""
    tree = server.cache.store.tree
    key = PagedKey(np.array(PROMPT, np.int32), tree.page_size)
    return set(server.keyring.keys(scope, chain_hashes(key.slice(0, PAGES), tree.page_bytes)).names)


def stored(objects: Objects) -> set[bytes]:
    return {name for _, name in objects}


def compute(server: Server) -> None:
    """Have three users of a tenant compute the prompt while storage refuses writes."""
    server.worker.is_full = True
    for user in USERS:
        server.serve(f"{user} computes", user=user)
    assert server.worker.objects == {}


def promote(server: Server) -> Node:
    """Let the prompt that three users have computed become their tenant's."""
    server.cache.advance(server.cache.epoch + 1)
    [node] = [node for node, _ in server.cache.store.tree.walk() if node.is_shared]
    return node


def try_all(server: Server) -> None:
    """Let storage refuse each node of the prompt, one after each pause."""
    for number in range(2 * len(USERS)):
        server.harness.now += LONGEST_PAUSE_S
        server.serve(f"refused-{number}")


def private(server: Server) -> set[bytes]:
    return set().union(*(names(server, ("tenant", user, "")) for user in USERS))


def test_what_was_refused_to_users_is_stored_as_their_tenant_s_if_it_has_become_so(
    keyring: Path, server: Server, objects: Objects
) -> None:
    compute(server)
    assert promote(server).owner_id == TENANT
    accept(server)
    server.serve("alice asks on")
    assert names(server, TENANT) - stored(objects) == set()
    assert not private(server) & stored(objects)
    assert Server(keyring, objects, cache="user_aware", pages=128).serve("dave", user="dave") == 44


def test_a_write_that_fails_after_its_pages_became_the_tenant_s_is_repeated_as_the_tenant_s(
    server: Server, objects: Objects
) -> None:
    compute(server)
    host = server.cache.host
    assert host is not None
    accept(server)
    started = host.plan_storage(server.harness.now)
    assert {name for transfer in started for name in transfer.object_keys} <= private(server)
    promote(server)
    for transfer in started:
        host.finish(TransferAck(transfer.transfer_id, 0), server.harness.now)
    server.harness.now += LONGEST_PAUSE_S
    server.serve("alice asks on")
    assert names(server, TENANT) - stored(objects) == set()
    assert not private(server) & stored(objects)


def test_what_was_refused_to_a_tenant_is_stored_as_its_users_if_it_was_demoted(
    keyring: Path, server: Server, objects: Objects
) -> None:
    compute(server)
    promote(server)
    try_all(server)
    tenants = names(server, TENANT)
    assert tenants <= set(server.worker.stored)
    while shared := [node for node, _ in server.cache.store.tree.walk() if node.is_shared]:
        server.cache._demoter.demote(shared[0])
    accept(server)
    server.serve("alice asks on")
    assert stored(objects)
    assert not (tenants | names(server, TENANT)) & stored(objects)
    for user, cached in (("alice", 44), ("dave", 0)):
        assert Server(keyring, objects, cache="user_aware").serve(user, user=user) == cached


def test_a_pinned_prompt_that_was_refused_is_not_stored_as_public_once_it_is_unpinned(
    server: Server, objects: Objects
) -> None:
    server.cache.pin(np.array(PROMPT, np.int32))
    server.cache.advance(1)
    server.worker.is_full = True
    try_all(server)
    public = names(server, PUBLIC_SCOPE)
    assert public & set(server.worker.stored)
    server.cache.unpin(np.array(PROMPT, np.int32))
    accept(server)
    server.serve("again")
    assert server.worker.open == {}
    assert not (public | names(server, PUBLIC_SCOPE)) & stored(objects)

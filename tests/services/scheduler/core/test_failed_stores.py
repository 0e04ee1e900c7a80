"""Pages and snapshots whose write to storage failed: they are written after their next use, and found elsewhere.

`test_refused_stores.py` is about storage that goes on refusing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.circuit_breaker import FIRST_PAUSE_S
from common.transfers import TransferAck
from services.scheduler.cache.sharing.merging import compress_chains
from tests.fakes.storing_worker import STORE, Objects
from tests.services.scheduler.core.test_storage import PROMPT, Server
from tests.services.scheduler.core.test_stored_snapshots import ALL_DEPTHS, hybrid

if TYPE_CHECKING:
    from pathlib import Path

    from services.scheduler.cache.node import Node

PAGE = 4
# Of both turns.
TURN = [*PROMPT, *range(300, 320)]


def stores(server: Server) -> int:
    return sum(direction is STORE for direction in server.directions())


def fail_to_store(server: Server) -> None:
    """Serve the prompt while storage is down, and wait until writes are tried again after many failures."""
    server.worker.is_down = True
    server.serve("first turn", user="alice")
    server.worker.is_down = False
    assert server.worker.objects == {}
    server.harness.now += FIRST_PAUSE_S


def only_node(server: Server) -> Node:
    compress_chains(server.cache.store)
    [node] = [node for node, _ in server.cache.store.tree.walk()]
    return node


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_later_turn_stores_what_an_earlier_one_could_not(keyring: Path, ranks: int) -> None:
    objects: Objects = {}
    server = Server(keyring, objects, ranks=ranks)
    fail_to_store(server)
    server.serve("second turn", TURN)
    assert Server(keyring, objects, ranks=ranks).serve("elsewhere", TURN) == (len(TURN) - 1) // PAGE * PAGE


def test_with_recurrent_layers_the_snapshots_before_it_are_stored_as_well(keyring: Path) -> None:
    objects: Objects = {}
    server = hybrid(keyring, objects)
    fail_to_store(server)
    server.serve("second turn", TURN)
    assert hybrid(keyring, objects).serve("elsewhere", TURN) == (len(TURN) - 1) // PAGE * PAGE
    # Those of the first turn alone.
    assert hybrid(keyring, objects).serve("first turn", PROMPT) == 44


def test_a_snapshot_is_stored_after_its_next_use_if_only_its_own_write_failed(keyring: Path) -> None:
    objects: Objects = {}
    server = hybrid(keyring, objects)
    harness = server.harness
    fail_to_store(server)
    server.storage.note(only_node(server))
    while harness.results or server.worker.open or server.storage.has_work(harness.now):
        harness.plan()
        for number, opened in list(server.worker.open.items()):
            server.worker.is_down = len(opened.transfer.host_snapshots) > 0
            harness.complete(number, 0)
        if harness.results:
            harness.result()
    server.worker.is_down = False
    harness.now += FIRST_PAUSE_S
    assert len(objects) == 12
    stored = len(server.worker.stored)
    server.serve("again")
    assert len(objects) == 12 + len(ALL_DEPTHS)
    assert len(server.worker.stored) == stored, "the pages are there"


def test_a_use_of_a_node_that_is_to_be_stored_changes_nothing(keyring: Path) -> None:
    objects: Objects = {}
    server = hybrid(keyring, objects)
    server.serve("first turn")
    objects.clear()
    node = only_node(server)
    server.storage._writes._failed[node] = False
    server.storage.note(node)
    server.storage.use(node)
    server.finish()
    assert len(objects) == 12 + len(ALL_DEPTHS)


def test_a_write_that_fails_midway_is_repeated(keyring: Path) -> None:
    server = Server(keyring, {})
    server.serve("first turn")
    host, node = server.cache.host, only_node(server)
    assert host is not None
    server.storage.note(node)
    [transfer] = host.plan_storage(0.0)
    host.finish(TransferAck(transfer.transfer_id, 7), 0.0)
    server.storage.use(node)
    [again] = host.plan_storage(0.0)
    assert again.object_keys == transfer.object_keys
    host.finish(TransferAck(again.transfer_id, 12), 0.0)
    server.storage.use(node)
    assert not host.plan_storage(0.0)


def test_a_write_is_not_repeated_without_a_use_nor_while_others_use_other_nodes(keyring: Path) -> None:
    objects: Objects = {}
    server = Server(keyring, objects)
    fail_to_store(server)
    tried = stores(server)
    assert not server.storage.has_work(server.harness.now)
    server.finish()
    server.serve("another", list(range(400, 430)), user="bob")
    assert stores(server) == tried + 1
    assert len(objects) == 7
    server.serve("again")
    assert len(objects) == 7 + 12


def test_a_write_that_fails_again_is_repeated_after_the_next_use(keyring: Path) -> None:
    objects: Objects = {}
    server = Server(keyring, objects)
    fail_to_store(server)
    server.worker.is_down = True
    server.serve("second")
    server.worker.is_down = False
    server.harness.now += FIRST_PAUSE_S
    assert objects == {}
    server.serve("third")
    assert len(objects) == 12


@pytest.mark.parametrize("is_split_before", [True, False])
def test_both_halves_of_a_node_are_stored(keyring: Path, is_split_before: bool) -> None:
    """The node is split while it is being stored, or afterwards."""
    objects: Objects = {}
    server = Server(keyring, objects)
    fail_to_store(server)
    node = only_node(server)
    if is_split_before:
        server.storage.note(node)
        server.harness.plan()
        assert [opened.transfer.direction for opened in server.worker.open.values()] == [STORE]
    server.cache.store.split(node, 5)
    server.worker.is_down = True
    server.finish()
    server.worker.is_down = False
    assert objects == {}
    server.serve("again")
    assert len(objects) == 12


def test_a_node_that_is_joined_with_its_child_is_stored_whole(keyring: Path) -> None:
    objects: Objects = {}
    server = Server(keyring, objects)
    fail_to_store(server)
    node = only_node(server)
    upper = server.cache.store.split(node, 5)
    compress_chains(server.cache.store)
    assert upper.is_dead
    server.serve("again")
    assert len(objects) == 12


def test_nothing_is_kept_of_nodes_that_are_gone(keyring: Path) -> None:
    server = Server(keyring, {})
    fail_to_store(server)
    node = only_node(server)
    assert server.storage._writes._failed.keys() == {node}
    server.cache.store.remove(node)
    assert not server.storage._writes._failed
    other = Server(keyring, {})
    fail_to_store(other)
    other.storage.forget_all()
    assert not other.storage._writes._failed

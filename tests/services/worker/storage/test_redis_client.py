"""Storage in a Redis Cluster, and at the master that sentinels name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import redis

from services.worker.storage.interface import StorageError
from services.worker.storage.redis_server import RedisStorage
from tests.fakes.redis_process import form_cluster
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.fakes.redis_process import TcpServers

OBJECTS = {f"{number:064x}": b"%d" % number for number in range(48)}


def open_storage(url: str) -> RedisStorage:
    return RedisStorage(url, timeout_s=20.0, connections=2)


def count(servers: TcpServers, port: int) -> int:
    with servers.client(port) as client:
        return int(client.dbsize())


def test_a_cluster_has_objects_on_all_nodes_and_finds_them(redis_servers: TcpServers) -> None:
    form_cluster(redis_servers)
    storage = open_storage(f"redis+cluster://127.0.0.1:{redis_servers.ports[1]}")
    storage.put_many(OBJECTS)
    assert storage.get_many([*OBJECTS, "f" * 64]) == [*OBJECTS.values(), None]
    assert storage.exists_many(["f" * 64, *OBJECTS]) == [False] + [True] * len(OBJECTS)
    counts = [count(redis_servers, port) for port in redis_servers.ports]
    assert min(counts) > 0
    assert sum(counts) == len(OBJECTS)
    storage.delete_many(list(OBJECTS))
    assert sum(count(redis_servers, port) for port in redis_servers.ports) == 0
    storage.close()


def test_a_cluster_is_found_although_some_named_nodes_are_gone(redis_servers: TcpServers) -> None:
    form_cluster(redis_servers)
    lost, *kept = redis_servers.ports
    redis_servers.kill(lost)
    storage = open_storage(f"redis+cluster://127.0.0.1:{lost},127.0.0.1:{kept[0]}")
    with pytest.raises(StorageError):
        storage.put_many(OBJECTS)
    stored = {name for name, data in OBJECTS.items() if is_stored(storage, name, data)}
    assert 0 < len(stored) < len(OBJECTS)


def is_stored(storage: RedisStorage, name: str, data: bytes) -> bool:
    try:
        storage.put_many({name: data})
        return storage.get_many([name]) == [data]
    except StorageError:
        return False


def test_an_unreachable_cluster_is_an_error_of_the_first_call_and_not_of_the_start(redis_servers: TcpServers) -> None:
    form_cluster(redis_servers)
    ports = redis_servers.ports
    redis_servers.stop()
    storage = open_storage(f"redis+cluster://127.0.0.1:{ports[0]}")
    with pytest.raises(StorageError, match="GET failed"):
        storage.get_many(["a"])
    storage.close()


def test_sentinels_name_the_master_also_after_a_failover(redis_servers: TcpServers) -> None:
    login = "requirepass secret\nmasterauth secret\nsave ''\n"
    master = redis_servers.start(configuration=login)
    replica = redis_servers.start(configuration=f"{login}replicaof 127.0.0.1 {master}\n")
    with redis.Redis(port=replica, password="secret") as client:
        wait_until(lambda: client.info("replication")["master_link_status"] == "up")
    watched = (
        f"sentinel monitor pages 127.0.0.1 {master} 1\nsentinel auth-pass pages secret\n"
        "sentinel down-after-milliseconds pages 1000\nsentinel failover-timeout pages 3000\n"
    )
    sentinel = redis_servers.start("--sentinel", configuration=watched)
    with redis_servers.client(sentinel) as client:
        wait_until(lambda: len(client.sentinel_slaves("pages")) == 1)
    storage = open_storage(f"redis+sentinel://:secret@127.0.0.1:1,127.0.0.1:{sentinel}/pages/2")
    storage.put_many({"a": b"one"})
    with redis.Redis(port=master, db=2, password="secret") as client:
        assert client.dbsize() == 1
    redis_servers.kill(master)
    wait_until(lambda: is_stored(storage, "b", b"two"), timeout_s=120)
    with redis.Redis(port=replica, db=2, password="secret") as client:
        assert client.get("pando:kv:b") == b"two"
    storage.close()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis+cluster://", "a host is missing"),
        ("redis+cluster://one,,two", "a host is missing"),
        ("redis+cluster://one:port", "Port"),
        ("redis+cluster://one/3", "no databases"),
        ("redis+sentinel://one", "the name of the service"),
        ("unix+cluster://one", "unknown scheme"),
        ("redis+ring://one", "unknown scheme"),
    ],
)
def test_a_url_that_makes_no_sense_is_refused(url: str, reason: str) -> None:
    with pytest.raises(StorageError, match=reason):
        open_storage(url)

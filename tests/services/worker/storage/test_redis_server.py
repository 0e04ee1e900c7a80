from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from services.worker.storage.interface import StorageError
from services.worker.storage.redis_server import RedisStorage

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.redis_process import RedisProcess


@pytest.fixture
def storage(redis_process: RedisProcess) -> RedisStorage:
    return RedisStorage(redis_process.url, timeout_s=20.0, connections=2)


def test_stored_objects_are_read_back_and_found(storage: RedisStorage) -> None:
    storage.put_many({"a-1": b"\0one", "a-2": bytes(100_000)})
    assert storage.get_many(["a-1", "a-2", "a-3"]) == [b"\0one", bytes(100_000), None]
    assert storage.exists_many(["a-3", "a-1"]) == [False, True]


def test_deleted_objects_are_gone_and_others_are_kept(storage: RedisStorage) -> None:
    storage.put_many({"a-1": b"one", "a-2": b"two"})
    storage.delete_many(["a-1", "a-3"])
    assert storage.get_many(["a-1", "a-2"]) == [None, b"two"]


def test_calls_to_a_killed_server_fail_at_once_and_work_after_its_restart(
    storage: RedisStorage, redis_process: RedisProcess
) -> None:
    storage.put_many({"a-1": b"one"})
    redis_process.kill()
    with pytest.raises(StorageError):
        storage.get_many(["a-1"])
    redis_process.start()
    storage.put_many({"a-1": b"one"})
    assert storage.get_many(["a-1"]) == [b"one"]


def test_an_unreachable_server_is_detected_at_the_first_call(tmp_path: Path) -> None:
    storage = RedisStorage(f"unix://{tmp_path}/nobody.sock", timeout_s=0.5, connections=1)
    with pytest.raises(StorageError, match="EXISTS failed"):
        storage.exists_many(["a-1"])


def test_a_value_of_another_kind_is_an_error_and_no_answer(storage: RedisStorage, redis_process: RedisProcess) -> None:
    with redis_process.client() as client:
        client.rpush("pando:kv:a-1", "x")
    with pytest.raises(StorageError):
        storage.get_many(["a-1"])


def test_a_url_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(StorageError, match="not the URL"):
        RedisStorage("http://localhost", timeout_s=1.0, connections=1)

"""What stores of responses have in common, in SQLite and in Redis; and what only one of them can."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeAlias

import pytest

from common.errors import ConfigurationError
from gateway.state.server import StateAwayError
from gateway.stored_responses.redis_responses import RedisResponses
from gateway.stored_responses.sqlite_responses import SqliteResponses
from gateway.stored_responses.store import Holder, StoredResponse
from tests.fakes.redis_process import RedisProcess, temporary_redis
from tests.gateway.state.servers import new_prefix, state_server, working
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from gateway.stored_responses.store import ResponseStore

    # Takes lifetime and room.
    Opening: TypeAlias = Callable[[float, int], AbstractAsyncContextManager[ResponseStore]]

ANN, BOB = Holder("acme", "user/ann"), Holder("acme", "user/bob")
MEBIBYTE = 1024 * 1024


def stored(response_id: str, size: int = 10) -> StoredResponse:
    return StoredResponse({"id": response_id, "text": "x" * size}, [{"role": "user", "content": "Hello"}], [])


@pytest.fixture(params=["sqlite", "redis"])
def opening(request: pytest.FixtureRequest) -> Opening:
    if request.param == "redis":
        redis_process: RedisProcess = request.getfixturevalue("redis_process")

    @asynccontextmanager
    async def opening(lifetime_s: float, max_bytes: int) -> AsyncIterator[ResponseStore]:
        if request.param == "sqlite":
            store = SqliteResponses(None, lifetime_s, max_bytes)
            yield store
            await store.close()
            return
        async with state_server(redis_process.url, new_prefix()) as server:
            yield RedisResponses(server, lifetime_s, max_bytes)

    return opening


async def test_a_response_is_its_holders_alone(opening: Opening) -> None:
    holders = [ANN, BOB, Holder("other", "user/ann"), Holder("acme", "key/ann"), Holder("acme", "/ann")]
    async with opening(60.0, MEBIBYTE) as kept:
        await kept.put(ANN, stored("a"))
        assert [await kept.find(holder, "a") is not None for holder in holders] == [True] + [False] * 4
        assert [await kept.delete(holder, "a") for holder in holders[1:]] == [False] * 4
        assert await kept.find(ANN, "a") == stored("a")
        assert await kept.delete(ANN, "a")
        assert not await kept.delete(ANN, "a")
        assert await kept.find(ANN, "a") is None


async def test_users_of_a_credential_are_told_apart_and_the_credential_itself_sees_all(opening: Opening) -> None:
    carl, dora, nobody = (Holder("acme", "key/app", user) for user in ("carl", "dora", None))
    async with opening(60.0, MEBIBYTE) as kept:
        await kept.put(carl, stored("carls"))
        await kept.put(nobody, stored("unnamed"))
        assert await kept.find(dora, "carls") is None
        assert not await kept.delete(dora, "carls")
        assert await kept.find(carl, "unnamed") is None
        assert await kept.find(nobody, "carls")
        assert await kept.delete(carl, "carls")
        assert await kept.delete(nobody, "unnamed")


async def test_what_is_too_old_is_gone(opening: Opening) -> None:
    async with opening(0.05, MEBIBYTE) as kept:
        await kept.put(ANN, stored("a"))
        await asyncio.sleep(0.1)
        assert await kept.find(ANN, "a") is None


async def test_room_is_bounded_and_one_holder_cannot_take_that_of_others(opening: Opening) -> None:
    async with opening(60.0, MEBIBYTE) as kept:
        await kept.put(BOB, stored("bobs", 1000))
        for number in range(100):
            await kept.put(ANN, stored(str(number), 20_000))
        found = [number for number in range(100) if await kept.find(ANN, str(number))]
        assert found == list(range(100 - len(found), 100))
        assert 10 <= len(found) <= 13
        assert await kept.find(BOB, "bobs")


async def test_all_holders_together_are_bounded(opening: Opening) -> None:
    holders = [Holder("acme", f"user/{number}") for number in range(100)]
    async with opening(60.0, MEBIBYTE) as kept:
        for number, holder in enumerate(holders):
            await kept.put(holder, stored(str(number), 20_000))
        found = [number for number, holder in enumerate(holders) if await kept.find(holder, str(number))]
        assert found == list(range(100 - len(found), 100))
        assert 45 <= len(found) <= 53


async def test_a_file_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    first = SqliteResponses(path, 60.0, MEBIBYTE)
    await first.put(ANN, stored("a"))
    await first.close()
    second = SqliteResponses(path, 60.0, MEBIBYTE)
    assert await second.find(ANN, "a") == stored("a")
    await second.close()


async def test_rows_of_versions_that_confused_users_and_keys_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE responses (id TEXT PRIMARY KEY, tenant TEXT, holder TEXT)")
        database.execute("INSERT INTO responses VALUES ('a', 'acme', 'user/ann')")
    database.close()
    store = SqliteResponses(path, 60.0, MEBIBYTE)
    assert await store.find(ANN, "a") is None
    await store.close()


def test_a_file_that_is_no_database_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    path.write_text("no database, but a text that is long enough to be none" * 50)
    with pytest.raises(ConfigurationError, match="responses file"):
        SqliteResponses(path, 60.0, MEBIBYTE)


async def test_old_entries_leave_nothing_at_the_server(redis_process: RedisProcess) -> None:
    async with state_server(redis_process.url, new_prefix()) as server:
        kept = RedisResponses(server, 0.05, MEBIBYTE)
        for number in range(20):
            await kept.put(Holder("acme", f"user/{number}"), stored(str(number)))
        await asyncio.sleep(0.1)
        await kept.put(ANN, stored("last"))
        with redis_process.client() as client:
            keys = sorted(key.decode().rpartition("{responses}:")[2] for key in client.scan_iter(f"{server.prefix}:*"))
            keys = [key for key in keys if "probe" not in key]
            assert [key.partition(":")[0] for key in keys] == ["all", "item", "of", "sizes", "used"]
            assert client.hlen(f"{server.prefix}:{{responses}}:sizes") == 1


async def test_what_is_finished_while_the_server_is_away_is_stored_when_it_is_back() -> None:
    with temporary_redis() as redis_process:
        async with state_server(redis_process.url, new_prefix()) as server:
            kept = RedisResponses(server, 60.0, MEBIBYTE)
            kept.check()
            async with working(kept.run):
                redis_process.kill()
                await kept.put(ANN, stored("a"))
                with pytest.raises(StateAwayError):
                    kept.check()
                with pytest.raises(StateAwayError):
                    await kept.find(ANN, "a")
                redis_process.start()
                await until(lambda: server.is_up and not kept._waiting)
                assert await kept.find(ANN, "a") == stored("a")

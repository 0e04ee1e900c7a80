"""What stores of responses have in common, in SQLite and in Redis; and what only one of them can."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import ConfigurationError, QueueFullError, UnavailableError
from common.types import Subject
from gateway.state.server import StateAwayError
from gateway.stored_responses.redis_responses import AT_ONCE, RedisResponses
from gateway.stored_responses.sqlite_responses import SqliteResponses
from gateway.stored_responses.store import ResponseOwner, StoredResponse, size_of
from tests.examples import examples
from tests.fakes.redis_process import RedisProcess, temporary_redis
from tests.gateway.state.servers import new_prefix, state_server, working
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from redis.asyncio import Redis

    from gateway.stored_responses.store import ResponseStore

    # Takes lifetime and room.
    Opening: TypeAlias = Callable[[float, int], AbstractAsyncContextManager[ResponseStore]]

ANN, BOB = ResponseOwner("acme", "user/ann"), ResponseOwner("acme", "user/bob")
MEBIBYTE = 1024 * 1024


async def put(kept: ResponseStore, holder: ResponseOwner, response: StoredResponse) -> None:
    """Keep a response in the room of the person, if the holder is one."""
    await kept.put(holder, Subject(holder.tenant, holder.credential), response)


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


async def test_a_response_is_accessible_to_its_holder_only(opening: Opening) -> None:
    holders = [
        ANN,
        BOB,
        ResponseOwner("other", "user/ann"),
        ResponseOwner("acme", "key/ann"),
        ResponseOwner("acme", "/ann"),
    ]
    async with opening(60.0, MEBIBYTE) as kept:
        await put(kept, ANN, stored("a"))
        assert [await kept.find(holder, "a") is not None for holder in holders] == [True] + [False] * 4
        assert [await kept.delete(holder, "a") for holder in holders[1:]] == [False] * 4
        assert await kept.find(ANN, "a") == stored("a")
        assert await kept.delete(ANN, "a")
        assert not await kept.delete(ANN, "a")
        assert await kept.find(ANN, "a") is None


async def test_users_of_a_credential_are_kept_apart_and_the_credential_sees_all(opening: Opening) -> None:
    carl, dora, unnamed = (ResponseOwner("acme", "key/app", user) for user in ("carl", "dora", None))
    async with opening(60.0, MEBIBYTE) as kept:
        await put(kept, carl, stored("carls"))
        await put(kept, unnamed, stored("unnamed"))
        assert await kept.find(dora, "carls") is None
        assert not await kept.delete(dora, "carls")
        assert await kept.find(carl, "unnamed") is None
        assert await kept.find(unnamed, "carls")
        assert await kept.delete(carl, "carls")
        assert await kept.delete(unnamed, "unnamed")


async def test_expired_responses_are_gone(opening: Opening) -> None:
    async with opening(0.05, MEBIBYTE) as kept:
        await put(kept, ANN, stored("a"))
        await asyncio.sleep(0.1)
        assert await kept.find(ANN, "a") is None


async def test_capacity_is_bounded_and_one_subject_cannot_take_that_of_others(opening: Opening) -> None:
    async with opening(60.0, MEBIBYTE) as kept:
        await put(kept, BOB, stored("bobs", 1000))
        for number in range(100):
            await put(kept, ANN, stored(str(number), 20_000))
        found = [number for number in range(100) if await kept.find(ANN, str(number))]
        assert found == list(range(100 - len(found), 100))
        assert 45 <= len(found) <= 53
        assert await kept.find(BOB, "bobs")


async def test_among_equal_holders_the_oldest_responses_are_evicted(opening: Opening) -> None:
    holders = [ResponseOwner("acme", f"user/{number}") for number in range(100)]
    async with opening(60.0, MEBIBYTE) as kept:
        for number, holder in enumerate(holders):
            await put(kept, holder, stored(f"{number:02}", 20_000))
        found = [number for number, holder in enumerate(holders) if await kept.find(holder, f"{number:02}")]
        assert found == list(range(100 - len(found), 100))
        assert 45 <= len(found) <= 53


async def test_a_tenant_with_many_users_evicts_only_its_own_responses(opening: Opening) -> None:
    async with opening(60.0, MEBIBYTE) as kept:
        victims = [ResponseOwner("acme", f"user/{number}") for number in range(10)]
        for number, victim in enumerate(victims):
            await put(kept, victim, stored(f"victim-{number}", 40_000))
        app = ResponseOwner("rival", "key/app")
        for number in range(200):
            response = stored(f"flood-{number:03}", 20_000)
            await kept.put(app, Subject("rival", f"user/invented-{number}"), response)
        assert all([await kept.find(victim, f"victim-{number}") for number, victim in enumerate(victims)])
        left = [number for number in range(200) if await kept.find(app, f"flood-{number:03}")]
        assert left == list(range(200 - len(left), 200))
        assert 25 <= len(left) <= 31


async def test_a_user_does_not_evict_others_of_its_tenant_below_an_equal_share(opening: Opening) -> None:
    async with opening(60.0, MEBIBYTE) as kept:
        app = ResponseOwner("acme", "key/app")
        carl, dora = Subject("acme", "user/carl"), Subject("acme", "user/dora")
        for number in range(20):
            await kept.put(app, carl, stored(f"carl-{number}", 20_000))
        for number in range(100):
            await kept.put(app, dora, stored(f"dora-{number}", 20_000))
        assert all([await kept.find(app, f"carl-{number}") for number in range(20)])
        # What is above the equal part makes room for who has less.
        for number in range(20, 100):
            await kept.put(app, carl, stored(f"carl-{number}", 20_000))
        left = {name: sum([bool(await kept.find(app, f"{name}-{i}")) for i in range(100)]) for name in ("carl", "dora")}
        assert abs(left["carl"] - left["dora"]) <= 1


async def test_everything_that_is_stored_of_a_request_takes_room(opening: Opening) -> None:
    extra = "x" * 100_000
    parts = [
        StoredResponse({"id": "response", "metadata": {"extra": extra}}, [], []),
        StoredResponse({"id": "messages"}, [{"role": "user", "content": "", "unknown": extra}], []),
        StoredResponse({"id": "input"}, [], [{"type": "message", "unknown": extra}]),
    ]
    for part in parts:
        async with opening(60.0, MEBIBYTE) as kept:
            for number in range(20):
                await put(kept, ANN, replace(part, response={**part.response, "id": str(number)}))
            assert [number for number in range(20) if await kept.find(ANN, str(number))] == list(range(10, 20))


async def test_small_responses_are_bounded_in_number(opening: Opening) -> None:
    async with opening(60.0, MEBIBYTE) as kept:
        for number in range(1100):
            await put(kept, ANN, StoredResponse({"id": str(number)}, [], []))
            assert await kept.find(ANN, str(number))
        assert await kept.find(ANN, "0") is None
        assert await kept.find(ANN, "1099")


async def test_a_response_larger_than_the_capacity_is_not_stored_and_evicts_nothing(opening: Opening) -> None:
    async with opening(60.0, MEBIBYTE) as kept:
        await put(kept, BOB, stored("bobs"))
        await put(kept, ANN, stored("small"))
        await put(kept, ANN, stored("huge", MEBIBYTE))
        assert [await kept.find(ANN, name) is not None for name in ("small", "huge")] == [True, False]
        assert await kept.find(BOB, "bobs")


async def test_deleted_responses_give_their_room_back(opening: Opening) -> None:
    async with opening(60.0, MEBIBYTE) as kept:
        await put(kept, ANN, stored("first", 500_000))
        for _ in range(5):
            await put(kept, ANN, stored("second", 500_000))
            assert await kept.delete(ANN, "second")
        assert await kept.find(ANN, "first")


@settings(examples(20), suppress_health_check=[*HealthCheck])
@given(data=st.data())
async def test_both_stores_evict_by_the_rule(opening: Opening, data: st.DataObject) -> None:
    """Against a model: whoever uses most loses the oldest, first among tenants, then among their subjects."""
    sizes = st.sampled_from([50_000, 100_000, 150_000, 400_000])
    puts = data.draw(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), sizes), max_size=40))
    model: list[tuple[str, str, str, int]] = []
    async with opening(60.0, MEBIBYTE) as kept:
        for number, (tenant, subject, size) in enumerate(puts):
            response = stored(str(number), size)
            await put(kept, ResponseOwner(tenant, subject), response)
            model.append((tenant, subject, str(number), size_of(response.encode())))
            while sum(entry[3] for entry in model) > MEBIBYTE:
                of_tenant = [entry for entry in model if entry[0] == most(model, 0)]
                victim = most(of_tenant, 1)
                model.remove(next(entry for entry in of_tenant if entry[1] == victim))
        ids = {entry[2] for entry in model}
        for number, (tenant, subject, _) in enumerate(puts):
            found = await kept.find(ResponseOwner(tenant, subject), str(number))
            assert (found is not None) == (str(number) in ids)


def most(entries: list[tuple[str, str, str, int]], field: int) -> str:
    used: dict[str, int] = {}
    for entry in entries:
        used[str(entry[field])] = used.get(str(entry[field]), 0) + entry[3]
    return max(used, key=used.__getitem__)  # the first of several, which is the one with the oldest entry


async def test_a_file_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    first = SqliteResponses(path, 60.0, MEBIBYTE)
    await put(first, ANN, stored("a"))
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


def test_a_responses_file_that_cannot_be_created_prevents_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="responses file"):
        SqliteResponses(tmp_path / "missing" / "responses.sqlite", 60.0, MEBIBYTE)


async def test_old_entries_leave_nothing_at_the_server(redis_process: RedisProcess) -> None:
    async with state_server(redis_process.url, new_prefix()) as server:
        kept = RedisResponses(server, 0.05, MEBIBYTE)
        for number in range(20):
            await put(kept, ResponseOwner("acme", f"user/{number}"), stored(str(number)))
        await asyncio.sleep(0.1)
        await put(kept, ANN, stored("last"))
        with redis_process.client() as client:
            keys = sorted(key.decode().rpartition("{responses}:")[2] for key in client.scan_iter(f"{server.prefix}:*"))
            # The last one's item may have expired, too.
            keys = [key for key in keys if "probe" not in key and not key.startswith("item:")]
            kinds = ["entries", "expiring", "of", "of", "sequence", "subjects", "tenants", "used"]
            assert [key.partition(":")[0] for key in keys] == kinds
            prefix = f"{server.prefix}:{{responses}}"
            assert [client.hlen(f"{prefix}:{kind}") for kind in ("entries", "used")] == [1, 3]
            assert [client.zcard(f"{prefix}:{kind}") for kind in ("expiring", "tenants")] == [1, 1]


async def test_while_the_server_is_down_one_tenant_does_not_fill_the_write_queue() -> None:
    with temporary_redis() as redis_process:
        async with state_server(redis_process.url, new_prefix()) as server:
            kept = RedisResponses(server, 60.0, 512 * MEBIBYTE)
            redis_process.kill()
            for number in range(1100):
                await kept.put(ANN, Subject("acme", f"user/{number}"), stored(f"flood-{number}"))
            assert len(kept._waiting) == 768
            await put(kept, ResponseOwner("rival", "user/bob"), stored("bobs"))
            assert len(kept._waiting) == 769
            redis_process.start()
            async with working(kept.run):
                await until(lambda: server.is_up and not kept._waiting)
            assert await kept.find(ResponseOwner("rival", "user/bob"), "bobs")


async def test_responses_finished_during_an_outage_are_stored_after_it() -> None:
    with temporary_redis() as redis_process:
        async with state_server(redis_process.url, new_prefix()) as server:
            kept = RedisResponses(server, 60.0, MEBIBYTE)
            kept.check()
            async with working(kept.run):
                redis_process.kill()
                await put(kept, ANN, stored("a"))
                with pytest.raises(StateAwayError):
                    kept.check()
                with pytest.raises(StateAwayError):
                    await kept.find(ANN, "a")
                redis_process.start()
                await until(lambda: server.is_up and not kept._waiting)
                assert await kept.find(ANN, "a") == stored("a")


async def test_reads_of_one_user_leave_places_for_those_of_others(opening: Opening) -> None:
    async with opening(60.0, MEBIBYTE) as store:
        await put(store, ANN, stored("anns"))
        await put(store, ResponseOwner("other", "key/k"), stored("others"))
        reading = [asyncio.ensure_future(store.find(ANN, "anns")) for _ in range(200)]
        await asyncio.sleep(0)
        assert await store.find(ResponseOwner("other", "key/k"), "others")
        results = await asyncio.gather(*reading, return_exceptions=True)
        refused = [result for result in results if isinstance(result, QueueFullError)]
        assert 100 < len(refused) < 200


async def test_few_responses_are_in_transfer_to_the_server_at_a_time(
    redis_process: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 reads of 7 MB took more than a second: the server counted as unavailable, and all tenants' limits failed."""
    async with state_server(redis_process.url, new_prefix(), probes=False) as server:
        kept = RedisResponses(server, 60.0, MEBIBYTE)
        await put(kept, ANN, stored("a"))
        call, running, most = server.call, 0, 0

        async def counted(command: Callable[[Redis], Awaitable[object]]) -> object:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                return await call(command)
            finally:
                running -= 1

        monkeypatch.setattr(server, "call", counted)
        writing = [put(kept, ANN, stored(f"a{number}")) for number in range(30)]
        found = await asyncio.gather(*(kept.find(ANN, "a") for _ in range(30)), *writing)
        assert found[:30] == [stored("a")] * 30
        assert 2 <= most <= 2 * AT_ONCE
        assert await kept.find(ANN, "a29") == stored("a29")


async def test_a_full_disk_refuses_new_responses_and_loses_none(tmp_path: Path) -> None:
    store = SqliteResponses(tmp_path / "responses.sqlite", 60.0, MEBIBYTE)
    await put(store, ANN, stored("before"))
    assert await store.find(ANN, "before")
    [pages] = store._database.execute("PRAGMA page_count").fetchone()
    store._database.execute(f"PRAGMA max_page_count = {pages}")
    store.check()
    await put(store, ANN, stored("unwritten", 200_000))
    assert await store.find(ANN, "unwritten") == stored("unwritten", 200_000)
    assert await store.find(BOB, "unwritten") is None
    for _ in range(2):
        with pytest.raises(UnavailableError, match="full"):
            store.check()
        assert await store.find(ANN, "before")
    await put(store, ANN, stored("unwritten too", 200_000))
    assert await store.delete(ANN, "unwritten too")
    store._database.execute(f"PRAGMA max_page_count = {100 * pages}")
    with pytest.raises(UnavailableError):
        store.check()  # and tries again
    assert await store.find(ANN, "unwritten")
    store.check()
    await store.close()
    second = SqliteResponses(tmp_path / "responses.sqlite", 60.0, MEBIBYTE)
    assert [await second.find(ANN, name) is not None for name in ("before", "unwritten", "unwritten too")] == [
        True, True, False,
    ]  # fmt: skip
    await second.close()


async def test_on_a_read_only_disk_responses_are_kept_and_the_file_is_opened_again_after_its_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> sqlite3.Connection:
        raise sqlite3.OperationalError("unable to open database file")

    store = SqliteResponses(tmp_path / "responses.sqlite", 60.0, MEBIBYTE)
    await put(store, ANN, stored("a"))
    store._database.execute("PRAGMA query_only = 1")
    with monkeypatch.context() as patch:
        patch.setattr(store, "_open", refuse)
        with pytest.raises(UnavailableError) as raised:
            await store.delete(ANN, "a")
        assert raised.value.to_failure().retryable
        await put(store, ANN, stored("b"))
        with pytest.raises(UnavailableError, match="unable to open"):
            store.check()
        assert await store.find(ANN, "b")
        with pytest.raises(UnavailableError):
            await store.find(ANN, "a")
    assert await store.delete(ANN, "a")
    await put(store, ANN, stored("c"))
    store.check()
    await store.close()
    second = SqliteResponses(tmp_path / "responses.sqlite", 60.0, MEBIBYTE)
    assert [await second.find(ANN, name) is not None for name in ("a", "b", "c")] == [False, True, True]
    await second.close()


async def test_a_response_is_written_when_its_put_returns(tmp_path: Path) -> None:
    """A gateway that is killed after the last byte of a response does not lose it."""
    store = SqliteResponses(tmp_path / "responses.sqlite", 60.0, MEBIBYTE)
    for number in range(20):
        await put(store, ANN, stored(f"{number}", 10_000))
        with sqlite3.connect(tmp_path / "responses.sqlite") as other:
            [count] = other.execute("SELECT COUNT(*) FROM stored_responses").fetchone()
        assert count == number + 1
    await store.close()


def set_aside(directory: Path) -> list[Path]:
    return list(directory.glob("*.corrupt-*"))


async def test_a_corrupt_file_is_renamed_and_replaced_by_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    path.write_bytes(b"this is no database" * 1000)
    store = SqliteResponses(path, 60.0, MEBIBYTE)
    await put(store, ANN, stored("a"))
    assert await store.find(ANN, "a") == stored("a")
    await store.close()
    [kept] = set_aside(tmp_path)
    assert kept.read_bytes() == b"this is no database" * 1000


async def test_a_file_that_becomes_corrupt_is_replaced_while_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    store = SqliteResponses(path, 60.0, MEBIBYTE)
    for number in range(50):
        await put(store, ANN, stored(str(number), 10_000))
    await store.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    store = SqliteResponses(path, 60.0, MEBIBYTE)
    assert await store.find(ANN, "1") is None
    await put(store, ANN, stored("new"))
    assert await store.find(ANN, "new") == stored("new")
    store.check()
    await store.close()
    assert set_aside(tmp_path)

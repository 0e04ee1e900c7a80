"""Records of answers, in memory and in Redis: the same behaviour in both."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from common.errors import QueueFullError
from common.types import Subject
from gateway.answer_records.memory_records import MemoryRecords
from gateway.answer_records.records import NewRecord, Writing, claim_name, record_name
from gateway.answer_records.redis_records import RedisRecords
from gateway.answer_records.sealing import Sealing, UnsealedError
from gateway.state.server import StateAwayError
from tests.fakes.redis_process import temporary_redis
from tests.gateway.state.servers import new_prefix, state_server
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gateway.answer_records.records import AnswerRecords
    from tests.fakes.redis_process import RedisProcess

ANN = Subject("acme", "user/ann")
NAME = record_name("acme", "user/ann", "chatcmpl-1")
SECRET = "a secret that has more than 32 characters"
ROOM = 1024 * 1024


@asynccontextmanager
async def opened(
    kind: str, redis_process: RedisProcess, lifetime_s: float = 60.0, secret: str | None = SECRET
) -> AsyncIterator[AnswerRecords]:
    if kind == "memory":
        yield MemoryRecords(lifetime_s, ROOM)
        return
    async with state_server(redis_process.url, new_prefix()) as server:
        # Until the first probe, the gateway counts as dead.
        await until(lambda: redis_process.client().exists(server.probe_key(server.gateway_id)))
        yield RedisRecords(server, Sealing(secret), lifetime_s, ROOM)


def new(records: AnswerRecords, name: str = NAME, **fields: object) -> NewRecord:
    record = NewRecord(name, None, ANN, b'{"body":1}', f"{records.gateway_id}:1")
    return replace(record, **fields)  # type: ignore[arg-type]


both = pytest.mark.parametrize("kind", ["memory", "redis"])


@both
async def test_a_record_has_its_request_its_chunks_and_its_end(kind: str, redis_process: RedisProcess) -> None:
    async with opened(kind, redis_process) as records:
        record = new(records)
        assert await records.open(record) is None
        assert await records.append(NAME, record.owner, 0, [b"a", b"", b"bc"]) is Writing.DONE
        assert await records.append(NAME, record.owner, 3, [b"d"]) is Writing.DONE
        found = await records.read(NAME)
        assert found is not None
        assert await records.request(NAME) == record.request
        assert (found.chunks, found.end) == ([b"a", b"", b"bc", b"d"], None)
        assert (found.owner, found.is_owned) == (record.owner, True)
        for first, rest in ((1, [b"", b"bc", b"d"]), (3, [b"d"]), (4, []), (9, [])):
            found = await records.read(NAME, first)
            assert found is not None
            assert found.chunks == rest
        assert await records.finish(NAME, record.owner, b"over")
        found = await records.read(NAME, 4)
        assert found is not None
        assert found.end == b"over"
        found = await records.read(NAME, 1)
        assert found is not None
        assert (found.chunks, found.written) == ([b"", b"bc", b"d"], 4)
        assert await records.request(NAME) == record.request
        assert await records.request("another") is None
        assert not await records.finish(NAME, record.owner, b"again")
        assert await records.append(NAME, record.owner, 4, [b"e"]) is Writing.LOST


@both
async def test_only_the_owner_writes_and_one_of_several_takes_over(kind: str, redis_process: RedisProcess) -> None:
    async with opened(kind, redis_process) as records:
        record = new(records)
        await records.open(record)
        await records.append(NAME, record.owner, 0, [b"a"])
        assert await records.append(NAME, "other:1", 1, [b"x"]) is Writing.LOST
        assert not await records.take(NAME, None, "other:1", 1), "it has an owner"
        await records.release(NAME, "other:1", 5)
        await records.release(NAME, record.owner, 7)
        found = await records.read(NAME)
        assert found is not None
        assert (found.owner, found.is_owned, found.charged) == (None, False, 7)
        assert not await records.take(NAME, None, "other:1", 0), "it has a chunk that the other does not know"
        taken = [await records.take(NAME, None, f"{records.gateway_id}:{number}", 1) for number in (2, 3)]
        assert taken == [True, False]
        assert await records.append(NAME, record.owner, 1, [b"late"]) is Writing.LOST
        assert await records.append(NAME, f"{records.gateway_id}:2", 1, [b"b"]) is Writing.DONE
        assert await records.finish(NAME, None, b"cancelled"), "anyone may end it for good"
        assert await records.append(NAME, f"{records.gateway_id}:2", 2, [b"c"]) is Writing.LOST


@both
async def test_a_claim_is_given_once_until_its_record_is_gone(kind: str, redis_process: RedisProcess) -> None:
    claim = claim_name("acme", "user/ann", "user/ann", "/v1/chat/completions", "k")
    async with opened(kind, redis_process) as records:
        assert await records.claimed(claim) is None
        assert await records.open(new(records, claim=claim)) is None
        assert await records.open(new(records, "second", claim=claim)) == NAME
        assert await records.claimed(claim) == NAME
        assert await records.read("second") is None
        await records.drop(NAME)
        assert await records.claimed(claim) is None
        assert await records.open(new(records, "second", claim=claim)) is None
        assert await records.append(NAME, "other:1", 0, [b"x"]) is Writing.GONE


@both
async def test_records_expire_after_their_last_change(kind: str, redis_process: RedisProcess) -> None:
    async with opened(kind, redis_process, lifetime_s=1.0) as records:
        await records.open(new(records))
        await records.open(new(records, "kept"))
        gone = False
        async with asyncio.timeout(60):
            while not gone:
                await records.keep(["kept"])
                gone = await records.read(NAME) is None
                await asyncio.sleep(0.05)
        assert await records.read("kept") is not None
        assert await records.take(NAME, f"{records.gateway_id}:1", "other:1", 0) is False


@both
async def test_room_is_bounded_shared_and_given_back(kind: str, redis_process: RedisProcess) -> None:
    bob = Subject("other", "user/bob")
    async with opened(kind, redis_process) as records:
        big = b"x" * (ROOM // 8)
        opened_before = 0
        with contextlib.suppress(QueueFullError):
            while await records.open(new(records, f"ann-{opened_before}", request=big)) is None:
                opened_before += 1
        assert 3 <= opened_before <= 5, "one subject gets at most 60 %"
        assert await records.open(new(records, "bob", subject=bob, request=big)) is None
        for number in range(opened_before):
            await records.drop(f"ann-{number}")
        assert await records.open(new(records, "ann", request=big)) is None
        # A record that finds no room for its next chunk is deleted: it could not be continued.
        assert await records.append("ann", f"{records.gateway_id}:1", 0, [b"x" * ROOM]) is Writing.GONE
        assert await records.read("ann") is None
        assert await records.open(new(records, "ann", request=big)) is None


@both
async def test_open_records_in_the_background_without_an_owner_are_orphans(
    kind: str, redis_process: RedisProcess
) -> None:
    async with opened(kind, redis_process) as records:
        record = new(records, in_background=True)
        await records.open(record)
        await records.open(new(records, "in front"))
        await records.release("in front", record.owner, 0)
        assert await records.orphans() == []
        await records.release(NAME, record.owner, 0)
        assert await records.orphans() == [NAME]
        assert await records.take(NAME, None, f"{records.gateway_id}:2", 0)
        assert await records.orphans() == []
        await records.release(NAME, f"{records.gateway_id}:2", 0)
        await records.finish(NAME, None, b"cancelled")
        assert await records.orphans() == []


async def test_a_dead_gateway_owns_nothing(redis_process: RedisProcess) -> None:
    async with opened("redis", redis_process) as records:
        await records.open(new(records, owner="dead:1", in_background=True))
        found = await records.read(NAME)
        assert found is not None
        assert (found.owner, found.is_owned) == ("dead:1", False)
        assert await records.orphans() == [NAME]
        assert await records.take(NAME, "dead:1", f"{records.gateway_id}:1", 0)


async def test_chunks_that_were_written_already_are_not_repeated(redis_process: RedisProcess) -> None:
    async with opened("redis", redis_process) as records:
        record = new(records)
        await records.open(record)
        await records.append(NAME, record.owner, 0, [b"a", b"b"])
        # As after an answer of the server that was lost.
        assert await records.append(NAME, record.owner, 0, [b"a", b"b", b"c"]) is Writing.DONE
        assert await records.append(NAME, record.owner, 1, [b"b"]) is Writing.DONE
        found = await records.read(NAME)
        assert found is not None
        assert found.chunks == [b"a", b"b", b"c"]
        assert await records.append(NAME, record.owner, 5, [b"f"]) is Writing.GONE, "chunks between are missing"


async def test_appends_of_many_records_share_calls(redis_process: RedisProcess) -> None:
    async with opened("redis", redis_process) as records:
        names = [f"record-{number}" for number in range(100)]
        for name in names:
            await records.open(new(records, name, request=b""))
        outcomes = await asyncio.gather(
            *(records.append(name, f"{records.gateway_id}:1", 0, [name.encode()]) for name in names)
        )
        assert outcomes == [Writing.DONE] * 100
        for name in names:
            found = await records.read(name)
            assert found is not None
            assert found.chunks == [name.encode()]


async def test_an_append_without_a_server_fails_at_once_and_can_be_repeated() -> None:
    with temporary_redis() as process:
        async with state_server(process.url, new_prefix(), timeout_s=1.0) as server:
            records = RedisRecords(server, Sealing(None), 60.0, ROOM)
            record = new(records)
            await records.open(record)
            process.kill()
            for _ in range(2):
                with pytest.raises(StateAwayError):
                    await records.append(NAME, record.owner, 0, [b"a"])
            process.start()
            await server.wait_up()
            assert await records.append(NAME, record.owner, 0, [b"a"]) is Writing.GONE, "this server keeps nothing"


@pytest.mark.parametrize("reply", [b"", b"x", b"dd", 5, None])
async def test_a_damaged_reply_counts_as_an_outage_and_leaves_nothing_waiting(
    redis_process: RedisProcess, monkeypatch: pytest.MonkeyPatch, reply: object
) -> None:
    async def damaged(**_: object) -> object:
        return reply

    async with state_server(redis_process.url, new_prefix()) as server:
        records = RedisRecords(server, Sealing(None), 60.0, ROOM)
        record = new(records)
        await records.open(record)
        with monkeypatch.context() as patch:
            patch.setattr(records, "_script", damaged)
            with pytest.raises(StateAwayError):
                await records.append(NAME, record.owner, 0, [b"a"])
        await server.wait_up()
        assert await records.append(NAME, record.owner, 0, [b"a"]) is Writing.DONE


async def test_the_server_holds_no_content_in_plain_text_and_cannot_forge_it(redis_process: RedisProcess) -> None:
    async with state_server(redis_process.url, new_prefix()) as server:
        records = RedisRecords(server, Sealing(SECRET), 60.0, ROOM)
        record = new(records, request=b"a private question")
        await records.open(record)
        await records.append(NAME, record.owner, 0, [b"a private answer", b"more"])
        with redis_process.client() as client:
            [item], [chunks] = client.keys(f"{server.prefix}:*:item:*"), client.keys(f"{server.prefix}:*:chunks:*")
            stored = b"".join([*client.hgetall(item).values(), *client.lrange(chunks, 0, -1)])
            assert b"private" not in stored
            assert b"acme" not in stored
            first, second = client.lrange(chunks, 0, -1)
            client.lset(chunks, 0, second)
            client.lset(chunks, 1, first)
        assert await records.read(NAME) is None, "its chunks have changed places"
        for secret in (None, "another secret of more than 32 characters"):
            unable = RedisRecords(server, Sealing(secret), 60.0, ROOM)
            assert await unable.read(NAME) is None
            assert await unable.request(NAME) is None


def test_content_is_bound_to_its_secret_record_and_place() -> None:
    sealing = Sealing(SECRET)
    sealed = sealing.seal("record", "3", b"text")
    assert sealing.open("record", "3", sealed) == b"text"
    for other, record, place, content in (
        (sealing, "record", "4", sealed),
        (sealing, "other", "3", sealed),
        (Sealing(SECRET + "x"), "record", "3", sealed),
        (Sealing(None), "record", "3", sealed),
        (sealing, "record", "3", Sealing(None).seal("record", "3", b"text")),
        (sealing, "record", "3", b""),
        (sealing, "record", "3", sealed[:-1]),
    ):
        with pytest.raises(UnsealedError):
            other.open(record, place, content)


def test_names_depend_on_every_part() -> None:
    names = {
        record_name("a", "b", "c"),
        record_name("ab", "", "c"),
        record_name("a", "bc", ""),
        claim_name("a", "b", "b", "/v1/x", "c"),
        claim_name("a", "b", "d", "/v1/x", "c"),
        claim_name("a", "b", "b", "/v1/y", "c"),
    }
    assert len(names) == 6

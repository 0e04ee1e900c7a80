"""Clients that come back while replies about their records are damaged on the way: no answer counts as unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from gateway.answer_records.records import claim_name, record_name
from gateway.answer_records.redis_records import RedisRecords
from gateway.answer_records.sealing import Sealing
from gateway.state.server import StateAwayError
from tests.fakes.pipeline import says
from tests.gateway.answers.reading import BODY, CHAT, Seen, read
from tests.gateway.answers.test_left_records import first_time, refused
from tests.gateway.answers.test_two_gateways import TEXT, WORDS, close, pair
from tests.gateway.listening import listening
from tests.gateway.state.servers import new_prefix, state_server, working
from tests.gateway.support import error_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.fakes.redis_process import RedisProcess

KEY = {"idempotency-key": "k"}
WHOLE = {name: value for name, value in BODY.items() if not name.startswith("stream")}


async def renamed(method: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """Return the name of a record in which a bit has flipped: one that looks like a name, but is that of no record."""
    name = await method(*arguments)
    assert name is not None
    return ("1" if name[0] == "0" else "0") + name[1:]


async def unanswered(_method: Callable[..., Awaitable[Any]], *_arguments: Any) -> Any:
    raise StateAwayError(was_sent=True)


@pytest.mark.parametrize(
    "replies",
    [
        {"claimed": renamed},
        {"claimed": refused(None), "open": renamed},
        {"claimed": unanswered, "open": renamed},
    ],
    ids=["misread", "overlooked", "lost"],
)
async def test_a_repeated_post_finds_its_answer(
    redis_process: RedisProcess, replies: dict[str, Callable[..., Awaitable[Any]]]
) -> None:
    first, second = pair(redis_process.url, says(*WORDS))
    async with working(*first.state.background, *second.state.background):
        answer = await first.post(CHAT, WHOLE, KEY)
        for method, reply in replies.items():
            first_time(second, method, reply)
        again = await second.post(CHAT, WHOLE, KEY)
        assert (again.status_code, again.text) == (200, answer.text)
        assert TEXT in again.text
        assert second.pipeline.submitted == []
        await close(first, second)


async def test_a_repeated_post_is_told_to_come_back_if_its_answer_cannot_be_named(redis_process: RedisProcess) -> None:
    first, second = pair(redis_process.url, says(*WORDS))
    async with working(*first.state.background, *second.state.background):
        assert (await first.post(CHAT, WHOLE, KEY)).status_code == 200
        first_time(second, "claimed", refused(None))

        async def found_and_forgotten(method: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
            name = await method(*arguments)
            first_time(second, "claimed", refused(None))
            return name

        first_time(second, "open", found_and_forgotten)
        assert "Idempotency-Key" in error_of(await second.post(CHAT, WHOLE, KEY), 503)["message"]
        assert second.pipeline.submitted == []
        await close(first, second)


async def test_a_repeated_post_is_told_to_come_back_if_its_answer_goes_after_it_was_named(
    redis_process: RedisProcess,
) -> None:
    first, second = pair(redis_process.url, says(*WORDS))
    async with working(*first.state.background, *second.state.background):
        assert (await first.post(CHAT, WHOLE, KEY)).status_code == 200
        first_time(second, "claimed", refused(None))
        first_time(second, "request", refused(None))
        assert "Idempotency-Key" in error_of(await second.post(CHAT, WHOLE, KEY), 503)["message"]
        assert second.pipeline.submitted == []
        # It was only overlooked.
        first_time(second, "request", refused(None))
        assert (await second.post(CHAT, WHOLE, KEY)).status_code == 200
        assert second.pipeline.submitted == []
        await close(first, second)


async def test_a_repeated_post_whose_answer_is_forgotten_after_it_was_named_is_a_new_request(
    redis_process: RedisProcess,
) -> None:
    first, second = pair(redis_process.url, says(*WORDS))
    async with working(*first.state.background, *second.state.background):
        answer = await first.post(CHAT, WHOLE, KEY)

        async def forgotten(method: Callable[..., Awaitable[Any]], name: str) -> Any:
            await first.context.answers.records.drop(name)
            return await method(name)

        first_time(second, "request", forgotten)
        again = await second.post(CHAT, WHOLE, KEY)
        assert again.status_code == 200
        assert again.json()["id"] != answer.json()["id"]
        assert len(second.pipeline.submitted) == 1
        # It has the key now.
        assert (await first.post(CHAT, WHOLE, KEY)).text == again.text
        await close(first, second)


@pytest.mark.parametrize("operation", ["request", "read"])
async def test_a_client_that_comes_back_finds_its_answer(redis_process: RedisProcess, operation: str) -> None:
    """The first question after its record has another name when it arrives."""
    first, second = pair(redis_process.url, says(*WORDS))
    async with working(*first.state.background, *second.state.background):
        seen = Seen()
        async with listening(first) as one, listening(second) as two:
            await read(one, seen, body=BODY, events=5)
            records: Any = second.context.answers.records
            script, damaged = records._script, [operation]

            async def run(*, args: tuple[Any, ...], client: Any) -> Any:
                if args[0] in damaged:
                    damaged.remove(args[0])
                    args = (*args[:5], record_name("acme", "user/ann", "another"), *args[6:])
                return await script(args=args, client=client)

            records._script = run
            assert (await read(two, seen)).status_code == 200
            assert damaged == []
        assert seen.text == TEXT
        await close(first, second)


@pytest.mark.parametrize("name", [b"0" * 39, b"0" * 41, b"0" * 39 + b"g", b"full.", b"\xff" * 40])
async def test_nonsense_is_not_taken_for_a_name(redis_process: RedisProcess, name: bytes) -> None:
    prefix, claim = new_prefix(), claim_name("acme", "user/ann", "user/ann", CHAT, "k")
    async with state_server(redis_process.url, prefix) as server:
        records = RedisRecords(server, Sealing(None), 60.0, 1 << 20)
        with redis_process.client() as client:
            client.set(f"{prefix}:{{answers}}:claim:{claim}", name)
        with pytest.raises(StateAwayError):
            await records.claimed(claim)

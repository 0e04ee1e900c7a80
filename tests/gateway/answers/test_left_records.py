"""No record keeps the name of an owner that has left it, for which the readers of other gateways would wait."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from common.types import Admission, ErrorCode, RequestFailure
from gateway.answer_records.records import Writing
from gateway.endpoints.responses.route import adopt_responses
from gateway.state.server import StateAwayError
from tests.fakes.pipeline import says
from tests.gateway.answers.reading import BODY, CHAT, Seen, read
from tests.gateway.answers.test_two_gateways import TEXT, WORDS, close, pair, stops_after
from tests.gateway.listening import listening
from tests.gateway.state.servers import working
from tests.gateway.support import error_of
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from gateway.answer_records.records import NewRecord
    from tests.fakes.redis_process import RedisProcess
    from tests.gateway.support import FakedGateway


def first_time(gateway: FakedGateway, method: str, instead: Callable[..., Awaitable[Any]]) -> None:
    """Let the first call of a method of the gateway's records be `instead(method, *arguments)`."""
    records = gateway.context.answers.records
    original = getattr(records, method)
    calls = iter([instead])

    async def called(*arguments: Any) -> Any:
        replaced = next(calls, None)
        return await (original(*arguments) if replaced is None else replaced(original, *arguments))

    setattr(records, method, called)


async def unanswered(method: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """Execute a call whose answer is lost."""
    await method(*arguments)
    raise StateAwayError(was_sent=True)


def refused(outcome: object) -> Callable[..., Awaitable[Any]]:
    """Return a call whose message was damaged on its way, so that it has no effect."""

    async def call(_method: Callable[..., Awaitable[Any]], *_arguments: Any) -> Any:
        return outcome

    return call


async def owned_by_another_name(method: Callable[..., Awaitable[Any]], record: NewRecord) -> Any:
    """Open a record with an owner whose number was damaged on its way."""
    gateway, _, number = record.owner.partition(":")
    return await method(replace(record, owner=f"{gateway}:9{number}"))


async def rest(port: int, seen: Seen) -> Seen:
    """Read the answer after its first event, which takes a fraction of a second."""
    other = Seen([seen.ids[0]])
    async with asyncio.timeout(20):
        await read(port, other)
    return other


async def completed(gateway: FakedGateway, response_id: str) -> dict[str, Any]:
    """Wait until a response in the background is complete, and return it."""
    async with asyncio.timeout(20):
        while True:
            found: dict[str, Any] = (await gateway.get(f"/v1/responses/{response_id}")).json()
            if found["status"] == "completed":
                return found
            await asyncio.sleep(0.05)


async def test_a_takeover_without_an_answer_is_given_up(redis_process: RedisProcess) -> None:
    first, second = pair(redis_process.url, stops_after(4))
    async with working(*first.state.background, *second.state.background):
        seen = Seen()
        async with listening(first) as one, listening(second) as two:
            await read(one, seen, body=BODY, events=5)
            await until(lambda: not first.generations.open_requests and not first.context.answers._tasks)
            first_time(second, "take", unanswered)
            assert error_of(await read(two, Seen([seen.ids[0]])), 503)
            assert (await rest(one, seen)).text == TEXT
        await close(first, second)


async def test_a_takeover_that_its_client_does_not_wait_for_is_given_up(redis_process: RedisProcess) -> None:
    first, second = pair(redis_process.url, stops_after(4))
    is_taken, never = asyncio.Event(), asyncio.Event()

    async def late(method: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        await method(*arguments)
        is_taken.set()
        await never.wait()

    async with working(*first.state.background, *second.state.background):
        seen, leaving = Seen(), Seen()
        async with listening(first) as one, listening(second) as two:
            first.pipeline.pause_s = 0.02
            reading = asyncio.create_task(read(one, seen, body=BODY))
            await until(lambda: len(seen.ids) == 3)
            leaving.ids = [seen.ids[0]]
            first_time(second, "take", late)
            following = asyncio.create_task(read(two, leaving))
            await until(lambda: len(leaving.ids) >= 2)
            reading.cancel()
            await is_taken.wait()
            following.cancel()
            assert (await rest(one, seen)).text == TEXT
        await close(first, second)


@pytest.mark.parametrize("outcome", [Writing.LOST, Writing.GONE])
@pytest.mark.parametrize("method", ["append", "finish", "release"])
async def test_a_damaged_message_leaves_no_owner(redis_process: RedisProcess, method: str, outcome: Writing) -> None:
    first, second = pair(redis_process.url, stops_after(4) if method == "release" else says(*WORDS))
    async with working(*first.state.background, *second.state.background):
        seen = Seen()
        async with listening(first) as one, listening(second) as two:
            first_time(first, method, refused(outcome if method == "append" else False))
            await read(one, seen, body=BODY, events=5 if method == "release" else None)
            assert (await rest(two, seen)).text == TEXT
        assert len(second.pipeline.submitted) == (method == "release"), "the record was complete"
        await close(first, second)


async def test_chunks_that_wait_are_recorded_when_the_client_leaves(
    redis_process: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes back with the number of an event that was not recorded when it was sent."""
    first, second = pair(redis_process.url, stops_after(4))
    append, refusals = first.context.answers.records.append, [Writing.LOST]

    async def away_then_damaged(name: str, owner: str, number: int, chunks: Sequence[bytes]) -> Writing:
        if number + len(chunks) == 1:
            return await append(name, owner, number, chunks)
        if first.generations.open_requests:
            raise StateAwayError(was_sent=False)
        return refusals.pop() if refusals else await append(name, owner, number, chunks)

    async with working(*first.state.background, *second.state.background):
        seen = Seen()
        async with listening(first) as one, listening(second) as two:
            monkeypatch.setattr(first.context.answers.records, "append", away_then_damaged)
            await read(one, seen, body=BODY, events=5)
            await until(lambda: not first.generations.open_requests and not first.context.answers._tasks)
            assert (await read(two, seen)).status_code == 200
        assert seen.text == TEXT
        await close(first, second)


async def test_an_owner_with_a_damaged_name_leaves_nothing_when_its_client_does(redis_process: RedisProcess) -> None:
    first, second = pair(redis_process.url, stops_after(0))
    async with working(*first.state.background, *second.state.background):
        async with listening(first) as one, listening(second) as two:
            first_time(first, "open", owned_by_another_name)
            headers = {"idempotency-key": "k"}
            reading = asyncio.create_task(read(one, Seen(), body=BODY, headers=headers))
            await first.pipeline.submissions(1)
            reading.cancel()
            await until(lambda: not first.generations.open_requests and not first.context.answers._tasks)
            again = Seen()
            second.pipeline.script = says(*WORDS)
            async with asyncio.timeout(20):
                await read(two, again, body=BODY, headers=headers)
        assert again.text == TEXT
        await close(first, second)


async def test_a_record_that_was_opened_without_an_answer_is_given_up(redis_process: RedisProcess) -> None:
    first, second = pair(redis_process.url, says(*WORDS))
    async with working(*first.state.background, *second.state.background):
        headers, body = {"idempotency-key": "k"}, {**BODY, "stream": False}
        del body["stream_options"]
        first_time(first, "open", unanswered)
        without = await first.post(CHAT, body, headers)
        await until(lambda: not first.context.answers._tasks)
        async with asyncio.timeout(20):
            again = await second.post(CHAT, body, headers)
        assert TEXT in without.text
        assert again.json()["id"] == without.json()["id"]
        assert TEXT in again.text
        await close(first, second)


@pytest.mark.parametrize("key", [None, "k"])
async def test_a_response_in_the_background_is_generated_or_forgotten(
    redis_process: RedisProcess, key: str | None
) -> None:
    """The call that opened its record got no reply: a repeated request finds the record by its key, if it has one."""
    first, second = pair(redis_process.url, says(*WORDS))
    background = *first.state.background, *second.state.background
    async with working(*background, lambda: adopt_responses(second.context)):
        body = {"model": "tiny", "input": "Hello", "background": True}
        headers = {} if key is None else {"idempotency-key": key}
        first_time(first, "open", unanswered)
        assert error_of(await first.post("/v1/responses", body, headers), 503)
        await until(lambda: not first.context.answers._tasks)
        created = (await second.post("/v1/responses", body, headers)).json()
        found = await completed(first, created["id"])
        assert found["output"][0]["content"][0]["text"] == TEXT
        assert len(first.pipeline.submitted) + len(second.pipeline.submitted) == 1
        with redis_process.client() as client:
            assert client.zcard(f"{first.settings.state.prefix}:{{answers}}:expiring") == 1
        await close(first, second)


async def test_an_adoption_without_an_answer_is_repeated(redis_process: RedisProcess) -> None:
    first, second = pair(redis_process.url, stops_after(4))
    async with working(*second.state.background, lambda: adopt_responses(second.context)):
        first_time(second, "take", unanswered)
        created = (await first.post("/v1/responses", {"model": "tiny", "input": "x", "background": True})).json()
        found = await completed(second, created["id"])
        assert found["output"][0]["content"][0]["text"] == TEXT
        await close(first, second)


async def test_a_post_that_joined_a_request_which_fails_does_not_take_its_record_over(
    redis_process: RedisProcess,
) -> None:
    first, second = pair(redis_process.url, None)
    body, headers = {name: value for name, value in BODY.items() if "stream" not in name}, {"idempotency-key": "k"}
    has_answered = asyncio.Event()

    async def late(method: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        await has_answered.wait()
        return await method(*arguments)

    async with working(*first.state.background, *second.state.background):
        failing = asyncio.create_task(first.post(CHAT, body, headers))
        (request,) = await first.pipeline.submissions(1)
        joined = asyncio.create_task(first.post(CHAT, body, headers))
        await until(lambda: first.context.answers.followers._taken)
        first_time(first, "drop", late)
        for gateway in (first, second):
            gateway.pipeline.script = says(*WORDS[:3])
        first.pipeline.tell(Admission(request.request_id, 0, RequestFailure(ErrorCode.QUEUE_FULL, "full")))
        assert (await failing).status_code == 429
        # Long enough to take the record over, if it could.
        await asyncio.wait([joined], timeout=1)
        has_answered.set()
        answers = [await joined, await second.post(CHAT, body, headers)]
        assert answers[1].status_code == 200
        assert len({answer.json()["id"] for answer in answers if answer.status_code == 200}) == 1
        await close(first, second)

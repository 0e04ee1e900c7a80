"""Answers that two gateways share: joined and continued at either, taken over, and served while the state is away."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from common.deltas import Delta
from common.types import Admission
from gateway.answer_records.records import Writing
from gateway.endpoints.responses.route import adopt_responses
from gateway.ledger.entries import HOUR_S, UsageQuery
from gateway.state.server import StateAwayError
from tests.fakes.pipeline import STOP, says
from tests.fakes.redis_process import temporary_redis
from tests.gateway.answers.reading import BODY, CHAT, Seen, read
from tests.gateway.listening import listening
from tests.gateway.state.servers import new_prefix, working
from tests.gateway.support import FakedGateway, error_of, faked
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from common.requests import GenerateRequest
    from gateway.answer_records.records import NewRecord, RecordReading
    from tests.fakes.pipeline import Event
    from tests.fakes.redis_process import RedisProcess

WORDS = [f" word{number}" for number in range(30)]
TEXT = "".join(WORDS)


def stops_after(tokens: int) -> Any:
    """A script whose requests never end; continued ones do."""

    def script(request: GenerateRequest) -> Iterable[Event]:
        if request.options.resume is not None:
            yield from says(*WORDS)(request)
            return
        yield Admission(request.request_id, 7)
        yield from list(says(*WORDS)(request))[1 : 1 + tokens]

    return script


def in_pairs(request: GenerateRequest) -> Iterable[Event]:
    """Say `WORDS` in portions of two tokens, as drafts may, from where the request continues."""
    resume = request.options.resume
    first = len(resume.token_ids) if resume else 0
    yield Admission(request.request_id, 7)
    for number in range(first, len(WORDS), 2):
        words = WORDS[number : number + 2]
        is_last = number + 2 >= len(WORDS)
        ids = tuple(range(1000 + number, 1000 + number + len(words)))
        yield Delta(request.request_id, 0, number, ids, "".join(words), finish=STOP if is_last else None)


def pair(
    url: str, script: Any, limits_file: Path | None = None, max_open_requests: int = 100, **settings: Any
) -> tuple[FakedGateway, FakedGateway]:
    shared: dict[str, Any] = {"state": {"url": url, "prefix": new_prefix(), **settings}}
    shared["max_open_requests"] = max_open_requests
    first, second = faked(script, limits_file, **shared), faked(script, limits_file, **shared)
    for gateway in (first, second):
        gateway.pipeline.pause_s = 0.005
    return first, second


async def booked(*gateways: FakedGateway) -> list[tuple[int, ...]]:
    """Return requests, prompt tokens, cached tokens and output tokens in the ledger that the gateways share."""
    for gateway in gateways:
        await gateway.state.ledger.commit()
    hour = int(time.time()) // HOUR_S * HOUR_S
    uses = await gateways[0].state.ledger.hours(UsageQuery(hour - HOUR_S, hour + 2 * HOUR_S))
    return [tuple(use.tokens[:4]) for use in uses]


async def close(*gateways: FakedGateway) -> None:
    for gateway in gateways:
        await gateway.context.answers.close()
        await gateway.state.close()


@pytest.mark.parametrize("secret", [None, "a secret that has more than 32 characters"])
async def test_an_answer_is_continued_at_the_other_gateway(redis_process: RedisProcess, secret: str | None) -> None:
    first, second = pair(redis_process.url, says(*WORDS), secret=secret)
    async with working(*first.state.background, *second.state.background):
        seen = Seen()
        async with listening(first) as one, listening(second) as two:
            for port, events in ((one, 5), (two, 6), (one, 1), (two, None)):
                assert (await read(port, seen, body=BODY, events=events)).status_code == 200
        assert seen.text == TEXT
        assert seen.numbers == list(range(len(seen.ids)))
        assert seen.usage["completion_tokens"] == len(WORDS)
        seeds = {each.options.sampling.seed for each in (*first.pipeline.submitted, *second.pipeline.submitted)}
        assert len(seeds) == 1
        assert await booked(first, second) == [(1, 7, 4, len(WORDS))]
        await close(first, second)


async def test_a_repeated_post_joins_at_the_other_gateway(redis_process: RedisProcess) -> None:
    first, second = pair(redis_process.url, says(*WORDS))
    async with working(*first.state.background, *second.state.background):
        headers = {"idempotency-key": "k-1"}
        body = {**BODY, "stream": False}
        del body["stream_options"]
        answers = await asyncio.gather(*(gateway.post(CHAT, body, headers) for gateway in (first, second) * 3))
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.text for answer in answers}) == 1
        assert TEXT in answers[0].text
        assert len(first.pipeline.submitted) + len(second.pipeline.submitted) == 1
        assert await booked(first, second) == [(1, 7, 4, len(WORDS))]
        other = {**body, "temperature": 0.5}
        for gateway in (first, second):
            assert error_of(await gateway.post(CHAT, other, headers), 422)
        await close(first, second)


async def test_a_gateway_taken_for_dead_follows_the_one_that_took_over(redis_process: RedisProcess) -> None:
    """It stalls so long that its answer is taken over; its own client receives the same answer, from the other one."""
    first, second = pair(redis_process.url, stops_after(4))
    async with working(*second.state.background):
        # The first gateway does not renew the sign that it is alive.
        mine, others = Seen(), Seen()
        async with listening(first) as one, listening(second) as two:
            reading = asyncio.create_task(read(one, mine, body=BODY))
            await until(lambda: len(mine.ids) == 5)
            others.ids = [mine.ids[0]]
            await read(two, others)
            # Back from its stall, it goes on generating what it does not own.
            [request] = first.pipeline.submitted
            for event in list(says(*WORDS)(request))[5:]:
                first.pipeline.tell(event)
            await reading
        assert "".join(WORDS) == mine.text == TEXT
        assert others.ids == mine.ids
        assert others.datas == mine.datas[1:]
        assert await booked(first, second) == [(1, 7, 4, len(WORDS))]
        await close(first, second)


@pytest.mark.parametrize("is_misread", [False, True])
async def test_an_owner_goes_on_after_a_refusal_that_the_record_contradicts(
    redis_process: RedisProcess, monkeypatch: pytest.MonkeyPatch, *, is_misread: bool
) -> None:
    """A flipped bit can turn the name of a chunk's writer into another one, and the name in a reading, too."""
    first, second = pair(redis_process.url, says(*WORDS))
    async with working(*first.state.background, *second.state.background):
        records = first.context.answers.records
        append, refused = records.append, [Writing.LOST] * 2
        read_, misread = records.read, ["elsewhere:1"] * is_misread

        async def damaged(*arguments: Any) -> Writing:
            return refused.pop() if refused else await append(*arguments)

        async def damaged_reading(*arguments: Any) -> RecordReading | None:
            reading = await read_(*arguments)
            return replace(reading, owner=misread.pop()) if misread and reading is not None else reading

        monkeypatch.setattr(records, "append", damaged)
        monkeypatch.setattr(records, "read", damaged_reading)
        seen, again = Seen(), Seen()
        async with listening(first) as one, listening(second) as two:
            await read(one, seen, body=BODY)
            again.ids = [seen.ids[0]]
            await read(two, again)
        assert seen.text == TEXT
        assert again.datas == seen.datas[1:], "the chunks that were refused were written later"
        assert len(first.pipeline.submitted) == 1
        await close(first, second)


@pytest.mark.parametrize("is_away", [False, True])
async def test_an_owner_whose_name_arrived_damaged_goes_on(
    redis_process: RedisProcess, monkeypatch: pytest.MonkeyPatch, *, is_away: bool
) -> None:
    """Also if its client has tokens that are not recorded yet."""
    first, second = pair(redis_process.url, says(*WORDS))
    async with working(*first.state.background, *second.state.background):
        records = first.context.answers.records
        open_, append, failures = records.open, records.append, 3 if is_away else 0

        async def damaged(record: NewRecord) -> str | None:
            return await open_(replace(record, owner=record.owner[:-1] + chr(ord(record.owner[-1]) ^ 8)))

        async def away(*arguments: Any) -> Writing:
            nonlocal failures
            if failures:
                failures -= 1
                raise StateAwayError(was_sent=False)
            return await append(*arguments)

        monkeypatch.setattr(records, "open", damaged)
        monkeypatch.setattr(records, "append", away)
        seen, again = Seen(), Seen()
        async with listening(first) as one, listening(second) as two:
            await read(one, seen, body=BODY)
            again.ids = [seen.ids[0]]
            await read(two, again)
        assert seen.text == TEXT
        assert again.datas == seen.datas[1:]
        assert len(first.pipeline.submitted) == 1, "nothing is generated twice"
        assert await booked(first, second) == [(1, 7, 4, len(WORDS))]
        await close(first, second)


async def test_tokens_that_were_not_recorded_do_not_come_twice(
    redis_process: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other gateway takes the answer over without them, and generates it in other portions."""
    first, second = pair(redis_process.url, stops_after(6))
    monkeypatch.setattr(second.pipeline, "script", in_pairs)
    async with working(*second.state.background):
        records = first.context.answers.records
        append = records.append

        async def away(name: str, owner: str, number: int, chunks: Sequence[bytes]) -> Writing:
            # Two tokens are recorded, four are not.
            if number + len(chunks) > 2 and not second.pipeline.submitted:
                raise StateAwayError(was_sent=False)
            return await append(name, owner, number, chunks)

        monkeypatch.setattr(records, "append", away)
        mine, others = Seen(), Seen()
        async with listening(first) as one, listening(second) as two:
            reading = asyncio.create_task(read(one, mine, body=BODY))
            await until(lambda: len(mine.ids) == 7)
            others.ids = [mine.ids[0]]
            await read(two, others)
            [request] = first.pipeline.submitted
            for event in list(says(*WORDS)(request))[7:]:
                first.pipeline.tell(event)
            await reading
            # The numbers of events that came in other portions would make a client that comes back lose tokens.
            assert [event_id for event_id in mine.ids[7:] if event_id] == []
            rest = Seen([others.ids[5]])
            await read(one, rest)
        assert rest.datas == others.datas[5:]
        assert mine.text == TEXT
        assert others.text == TEXT
        assert mine.usage == others.usage
        await close(first, second)


async def test_a_reader_owns_what_it_took_over_without_being_told(
    redis_process: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair(redis_process.url, stops_after(4))
    async with working(*second.state.background):
        records = second.context.answers.records
        take, lost = records.take, 2

        async def unanswered(*arguments: Any) -> bool:
            nonlocal lost
            is_taken = await take(*arguments)
            if lost:
                lost -= 1
                raise StateAwayError(was_sent=True)
            return is_taken

        monkeypatch.setattr(records, "take", unanswered)
        leaving, following = Seen(), Seen()
        async with listening(first) as one, listening(second) as two:
            reading = asyncio.create_task(read(one, leaving, body=BODY))
            await until(lambda: len(leaving.ids) == 5)
            following.ids = [leaving.ids[0]]
            # The first call to take the record is made before anything is sent.
            assert (await read(two, following)).status_code == 503
            following.ids = [leaving.ids[0]]
            assert error_of(await read(two, following), 503)
            await read(two, following)
            reading.cancel()
        assert following.text == TEXT
        await close(first, second)


async def test_the_place_of_a_dead_gateway_is_no_obstacle_to_its_answers(
    redis_process: RedisProcess, tmp_path: Path
) -> None:
    """It holds the only place of the subject until its lease expires."""
    limits = tmp_path / "limits.toml"
    limits.write_text("[default]\nconcurrent = 1\n")
    first, second = pair(redis_process.url, stops_after(4), limits)
    async with working(*second.state.background):
        seen = Seen()
        async with listening(first) as one, listening(second) as two:
            reading = asyncio.create_task(read(one, seen, body=BODY))
            await until(lambda: len(seen.ids) == 5)
            assert error_of(await read(two, Seen(), body=BODY), 429)
            rest = Seen([seen.ids[-1]])
            assert (await read(two, rest)).status_code == 200
            # What continues it counts as open.
            assert error_of(await read(two, Seen(), body=BODY), 429)
            reading.cancel()
        assert seen.text + rest.text == TEXT
        await close(first, second)


async def test_a_follower_waits_for_a_place_to_take_an_answer_over(redis_process: RedisProcess) -> None:
    first, second = pair(redis_process.url, stops_after(4), max_open_requests=1)
    async with working(*first.state.background, *second.state.background):
        leaving, following = Seen(), Seen()
        async with listening(first) as one, listening(second) as two:
            reading = asyncio.create_task(read(one, leaving, body=BODY))
            await until(lambda: len(leaving.ids) == 5)
            other = asyncio.create_task(read(two, Seen(), body=BODY))
            await until(lambda: second.generations.open_requests == 1)
            following.ids = [leaving.ids[0]]
            joining = asyncio.create_task(read(two, following))
            await until(lambda: len(following.ids) == 5)
            reading.cancel()
            await until(lambda: first.generations.open_requests == 0)
            await asyncio.sleep(0.2)
            assert not joining.done()
            other.cancel()
            await joining
        assert following.text == TEXT
        await close(first, second)


async def test_a_follower_waits_while_the_state_is_away(redis_process: RedisProcess) -> None:
    first, second = pair(redis_process.url, says(*WORDS))
    first.pipeline.pause_s = 0.05
    async with working(*first.state.background, *second.state.background):
        seen, following = Seen(), Seen()
        async with listening(first) as one, listening(second) as two:
            reading = asyncio.create_task(read(one, seen, body=BODY))
            await until(lambda: len(seen.ids) >= 3)
            following.ids = [seen.ids[0]]
            joining = asyncio.create_task(read(two, following))
            await until(lambda: following.datas)
            state = second.context.answers.records._state  # type: ignore[attr-defined]
            state._up.clear()  # until its next probe
            await asyncio.gather(reading, joining)
        assert seen.text == TEXT
        assert following.datas == seen.datas[1:]
        await close(first, second)


async def test_a_response_in_the_background_outlives_its_gateway(redis_process: RedisProcess) -> None:
    first, second = pair(redis_process.url, stops_after(4))
    async with working(*second.state.background, lambda: adopt_responses(second.context)):
        body = {"model": "tiny", "input": "Hello", "background": True}
        created = (await first.post("/v1/responses", body)).json()
        path = f"/v1/responses/{created['id']}"
        async with asyncio.timeout(60):
            while (found := (await second.get(path)).json())["status"] != "completed":
                assert found["status"] in ("queued", "in_progress")
                await asyncio.sleep(0.05)
        assert found["output"][0]["content"][0]["text"] == TEXT
        assert found["usage"]["output_tokens"] == len(WORDS)
        assert (await first.get(path)).json() == found
        assert len(second.pipeline.submitted) == 1
        streamed = Seen()
        async with listening(first) as port:
            await read(port, streamed, path=f"{path}?stream=true&starting_after=2")
        assert streamed.numbers[0] == 3
        assert streamed.chunks[-1]["response"]["output"] == found["output"]
        await close(first, second)


async def test_a_response_is_cancelled_at_the_other_gateway(redis_process: RedisProcess) -> None:
    first, second = pair(redis_process.url, stops_after(4))
    async with working(*first.state.background, *second.state.background):
        channel = f"{first.settings.state.prefix}:aborts".encode()
        with redis_process.client() as client:
            await until(lambda: client.pubsub_numsub(channel.decode()) == [(channel, 2)])
        body = {"model": "tiny", "input": "Hello", "background": True}
        created = (await first.post("/v1/responses", body)).json()
        path = f"/v1/responses/{created['id']}"
        cancelled = await second.post(f"{path}/cancel", {})
        assert cancelled.json()["status"] == "cancelled"
        await until(lambda: first.generations.open_requests == 0)
        assert len(first.pipeline.aborted) == 1
        assert (await first.get(path)).json()["status"] == "cancelled"
        await close(first, second)


async def test_without_its_state_a_gateway_serves_but_promises_nothing() -> None:
    with temporary_redis() as process:
        first, second = pair(process.url, says(*WORDS))
        async with working(*first.state.background, *second.state.background):
            begun, without = Seen(), Seen()
            first.pipeline.pause_s = 0.05
            async with listening(first) as port:
                reading = asyncio.create_task(read(port, begun, body=BODY))
                await until(lambda: len(begun.ids) >= 3)
                process.kill()
                # An answer that is under way goes on, and new ones are not recorded.
                await reading
                await read(port, without, body=BODY, headers={"idempotency-key": "k-1"})
                assert error_of(await read(port, Seen([begun.ids[3]])), 503)
            assert begun.text == without.text == TEXT
            assert without.ids == []
            refused = await first.post("/v1/responses", {"model": "tiny", "input": "x", "background": True})
            assert error_of(refused, 503)
        await close(first, second)


async def test_chunks_that_waited_for_the_state_are_written_when_it_is_back(redis_process: RedisProcess) -> None:
    first, second = pair(redis_process.url, says(*WORDS))
    async with working(*first.state.background, *second.state.background):
        first.pipeline.pause_s = 0.02
        seen, again = Seen(), Seen()
        async with listening(first) as one, listening(second) as two:
            reading = asyncio.create_task(read(one, seen, body=BODY))
            await until(lambda: len(seen.ids) >= 3)
            state = first.context.answers.records._state  # type: ignore[attr-defined]
            state._up.clear()  # until its next probe
            await reading
            await until(lambda: not first.context.answers._tasks)
            again.ids = [seen.ids[0]]
            await read(two, again)
        assert seen.text == TEXT
        assert again.datas == seen.datas[1:]
        assert second.pipeline.submitted == []
        await close(first, second)

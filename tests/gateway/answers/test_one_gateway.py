"""Answers of a single gateway, recorded in its memory: clients that come back, and responses in the background."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import pytest

from common.types import ErrorCode, RequestFailure
from gateway.endpoints.responses.route import adopt_responses
from gateway.generation.generations import SHUTDOWN
from gateway.identity.keys import ApiKey, hash_of, save_keys
from tests.fakes.pipeline import rejects, says
from tests.gateway.answers.reading import BODY, CHAT, DONE, Seen, read
from tests.gateway.listening import listening
from tests.gateway.state.servers import working
from tests.gateway.support import HELLO, FakedGateway, error_of, faked, gateway_saying
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

WORDS = [f" word{number}" for number in range(40)]
TEXT = "".join(WORDS)
KEYS = [ApiKey("ann", hash_of("ann"), "acme", "ann"), ApiKey("bob", hash_of("bob"), "acme", "bob")]
ANN, BOB = ({"authorization": f"Bearer {key}"} for key in ("ann", "bob"))


async def reached(gateway: FakedGateway, response_id: str, status: str) -> dict[str, Any]:
    """Poll a response in the background until it has a status, and return it."""
    async with asyncio.timeout(60):
        while (found := (await gateway.get(f"/v1/responses/{response_id}")).json())["status"] != status:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return dict(found)


def slow(**settings: Any) -> FakedGateway:
    """A gateway whose answers take long enough to leave in the middle."""
    gateway = gateway_saying(*WORDS, **settings)
    gateway.pipeline.pause_s = 0.005
    return gateway


def with_keys(directory: Path, **settings: Any) -> FakedGateway:
    save_keys(directory / "keys.toml", KEYS)
    return slow(keys_file=directory / "keys.toml", **settings)


@pytest.mark.parametrize("by_get", [True, False])
async def test_a_client_that_comes_back_receives_the_rest_and_nothing_twice(by_get: bool) -> None:
    gateway = slow()
    undisturbed, seen = Seen(), Seen()
    async with listening(gateway) as port:
        await read(port, undisturbed, body=BODY)
        # The last one leaves and comes back several times.
        for events in (3, 1, 12, None):
            response = await read(port, seen, body=None if by_get and seen.ids else {**BODY, "seed": 7}, events=events)
            assert response.status_code == 200
    assert seen.text == undisturbed.text == TEXT
    assert seen.numbers == list(range(len(undisturbed.ids)))
    assert len({each.rpartition("/")[0] for each in seen.ids}) == 1
    assert seen.usage == undisturbed.usage
    assert seen.datas[-1] == DONE
    assert {chunk["id"] for chunk in seen.chunks} == {seen.last_id.rpartition("/")[0]}
    first, *others = gateway.pipeline.submitted[1:]
    assert len(others) == 3, "it was aborted each time, and continued"
    assert len(set(map(str, (one.request_id for one in gateway.pipeline.submitted)))) == 5
    for one in others:
        assert one.options.sampling == first.options.sampling
        resume = one.options.resume
        assert resume is not None
        assert "".join(WORDS[: len(resume.token_ids)]) == TEXT[: resume.delivered_characters]


async def test_a_complete_answer_is_repeated_without_being_generated_again() -> None:
    gateway = slow()
    async with listening(gateway) as port:
        whole = Seen()
        await read(port, whole, body=BODY)
        # The ending has several events, and browsers' EventSource comes back after the last one.
        for number, event_id in enumerate(whole.ids):
            rest = Seen([event_id])
            assert (await read(port, rest)).status_code == 200
            assert rest.ids[1:] == whole.ids[number + 1 :]
            assert rest.datas == whole.datas[number + 1 :]
    assert number > 40
    assert len(gateway.pipeline.submitted) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": ["a", "b"], "n": 2, "stream": True, "logprobs": 1}),
        ("/v1/messages", {"model": "tiny", "messages": HELLO, "max_tokens": 100, "stream": True}),
        ("/v1/responses", {"model": "tiny", "input": "Hello", "stream": True}),
        (CHAT, {"model": "tiny", "messages": HELLO, "stream": True, "n": 3, "return_token_ids": True}),
    ],
)
async def test_streams_of_every_api_are_continued(path: str, body: dict[str, Any]) -> None:
    gateway = slow()
    whole, seen = Seen(), Seen()
    async with listening(gateway) as port:
        for events in (20, 7, None):
            await read(port, seen, path=path, body=body if len(seen.ids) < 25 else None, events=events)
        # From its first event: the record and what was sent over three connections are the same.
        whole.ids = [seen.ids[0]]
        await read(port, whole, path=path)
    assert seen.numbers == list(range(len(seen.ids)))
    assert len(seen.ids) > 40
    assert [without_time(each) for each in whole.datas] == [without_time(each) for each in seen.datas[1:]]
    if path == "/v1/responses":
        assert seen.numbers == [chunk["sequence_number"] for chunk in seen.chunks]


def without_time(data: str) -> str:
    before, found, after = data.partition('"completed_at":')
    return before + found + after.partition(",")[2]


async def test_tool_calls_keep_their_ids() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    gateway = faked(says("I add.", *call))
    gateway.pipeline.pause_s = 0.005
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    body = {"model": "tiny", "messages": HELLO, "stream": True, "tools": [tool]}
    first, again = Seen(), Seen()
    async with listening(gateway) as port:
        await read(port, first, body=body)
        again.ids = [first.ids[0]]
        await read(port, again)
    assert '"id":"call_' in "".join(first.datas)
    assert again.datas == first.datas[1:]


async def test_others_find_neither_answers_nor_keys(tmp_path: Path) -> None:
    gateway = with_keys(tmp_path)
    seen = Seen()
    key = {"idempotency-key": "k-1"}
    async with listening(gateway) as port:
        await read(port, seen, body=BODY, headers={**ANN, **key}, events=5)
        for body in (BODY, None):
            assert error_of(await read(port, Seen([seen.last_id]), body=body, headers=BOB), 404)
        # Bob's equal key is another one.
        bobs = Seen()
        await read(port, bobs, body=BODY, headers={**BOB, **key})
        await read(port, seen, headers=ANN)
    assert seen.text == bobs.text == TEXT
    assert bobs.last_id.rpartition("/")[0] != seen.last_id.rpartition("/")[0]


async def test_continuing_is_refused_with_the_reason() -> None:
    gateway = slow()
    seen = Seen()
    async with listening(gateway) as port:
        await read(port, seen, body=BODY, events=3)
        answer_id = seen.last_id.rpartition("/")[0]
        other = await read(port, Seen([seen.last_id]), body={**BODY, "temperature": 0.5})
        assert "another body" in error_of(other, 422)["message"]
        assert error_of(await read(port, Seen([seen.last_id]), path="/v1/completions"), 404)
        for wrong in ("17", "x/y", "/3", f"{answer_id}/-1", f"{answer_id}/1.", f"{answer_id}/1.0f3a9c2B"):
            refused = error_of(await read(port, Seen([wrong]), body=BODY), 400)
            assert refused["param"] == "Last-Event-ID"
        ahead = error_of(await read(port, Seen([f"{answer_id}/39"]), body=BODY), 400)
        assert "has not been sent" in ahead["message"]
        unlike = error_of(await read(port, Seen([f"{seen.last_id[:-8]}0f3a9c2b"]), body=BODY), 400)
        assert (unlike["param"], "as it was sent" in unlike["message"]) == ("Last-Event-ID", True)
        assert "Last-Event-ID" in error_of(await read(port, Seen()), 405)["message"]
    assert len([one for one in gateway.pipeline.submitted if one.options.resume is None]) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_repeated_post_joins_the_running_answer(stream: bool) -> None:
    gateway = slow()
    body = {"model": "tiny", "messages": HELLO, "stream": stream}
    headers = {"idempotency-key": "k-1"}
    answers = await asyncio.gather(*(gateway.post(CHAT, body, headers) for _ in range(3)))
    assert len({answer.text for answer in answers}) == 1
    assert answers[0].status_code == 200
    assert "word39" in answers[0].text
    later = await gateway.post(CHAT, body, headers)
    assert later.text == answers[0].text
    assert len(gateway.pipeline.submitted) == 1
    assert "another body" in error_of(await gateway.post(CHAT, {**body, "n": 2}, headers), 422)["message"]
    assert (await gateway.post("/v1/completions", {"model": "tiny", "prompt": "x"}, headers)).status_code == 200
    assert (await gateway.post(CHAT, body, {"idempotency-key": "k-2"})).status_code == 200
    assert len(gateway.pipeline.submitted) == 3


async def test_a_joined_answer_goes_on_when_its_first_client_leaves() -> None:
    gateway = slow()
    headers = {"idempotency-key": "k-1"}
    first, second = Seen(), Seen()
    async with listening(gateway) as port:
        await read(port, first, body=BODY, headers=headers, events=3)
        await read(port, second, body=BODY, headers=headers)
    assert second.text == TEXT
    assert second.numbers == list(range(len(second.ids)))


async def test_an_answer_that_fails_before_its_first_token_can_be_asked_for_again() -> None:
    gateway = faked(rejects(RequestFailure(ErrorCode.INTERNAL, "a defect")))
    headers = {"idempotency-key": "k-1"}
    assert error_of(await gateway.post(CHAT, BODY, headers), 500)
    gateway.pipeline.script = says("Hi")

    async def is_new() -> bool:
        return (await gateway.post(CHAT, BODY, headers)).status_code == 200

    async with asyncio.timeout(30):
        while not await is_new():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_quotas_are_charged_once(tmp_path: Path) -> None:
    (tmp_path / "limits.toml").write_text(
        "[tenants.acme]\nrequests_per_minute = 100\ntokens_per_minute = 100000\nconcurrent = 1\n"
    )
    gateway = with_keys(tmp_path, limits_file=tmp_path / "limits.toml")
    # Nothing is refilled.
    gateway.state.meters._clock = lambda: 1.0  # type: ignore[attr-defined]
    seen = Seen()
    body = {**BODY, "max_tokens": 1000}
    async with listening(gateway) as port:
        for events in (3, 9, None):
            assert (await read(port, seen, body=body, headers=ANN, events=events)).status_code == 200
            await until(lambda: gateway.generations.open_requests == 0)
        response = await gateway.post(CHAT, {"model": "tiny", "messages": HELLO}, ANN)
    # The first answer has 7 tokens of prompt and 40 of output; of the second, its announced prompt is charged so far.
    announced = len("Hello") // 4
    assert int(response.headers["x-ratelimit-remaining-tokens"]) == 100_000 - 47 - announced
    assert int(response.headers["x-ratelimit-remaining-requests"]) == 98
    assert seen.usage["completion_tokens"] == 40


async def test_a_continued_answer_counts_as_an_open_request(tmp_path: Path) -> None:
    (tmp_path / "limits.toml").write_text("[tenants.acme]\nconcurrent = 1\n")
    gateway = with_keys(tmp_path, limits_file=tmp_path / "limits.toml")
    seen = Seen()
    async with listening(gateway) as port:
        await read(port, seen, body=BODY, headers=ANN, events=3)
        await until(lambda: gateway.generations.open_requests == 0)
        script, gateway.pipeline.script = gateway.pipeline.script, None
        other = asyncio.create_task(read(port, Seen(), body=BODY, headers=ANN))
        await until(lambda: gateway.generations.open_requests == 1)
        assert error_of(await read(port, Seen([seen.last_id]), headers=ANN), 429)
        other.cancel()
        await until(lambda: gateway.generations.open_requests == 0)
        gateway.pipeline.script = script
        assert (await read(port, seen, headers=ANN)).status_code == 200
    assert seen.text == TEXT


async def test_nothing_is_recorded_with_a_lifetime_of_0() -> None:
    gateway = slow(answers={"lifetime_s": 0})
    seen = Seen()
    async with listening(gateway) as port:
        await read(port, seen, body=BODY)
        assert error_of(await read(port, Seen(["chatcmpl-1/3"]), body=BODY), 404)
    assert (seen.text, seen.ids) == (TEXT, [])
    background = await gateway.post("/v1/responses", {"model": "tiny", "input": "Hi", "background": True})
    assert "lifetime_s" in error_of(background, 503)["message"]


async def test_records_expire() -> None:
    gateway = gateway_saying("Hi", answers={"lifetime_s": 0.2})
    seen = Seen()
    async with listening(gateway) as port:
        await read(port, seen, body=BODY)
        async with asyncio.timeout(60):
            while (await read(port, Seen([seen.last_id]))).status_code == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_event_ids_can_be_left_out_and_native_streams_have_none() -> None:
    gateway = gateway_saying("Hi")
    plain = await gateway.chat(stream=True, stream_options={"include_event_ids": False})
    native = await gateway.post("/generate", {"text": "x", "stream": True})
    unstored = await gateway.post("/v1/responses", {"model": "tiny", "input": "x", "stream": True, "store": False})
    for response in (plain, native, unstored):
        assert response.status_code == 200
        assert "id: " not in response.text.replace('"', "")


async def test_benchmarks_that_take_every_line_for_json_get_no_ids_unless_they_ask() -> None:
    gateway = gateway_saying("Hi")
    aiohttp = {"user-agent": "Python/3.12 aiohttp/3.13.2"}
    body: Any = {"model": "tiny", "messages": HELLO, "stream": True}
    asking = {**body, "stream_options": {"include_event_ids": True}}
    plain = await gateway.post("/v1/chat/completions", body, aiohttp)
    asked = await gateway.post("/v1/chat/completions", asking, aiohttp)
    browser = await gateway.post("/v1/chat/completions", body, {"user-agent": "Mozilla/5.0"})
    assert ["id: chatcmpl-" in response.text for response in (plain, asked, browser)] == [False, True, True]


async def test_the_official_client_reads_a_slow_stream_with_ids() -> None:
    gateway = faked(says(*WORDS[:3]), bounds={"keep_alive_s": 0.01})
    gateway.pipeline.pause_s = 0.1
    async with (
        listening(gateway) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as client,
    ):
        messages: Any = HELLO
        stream = await client.chat.completions.create(model="tiny", messages=messages, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "".join(WORDS[:3])


async def test_a_response_in_the_background_is_polled_streamed_and_kept() -> None:
    gateway = slow()
    async with (
        listening(gateway) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as client,
    ):
        created = await client.responses.create(model="tiny", input="Hello", background=True)
        assert created.status in ("queued", "in_progress")
        assert (created.background, created.output) == (True, [])
        states: list[Any] = [created.status]
        async with asyncio.timeout(60):
            while (response := await client.responses.retrieve(created.id)).status != "completed":
                states.append(response.status)
                await asyncio.sleep(0.01)
        assert set(states) <= {"queued", "in_progress"}
        assert response.output_text == TEXT
        events = [event async for event in await client.responses.retrieve(created.id, stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.completed"
        rest = [e async for e in await client.responses.retrieve(created.id, stream=True, starting_after=10)]
        assert [event.sequence_number for event in rest] == list(range(11, len(events)))
        again = await client.responses.create(model="tiny", input="And?", previous_response_id=created.id)
        assert again.status == "completed"
    assert len(gateway.pipeline.submitted) == 2


async def test_a_stream_in_the_background_goes_on_without_its_client() -> None:
    gateway = slow()
    seen = Seen()
    body = {"model": "tiny", "input": "Hello", "background": True, "stream": True}
    async with listening(gateway) as port:
        await read(port, seen, path="/v1/responses", body=body, events=5)
        response_id = seen.last_id.rpartition("/")[0]
        await reached(gateway, response_id, "completed")
        await read(port, seen, path=f"/v1/responses/{response_id}?stream=true")
    assert seen.numbers == list(range(len(seen.ids)))
    assert seen.text == TEXT
    assert gateway.pipeline.aborted == []
    assert len(gateway.pipeline.submitted) == 1


async def test_a_response_in_the_background_is_cancelled(tmp_path: Path) -> None:
    gateway = with_keys(tmp_path)
    gateway.pipeline.script = None
    body = {"model": "tiny", "input": "Hello", "background": True}
    created = (await gateway.post("/v1/responses", body, ANN)).json()
    path = f"/v1/responses/{created['id']}"
    assert created["status"] == "queued"
    assert error_of(await gateway.post(f"{path}/cancel", {}, BOB), 404)
    assert error_of(await gateway.get(path, BOB), 404)
    for _ in range(2):
        cancelled = await gateway.post(f"{path}/cancel", {}, ANN)
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
    await until(lambda: gateway.generations.open_requests == 0)
    assert (await gateway.get(path, ANN)).json()["status"] == "cancelled"
    assert len(gateway.pipeline.aborted) == 1
    streamed = await gateway.get(f"{path}?stream=true", ANN)
    assert "response.incomplete" in streamed.text
    assert '"status":"cancelled"' in streamed.text
    gateway.pipeline.script = says("Hi")
    synchronous = (await gateway.post("/v1/responses", {"model": "tiny", "input": "Hello"}, ANN)).json()
    assert (
        "background"
        in error_of(await gateway.post(f"/v1/responses/{synchronous['id']}/cancel", {}, ANN), 400)["message"]
    )
    async with gateway.client() as client:
        assert (await client.delete(path, headers=ANN)).json()["deleted"] is True
    assert error_of(await gateway.get(f"{path}?stream=true", ANN), 404), "its record is deleted, too"


async def test_a_failed_response_in_the_background_is_kept_with_its_error() -> None:
    gateway = faked(rejects(RequestFailure(ErrorCode.INTERNAL, "a defect")))
    created = (await gateway.post("/v1/responses", {"model": "tiny", "input": "Hello", "background": True})).json()
    found = await reached(gateway, created["id"], "failed")
    assert found["error"]["message"] == "a defect"


async def test_a_repeated_background_request_returns_the_same_response() -> None:
    gateway = slow()
    body = {"model": "tiny", "input": "Hello", "background": True}
    ids = {(await gateway.post("/v1/responses", body, {"idempotency-key": "k"})).json()["id"] for _ in range(3)}
    assert len(ids) == 1
    await until(lambda: gateway.generations.open_requests == 0)
    assert len(gateway.pipeline.submitted) == 1


async def test_a_response_in_the_background_whose_reader_had_taken_it_over_is_adopted() -> None:
    gateway = slow()
    body = {"model": "tiny", "input": "Hello", "background": True, "stream": True}
    seen = Seen()
    async with listening(gateway) as port, working(lambda: adopt_responses(gateway.context)):
        await read(port, seen, path="/v1/responses", body=body, events=4)
        [generation] = gateway.generations._open
        generation.fail(SHUTDOWN, "shutdown")
        response_id = seen.last_id.rpartition("/")[0]
        found = await reached(gateway, response_id, "completed")
    assert found["output"][0]["content"][0]["text"] == TEXT
    assert found["usage"]["output_tokens"] == 40
    assert len(gateway.pipeline.submitted) == 2

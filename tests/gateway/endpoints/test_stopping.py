"""What ends a choice, as clients ask for it and are told of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import orjson

from common.deltas import Delta
from common.types import Admission, ErrorCode, Finish, FinishReason, RequestFailure
from tests.fakes.pipeline import PROMPT, logprob, rejects, says
from tests.gateway.listening import listening
from tests.gateway.support import HELLO, events, faked, gateway_saying

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.requests import GenerateRequest
    from tests.fakes.pipeline import Event, Script

AWAY = RequestFailure(ErrorCode.UNAVAILABLE, "away", retryable=True)


async def test_stop_conditions_reach_the_pipeline() -> None:
    gateway = gateway_saying("x")
    await gateway.chat(stop_regex="a+b", no_stop_trim=True, ignore_eos=True, min_tokens=2, stop_token_ids=[7])
    await gateway.complete(stop_regex=["a", "b"])
    chat, completion = (request.options.stop for request in gateway.pipeline.submitted)
    assert chat.stop_patterns == ("a+b",)
    assert (chat.include_stop_text, chat.ignore_eos, chat.min_tokens, chat.stop_token_ids) == (True, True, 2, (7,))
    assert completion.stop_patterns == ("a", "b")


async def test_stop_ids_that_no_vocabulary_has_are_accepted_and_left_out() -> None:
    gateway = gateway_saying("x")
    ids = [-1, 7, 2**31, 2**40]
    for answer in (
        await gateway.chat(stop_token_ids=ids),
        await gateway.complete(stop_token_ids=ids),
        await gateway.post("/generate", {"text": "x", "sampling_params": {"stop_token_ids": ids}}),
    ):
        assert answer.status_code == 200, answer.text
    assert [request.options.stop.stop_token_ids for request in gateway.pipeline.submitted] == [(7,)] * 3


async def test_answers_contain_the_matched_stop() -> None:
    by_text = faked(says("x", finish=Finish(FinishReason.STOP, matched_text="END")))
    by_token = faked(says("x", finish=Finish(FinishReason.STOP, matched_token_id=7)))
    by_model = gateway_saying("x")
    for gateway, expected in ((by_text, "END"), (by_token, 7), (by_model, None)):
        assert (await gateway.chat()).json()["choices"][0]["matched_stop"] == expected
        assert (await gateway.complete()).json()["choices"][0]["matched_stop"] == expected
        for response in (await gateway.chat(stream=True), await gateway.complete(stream=True)):
            chunks = [orjson.loads(event) for event in events(response.text) if event != "[DONE]"]
            assert chunks[-1]["choices"][0]["matched_stop"] == expected
            assert all("matched_stop" not in chunk["choices"][0] for chunk in chunks[:-1])


async def test_best_of_returns_the_most_likely_choices_and_counts_all() -> None:
    def script(request: GenerateRequest) -> Iterable[Event]:
        yield Admission(request.request_id, 7)
        for choice, value in enumerate([-3.0, -1.0, -2.0]):
            entries = [logprob(f"{choice}", value)]
            yield Delta(request.request_id, choice, 0, (1,), f"{choice}", entries, PROMPT, Finish(FinishReason.STOP))

    gateway = faked(script)
    answer = (await gateway.complete(best_of=3, n=2)).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "1"), (1, "2")]
    assert answer["usage"]["completion_tokens"] == 3
    assert gateway.pipeline.submitted[0].options.n == 3
    assert answer["choices"][0]["logprobs"] is None


async def test_time_that_has_passed_counts_when_a_choice_is_resumed() -> None:
    gateway = faked(None, request_timeout_s=600.0)
    asking = asyncio.create_task(gateway.complete())
    [first] = await gateway.pipeline.submissions(1)
    assert first.options.timeout_ms == 600_000
    await asyncio.sleep(0.2)
    gateway.pipeline.lose(first.request_id, AWAY)
    _, second = await gateway.pipeline.submissions(2)
    assert second.options.timeout_ms is not None
    assert 300_000 < second.options.timeout_ms <= 599_800
    for event in says("x")(second):
        gateway.pipeline.tell(event)
    assert (await asking).status_code == 200


async def test_a_stream_that_waits_gets_comments_and_then_its_answer() -> None:
    text = await read_after_two_comments("/v1/chat/completions", {"messages": HELLO}, says("Hi"))
    assert '"content":"Hi"' in text
    assert text.endswith("data: [DONE]\n\n")


async def test_a_failure_after_keep_alive_comments_is_sent_as_an_event() -> None:
    failing = rejects(RequestFailure(ErrorCode.TIMEOUT, "too late"))
    text = await read_after_two_comments("/v1/completions", {"prompt": "x"}, failing)
    assert '"message":"too late"' in text


async def read_after_two_comments(path: str, fields: dict[str, Any], script: Script) -> str:
    """Return the text of a stream whose events come after two keep-alive comments."""
    gateway, text = faked(None, bounds={"keep_alive_s": 0.01}), ""
    async with listening(gateway) as port, httpx.AsyncClient(timeout=60) as client:
        body = {"model": "tiny", "stream": True, **fields}
        async with client.stream("POST", f"http://127.0.0.1:{port}{path}", json=body) as response:
            assert response.status_code == 200
            async for piece in response.aiter_text():
                text += piece
                if text.count(": keep-alive\n") >= 2 and gateway.pipeline.submitted:
                    for event in script(gateway.pipeline.submitted.pop()):
                        gateway.pipeline.tell(event)
    return text

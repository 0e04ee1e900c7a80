from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest

from common.deltas import Delta
from common.types import Admission, ErrorCode, Finish, FinishReason, RequestFailure
from tests.fakes.pipeline import LENGTH, PROMPT, STOP, Event, logprob, says
from tests.gateway.support import events, faked, gateway_saying, stable

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

    from common.requests import GenerateRequest


async def test_chat_stream(snapshot: SnapshotAssertion) -> None:
    response = await gateway_saying("Hel", "lo", " 世界", "!").chat(stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert stable(response.text) == snapshot


async def test_chat_stream_with_usage(snapshot: SnapshotAssertion) -> None:
    gateway = faked(says("Hi", "!", finish=LENGTH))
    response = await gateway.chat(stream=True, stream_options={"include_usage": True})
    assert stable(response.text) == snapshot


async def test_chat_stream_of_two_choices_with_logprobs(snapshot: SnapshotAssertion) -> None:
    entries = [logprob("a", -0.25, ("a", -0.25), ("b", -1.5)), logprob("\n", -0.5)]
    response = await faked(says("a", "\n", logprobs=entries)).chat(stream=True, n=2, logprobs=True, top_logprobs=2)
    assert stable(response.text) == snapshot


async def test_completion_stream(snapshot: SnapshotAssertion) -> None:
    response = await gateway_saying(" one", " two").complete(prompt=["x", "y"], stream=True)
    assert sorted(stable(response.text).split("\n\n")) == snapshot


async def test_completion_stream_with_usage_and_logprobs(snapshot: SnapshotAssertion) -> None:
    gateway = faked(says("a", "b", logprobs=[logprob("a", -0.25, ("b", -1.5)), logprob("b", -0.5)]))
    response = await gateway.complete(stream=True, logprobs=1, stream_options={"include_usage": True})
    assert stable(response.text) == snapshot


async def test_error_inside_a_stream(snapshot: SnapshotAssertion) -> None:
    failure = RequestFailure(ErrorCode.TIMEOUT, "the running time limit passed", retryable=True)
    response = await faked(_breaking(Finish(FinishReason.ERROR, error=failure))).chat(stream=True)
    assert response.status_code == 200
    assert stable(response.text) == snapshot


@pytest.mark.parametrize("stream", [True, False])
async def test_failure_before_the_first_token_has_its_own_status(stream: bool) -> None:
    failure = RequestFailure(ErrorCode.TIMEOUT, "waited too long", retryable=True)

    def script(request: GenerateRequest) -> list[Event]:
        return [
            Admission(request.request_id, 7),
            Delta(request.request_id, 0, 0, (), "", finish=Finish(FinishReason.ERROR, error=failure)),
        ]

    response = await faked(script).chat(stream=stream)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "timeout"


async def test_clients_never_see_an_abort_as_finish_reason() -> None:
    response = await faked(_breaking(Finish(FinishReason.ABORT))).chat(stream=True)
    assert "abort" not in [
        choice["finish_reason"]
        for event in events(response.text)
        if event != "[DONE]"
        for choice in orjson.loads(event).get("choices", [])
    ]
    assert '"error"' in response.text


async def test_each_choice_has_one_role_and_one_finish_reason() -> None:
    response = await gateway_saying("a", "b", "c").chat(stream=True, n=4)
    roles: dict[int, int] = {}
    finishes: dict[int, int] = {}
    for event in events(response.text):
        if event == "[DONE]":
            continue
        (choice,) = orjson.loads(event)["choices"]
        index = choice["index"]
        roles[index] = roles.get(index, 0) + ("role" in choice["delta"])
        finishes[index] = finishes.get(index, 0) + (choice["finish_reason"] is not None)
        assert finishes[index] == 0 or choice["finish_reason"] is not None, "nothing follows the finish"
    assert roles == finishes == dict.fromkeys(range(4), 1)


async def test_tokens_without_text_cause_no_separate_chunk() -> None:
    def script(request: GenerateRequest) -> list[Event]:
        return [
            Delta(request.request_id, 0, 0, (1,), "", prompt_usage=PROMPT),
            Delta(request.request_id, 0, 1, (2,), ""),
            Delta(request.request_id, 0, 2, (3,), "世"),
            Delta(request.request_id, 0, 3, (4,), "", finish=STOP),
        ]

    response = await faked(script).complete(stream=True, stream_options={"include_usage": True})
    chunks: list[Any] = [orjson.loads(event) for event in events(response.text) if event != "[DONE]"]
    assert [choice["text"] for chunk in chunks for choice in chunk["choices"]] == ["世", ""]
    assert chunks[-1]["usage"]["completion_tokens"] == 4


async def test_usage_is_not_sent_unasked() -> None:
    response = await gateway_saying("a").chat(stream=True)
    assert "usage" not in response.text


def _breaking(finish: Finish) -> Any:
    def script(request: GenerateRequest) -> list[Event]:
        return [
            Admission(request.request_id, 7),
            Delta(request.request_id, 0, 0, (1,), "Hel", prompt_usage=PROMPT),
            Delta(request.request_id, 0, 1, (), "", finish=finish),
        ]

    return script

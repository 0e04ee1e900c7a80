"""Log probabilities of prompts, in the shapes of three APIs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest

from common.deltas import Delta, LogprobText, PromptLogprobsText, TokenText
from common.prompt_logprobs import PromptLogprobs
from common.types import Admission, ErrorCode, Finish, FinishReason, RequestFailure, RequestId
from gateway.generation.generation import MAX_PROMPT_VALUES
from tests.fakes.pipeline import LENGTH, PROMPT
from tests.gateway.support import FakedGateway, events, faked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.requests import GenerateRequest
    from tests.fakes.pipeline import Event

TEXTS = [b"The", b" cap", b"ital", b" of"]
IDS = [10, 11, 12, 13]
OTHER = TokenText(99, -0.25, b" xy")
GONE = RequestFailure(ErrorCode.UNAVAILABLE, "gone", retryable=True)


def entry(position: int, asked: int = 0) -> LogprobText:
    token = TokenText(IDS[position], -float(position), TEXTS[position])
    return LogprobText(token, (OTHER, token), tuple(-float(i) - 0.5 for i in range(asked)), rank=2)


def parts(request: GenerateRequest) -> Iterator[PromptLogprobsText]:
    """Tell of the prompt in two parts, from where it is asked for."""
    wanted = request.options.prompt_logprobs
    assert wanted is not None
    lead = TokenText(IDS[wanted.start], 0.0, TEXTS[wanted.start])
    entries = [entry(position, len(wanted.token_ids)) for position in range(wanted.start + 1, 4)]
    if entries:
        yield PromptLogprobsText(wanted.start + 1, entries[:1], lead, is_last=len(entries) == 1)
        lead = None  # type: ignore[assignment]  # only the first part has one
    if len(entries) != 1:
        yield PromptLogprobsText(wanted.start + 1 + len(entries[:1]), entries[1:], lead, is_last=True)


def script(request: GenerateRequest) -> Iterator[Event]:
    yield Admission(request.request_id, 4)
    if request.options.prompt_logprobs is not None:
        for part in parts(request):
            yield Delta(request.request_id, 0, 0, (), "", (), PROMPT, prompt_logprobs=part)
    for index in range(request.options.n):
        if request.options.stop.max_tokens == 0:
            yield Delta(request.request_id, index, 0, (), "", finish=LENGTH)
        else:
            logprobs = [LogprobText(TokenText(50, -3.0, b" Fr"), (OTHER,), (-7.0,) * 2)]
            yield Delta(request.request_id, index, 0, (50,), " Fr", logprobs, PROMPT, LENGTH)


def gateway() -> FakedGateway:
    return faked(script)


SCORED: dict[str, list[Any]] = {
    "tokens": ["The", " cap", "ital", " of"],
    "token_logprobs": [None, -1.0, -2.0, -3.0],
    "top_logprobs": [
        None,
        {" cap": -1.0, " xy": -0.25},
        {"ital": -2.0, " xy": -0.25},
        {" of": -3.0, " xy": -0.25},
    ],
    "text_offset": [0, 3, 7, 11],
}


async def test_an_echo_puts_prompt_logprobs_before_those_of_the_answer() -> None:
    body = (await gateway().complete(prompt="The capital of", echo=True, logprobs=1, max_tokens=1)).json()
    (choice,) = body["choices"]
    assert choice["text"] == "The capital of Fr"
    assert choice["logprobs"] == {
        "tokens": [*SCORED["tokens"], " Fr"],
        "token_logprobs": [*SCORED["token_logprobs"], -3.0],
        "top_logprobs": [*SCORED["top_logprobs"], {" Fr": -3.0, " xy": -0.25}],
        "text_offset": [*SCORED["text_offset"], 14],
    }


async def test_scoring_alone_generates_nothing() -> None:
    fake = gateway()
    body = (await fake.complete(prompt="The capital of", echo=True, logprobs=1, max_tokens=0)).json()
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("The capital of", "length")
    assert choice["logprobs"] == SCORED
    assert body["usage"]["completion_tokens"] == 0
    (sent,) = fake.pipeline.submitted
    assert sent.options.stop.max_tokens == 0
    assert sent.options.prompt_logprobs == PromptLogprobs(0, 1)


async def test_every_choice_of_every_prompt_shows_its_prompts() -> None:
    body = (await gateway().complete(prompt=["The capital of"] * 2, n=2, echo=True, logprobs=1)).json()
    assert [choice["logprobs"]["tokens"][:4] for choice in body["choices"]] == [SCORED["tokens"]] * 4


async def test_a_stream_shows_prompts_first() -> None:
    response = await gateway().complete(
        prompt="The capital of", n=2, echo=True, logprobs=1, stream=True, stream_options={"include_usage": True}
    )
    lines = list(events(response.text))
    assert lines.pop() == "[DONE]"
    *chunks, usage = map(orjson.loads, lines)
    assert usage["usage"]["prompt_tokens"] == PROMPT.prompt_tokens * 1
    for index in range(2):
        first, *rest = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert first["text"] == "The capital of"
        assert first["logprobs"] == SCORED
        assert first["finish_reason"] is None
        assert "".join(choice["text"] for choice in rest) == " Fr"
        assert rest[0]["logprobs"]["text_offset"] == [14]
        assert rest[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("endpoint", ["chat", "completions", "tools"])
async def test_prompt_logprobs_are_keyed_by_token_id(endpoint: str) -> None:
    fake = gateway()
    if endpoint == "completions":
        told = (await fake.complete(prompt_logprobs=2)).json()["choices"][0]["prompt_logprobs"]
    else:
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        more: dict[str, Any] = {"tools": [tool]} if endpoint == "tools" else {}
        told = (await fake.chat(prompt_logprobs=2, **more)).json()["prompt_logprobs"]
    assert told[0] is None
    assert told[1] == {
        "99": {"logprob": -0.25, "rank": 1, "decoded_token": " xy"},
        "11": {"logprob": -1.0, "rank": 2, "decoded_token": " cap"},
    }
    assert len(told) == 4
    assert fake.pipeline.submitted[0].options.prompt_logprobs == PromptLogprobs(0, 2)


async def test_prompt_logprobs_are_absent_unless_requested() -> None:
    fake = gateway()
    assert "prompt_logprobs" not in (await fake.chat()).json()
    assert "prompt_logprobs" not in (await fake.complete()).json()["choices"][0]
    assert [request.options.prompt_logprobs for request in fake.pipeline.submitted] == [None, None]


@pytest.mark.parametrize("stream", [False, True])
async def test_native_answers_have_input_and_output_apart(stream: bool) -> None:
    body = {
        "input_ids": IDS,
        "return_logprob": True,
        "logprob_start_len": 1,
        "top_logprobs_num": 2,
        "token_ids_logprob": [5, 6],
        "stream": stream,
        "sampling_params": {"max_new_tokens": 1},
    }
    fake = gateway()
    response = await fake.post("/generate", body)
    if stream:
        *_, last, done = [line for line in response.text.split("\n\n") if line]
        assert done == "data: [DONE]"
        meta = orjson.loads(last.removeprefix("data: "))["meta_info"]
    else:
        meta = response.json()["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 11, " cap"], [-2.0, 12, "ital"], [-3.0, 13, " of"]]
    assert meta["input_top_logprobs"][0] is None
    assert meta["input_top_logprobs"][1] == [[-0.25, 99, " xy"], [-2.0, 12, "ital"]]
    assert meta["input_token_ids_logprobs"] == [None, *[[[-0.5, 5, None], [-1.5, 6, None]]] * 2]
    assert meta["output_token_logprobs"] == [[-3.0, 50, " Fr"]]
    assert meta["output_token_ids_logprobs"] == [[[-7.0, 5, None], [-7.0, 6, None]]]
    assert meta["prompt_tokens"] == PROMPT.prompt_tokens
    (sent,) = fake.pipeline.submitted
    assert sent.options.prompt_logprobs == PromptLogprobs(1, 2, (5, 6))
    assert sent.options.sampling.logprob_token_ids == (5, 6)


async def test_native_answers_contain_no_prompt_logprobs_by_default() -> None:
    fake = gateway()
    meta = (await fake.post("/generate", {"text": "x", "return_logprob": True})).json()["meta_info"]
    assert (meta["input_token_logprobs"], meta["input_top_logprobs"]) == ([], [])
    assert fake.pipeline.submitted[0].options.prompt_logprobs is None


async def test_interrupted_prompt_logprobs_continue_from_the_break() -> None:
    """The first submission breaks after a part; the second is asked for the rest, and nothing comes twice."""

    def breaking(request: GenerateRequest) -> Iterator[Event]:
        wanted = request.options.prompt_logprobs
        assert wanted is not None
        if wanted.start == 0:
            first, _ = parts(request)
            yield Delta(request.request_id, 0, 0, (), "", (), PROMPT, prompt_logprobs=first)
            yield Delta(request.request_id, 0, 0, (), "", finish=Finish(FinishReason.ERROR, error=GONE))
        else:
            yield from script(request)

    fake = faked(breaking)
    body = (await fake.complete(prompt="The capital of", echo=True, logprobs=1, max_tokens=0)).json()
    assert body["choices"][0]["logprobs"] == SCORED
    assert [request.options.prompt_logprobs for request in fake.pipeline.submitted] == [
        PromptLogprobs(0, 1),
        PromptLogprobs(1, 1),
    ]


async def test_complete_prompt_logprobs_are_not_requested_again() -> None:
    def breaking(request: GenerateRequest) -> Iterator[Event]:
        if request.options.prompt_logprobs is not None:
            *told, _finish = script(request)
            yield from told
            yield Delta(request.request_id, 0, 0, (), "", finish=Finish(FinishReason.ERROR, error=GONE))
        else:
            yield Delta(request.request_id, 0, 0, (50,), " Fr", finish=LENGTH)

    fake = faked(breaking)
    body = (await fake.complete(prompt="The capital of", prompt_logprobs=1, max_tokens=1)).json()
    assert len(body["choices"][0]["prompt_logprobs"]) == 4
    assert body["choices"][0]["text"] == " Fr"
    first, second = fake.pipeline.submitted
    assert first.request_id != RequestId(second.request_id)
    assert second.options.prompt_logprobs is None


@pytest.mark.parametrize(("prompts", "n", "status"), [(16, 1, 200), (17, 1, 400), (8, 2, 200), (3, 6, 400)])
async def test_prompt_logprobs_of_one_response_are_bounded_over_all_prompts(prompts: int, n: int, status: int) -> None:
    # Own value and 5 alternatives for each of 5,462 tokens, so that sixteen are just within the bound.
    tokens = MAX_PROMPT_VALUES // 16 // 6 + 1

    def long(request: GenerateRequest) -> Iterator[Event]:
        _, *events = script(request)
        yield Admission(request.request_id, tokens)
        yield from events

    fake = faked(long)
    fields: dict[str, Any] = {"prompt": ["The capital of"] * prompts, "n": n, "max_tokens": 1}
    response = await fake.complete(**fields, echo=True, logprobs=5)
    assert response.status_code == status, response.text
    if status == 400:
        error = response.json()["error"]
        assert error["param"] == "prompt_logprobs"
        assert f"{MAX_PROMPT_VALUES}" in error["message"]
    assert (await fake.complete(**fields)).status_code == 200
    assert not len(fake.journal)

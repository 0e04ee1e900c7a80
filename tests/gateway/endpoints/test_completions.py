from __future__ import annotations

from typing import Any

import orjson
import pytest

from common.deltas import Delta, PromptUsage
from common.requests import TokenPrompt
from gateway.delivery import deliveries as responses
from tests.fakes.pipeline import STOP, Event, logprob, says
from tests.gateway.support import error_of, events, faked, gateway_saying


async def test_whole_completion_has_openai_shape() -> None:
    body = (await gateway_saying(" Paris", ".").complete()).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": " Paris.", "logprobs": None, "finish_reason": "stop", "matched_stop": None}
    ]
    assert body["usage"]["completion_tokens"] == 2


async def test_max_tokens_defaults_to_16() -> None:
    gateway = gateway_saying("x")
    await gateway.complete()
    await gateway.complete(max_tokens=5)
    assert [request.options.stop.max_tokens for request in gateway.pipeline.submitted] == [16, 5]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [TokenPrompt((1, 2))]),
        ([[1], [2, 3]], [TokenPrompt((1,)), TokenPrompt((2, 3))]),
    ],
)
async def test_all_four_forms_of_a_prompt(prompt: Any, expected: list[object]) -> None:
    gateway = gateway_saying("x")
    response = await gateway.complete(prompt=prompt)
    assert response.status_code == 200
    assert [request.prompt for request in gateway.pipeline.submitted] == expected
    assert len({request.request_id for request in gateway.pipeline.submitted}) == len(expected)


async def test_choices_of_several_prompts_are_numbered_through() -> None:
    def script(request: Any) -> list[Event]:
        usage = PromptUsage(10, 3)
        return [
            Delta(request.request_id, choice, 0, (1,), f"{request.prompt}{choice}", prompt_usage=usage, finish=STOP)
            for choice in range(request.options.n)
        ]

    body = (await faked(script).complete(prompt=["a", "b"], n=2)).json()
    assert [choice["text"] for choice in body["choices"]] == ["a0", "a1", "b0", "b1"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 20
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 6


async def test_echo_puts_the_prompt_first() -> None:
    body = (await gateway_saying(" b").complete(prompt=["a", "A"], n=2, echo=True)).json()
    assert [choice["text"] for choice in body["choices"]] == ["a b", "a b", "A b", "A b"]


async def test_echo_of_token_ids_is_their_text() -> None:
    response = await gateway_saying(" b", " c").complete(prompt=[104, 105], echo=True, stream=True)
    texts = [orjson.loads(event)["choices"][0]["text"] for event in events(response.text) if event != "[DONE]"]
    assert texts == ["hi b", " c"]


async def test_legacy_logprobs_have_offsets_and_the_sampled_token() -> None:
    entries = [logprob("é", -0.1, ("é", -0.1), ("e", -3.0)), logprob("!", -2.0, ("?", -0.5))]
    gateway = faked(says("é", "!", logprobs=entries))
    logprobs = (await gateway.complete(logprobs=1)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["é", "!"]
    assert logprobs["token_logprobs"] == [-0.1, -2.0]
    assert logprobs["text_offset"] == [0, 1]
    assert logprobs["top_logprobs"] == [{"é": -0.1, "e": -3.0}, {"!": -2.0, "?": -0.5}]


async def test_streamed_legacy_offsets_continue_from_chunk_to_chunk() -> None:
    entries = [logprob("ab", -0.1), logprob("c", -0.2), logprob("d", -0.3)]
    response = await faked(says("ab", "c", "d", logprobs=entries)).complete(logprobs=0, stream=True)
    chunks = [orjson.loads(event) for event in events(response.text) if event != "[DONE]"]
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [2], [3]]


async def test_token_that_is_a_part_of_a_character_is_shown_as_bytes() -> None:
    entry = logprob("x", -0.1)
    broken = type(entry)(type(entry.token)(0, -0.1, b"\xe2\x80"))
    body = (await faked(says("x", logprobs=[broken])).complete(logprobs=0)).json()
    assert body["choices"][0]["logprobs"]["tokens"] == ["bytes:\\xe2\\x80"]


async def test_a_stream_has_exactly_one_chunk_per_token() -> None:
    words = [f" w{number}" for number in range(20)]
    response = await gateway_saying(*words).complete(stream=True, max_tokens=20)
    chunks = [orjson.loads(event) for event in events(response.text) if event != "[DONE]"]
    assert [chunk["choices"][0]["text"] for chunk in chunks] == words
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 19 + ["stop"]


async def test_log_probabilities_that_are_kept_for_an_answer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MAX_WHOLE_VALUES", 12)
    words = ("a", "b", "c", "d")
    gateway = faked(says(*words, logprobs=[logprob(word, -0.5, ("x", -0.75), ("y", -1.0)) for word in words]))
    assert (await gateway.complete(logprobs=2)).status_code == 200
    error = error_of(await gateway.complete(logprobs=2, n=2), 400)
    assert error["param"] == "logprobs"
    assert "stream" in error["message"]
    assert (await gateway.complete(logprobs=2, n=2, stream=True)).text.endswith("data: [DONE]\n\n")
    assert (await gateway.complete(n=2)).status_code == 200
    assert not len(gateway.journal)

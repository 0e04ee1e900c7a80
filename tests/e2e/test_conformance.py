"""The official SDK, which validates every answer and every event against its own types, on all five services."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from common.settings import GatewaySettings, ModelSettings, Settings
from tests.e2e.conftest import require_model, serve
from tests.e2e.served import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

CHAT: Any = [{"role": "user", "content": "Name three primary colors."}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def served(run_root: Path) -> Iterator[Served]:
    """A deployment that takes the bundled model for one that calls tools and reasons: grammars make it do so."""
    require_model()
    yield from serve(
        Settings(
            model=ModelSettings(tool_style="hermes", reasoning_style="think"),
            gateway=GatewaySettings(port=0, anonymous="vouched"),
        ),
        run_root,
    )


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S, _strict_response_validation=True
    )


@pytest.fixture
def async_client(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S, _strict_response_validation=True
    )


def test_the_sdk_validates_responses(client: openai.OpenAI) -> None:
    """What these tests rest on: an answer of another shape is an error."""
    with pytest.raises(openai.APIResponseValidationError):
        client.get("/models", cast_to=openai.types.CreateEmbeddingResponse)


def test_chat_whole(client: openai.OpenAI, served: Served) -> None:
    answer = client.chat.completions.create(
        model=served.model, messages=CHAT, max_tokens=8, n=2, seed=3, logprobs=True, top_logprobs=2, stop=["zzz"]
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content
        assert "".join(entry.token for entry in choice.logprobs.content).startswith(choice.message.content or "")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_chat_streamed(async_client: openai.AsyncOpenAI, served: Served) -> None:
    common: Any = {"model": served.model, "messages": CHAT, "max_tokens": 12, "seed": 5, "temperature": 1}
    whole = await async_client.chat.completions.create(**common)
    stream = await async_client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    *parts, last = chunks
    assert len({chunk.id for chunk in chunks}) == 1
    assert not last.choices
    assert last.usage == whole.usage or last.usage is not None
    assert "".join(chunk.choices[0].delta.content or "" for chunk in parts) == whole.choices[0].message.content
    assert [chunk.choices[0].delta.role for chunk in parts if chunk.choices[0].delta.role] == ["assistant"]
    reasons = [chunk.choices[0].finish_reason for chunk in parts]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert reasons[-1] == whole.choices[0].finish_reason


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
def test_tools_whole_and_streamed(client: openai.OpenAI, served: Served, choice: Any) -> None:
    common: Any = {
        "model": served.model,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 120,
        "temperature": 0,
    }
    answer = client.chat.completions.create(**common)
    [call] = answer.choices[0].message.tool_calls or []
    with client.chat.completions.create(**common, stream=True) as stream:
        deltas = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
    assert json.loads(call.function.arguments) in ({"city": "Paris"}, {"city": "Rome"})
    assert deltas[0].function is not None
    assert deltas[0].function.name == "get_weather"
    assert "".join(delta.function.arguments or "" for delta in deltas if delta.function) == call.function.arguments


def test_completions_whole_and_streamed(client: openai.OpenAI, served: Served) -> None:
    common: Any = {"model": served.model, "max_tokens": 6, "temperature": 0, "logprobs": 2}
    # The SDK's types forget that a prompt's first token has no log probability, and that chunks but the last have no
    # reason to end.
    lenient = served.client()
    answer = lenient.completions.create(prompt=["The capital of France is", "One, two,"], echo=True, **common)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        told = choice.logprobs
        assert told is not None
        assert told.tokens is not None
        assert "".join(told.tokens) == choice.text
        assert told.text_offset == sorted(told.text_offset or ())
    alone = client.completions.create(prompt="The capital of France is", **common)
    with lenient.completions.create(prompt="The capital of France is", stream=True, **common) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == alone.choices[0].text
    assert answer.choices[0].text == "The capital of France is" + alone.choices[0].text


def test_responses(client: openai.OpenAI, served: Served) -> None:
    first = client.responses.create(
        model=served.model, input="Name a color.", max_output_tokens=8, temperature=0, store=True
    )
    assert first.output_text
    assert client.responses.retrieve(first.id).output_text == first.output_text
    with client.responses.create(
        model=served.model, input="Another one.", previous_response_id=first.id, max_output_tokens=8, stream=True
    ) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == text
    assert last.response.previous_response_id == first.id
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_models_and_errors(client: openai.OpenAI, served: Served) -> None:
    assert served.model in [card.id for card in client.models.list()]
    assert client.models.retrieve(served.model).id == served.model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=served.model, messages=CHAT, temperature=3)
    assert refused.value.param == "temperature"
    assert isinstance(refused.value.body, dict)
    assert refused.value.body.keys() == {"message", "type", "param", "code"}


def test_ends_and_ids_are_those_of_the_engine(client: openai.OpenAI, served: Served) -> None:
    """Fields of SGLang and vLLM that the SDK passes through."""
    extra: dict[str, Any] = {"return_token_ids": True, "stop_token_ids": [2**31 - 1], "ebnf": 'root ::= "a" "b"'}
    extra["separate_reasoning"] = False
    answer = client.chat.completions.create(model=served.model, messages=CHAT, temperature=0, extra_body=extra)
    body: Any = answer.to_dict()  # Any: free JSON
    [choice] = body["choices"]
    assert choice["message"]["content"] == "ab"
    assert isinstance(choice["matched_stop"], int)
    assert choice["token_ids"][-1] == choice["matched_stop"]
    assert len(body["prompt_token_ids"]) == body["usage"]["prompt_tokens"]
    ended: Any = client.completions.create(
        model=served.model, prompt="1 2 3", max_tokens=20, temperature=0, extra_body={"stop_regex": "[0-9]"}
    ).to_dict()
    assert ended["choices"][0]["matched_stop"] == "[0-9]"


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL]}])
def test_reasoning_ends_with_its_budget(client: openai.OpenAI, served: Served, fields: dict[str, Any]) -> None:
    budget = 10
    answer: Any = client.chat.completions.create(
        model=served.model, messages=CHAT, max_tokens=60, seed=5, extra_body={"thinking_token_budget": budget}, **fields
    ).to_dict()
    [choice] = answer["choices"]
    assert choice["message"]["reasoning_content"]
    assert choice["message"]["content"]
    # The tokens of both marks count, too.
    marks = 2 * len("</think>")
    assert 0 < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= budget + marks

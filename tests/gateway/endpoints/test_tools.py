"""Tool calls and reasoning as clients see them."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any

import openai
import orjson
import pytest

from common.requests import ChatPrompt
from common.types import FinishReason, ReasoningStyle, ToolStyle
from tests.fakes.pipeline import CARD, LENGTH, FakeModel, FakePipeline, logprob, says
from tests.gateway.listening import listening
from tests.gateway.support import FakedGateway, error_of, events

if TYPE_CHECKING:
    from collections.abc import Sequence

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def gateway_of(words: Sequence[str], style: ToolStyle | None = ToolStyle.HERMES, **card: Any) -> FakedGateway:
    model = FakeModel(dataclasses.replace(CARD, tool_style=style, **card))
    return FakedGateway(FakePipeline(says(*words)), model=model)


async def chunks_of(gateway: FakedGateway, **fields: Any) -> list[dict[str, Any]]:
    response = await gateway.chat(stream=True, **fields)
    assert response.status_code == 200, response.text
    return [orjson.loads(event) for event in events(response.text) if event != "[DONE]"]


async def test_whole_answer_with_a_call() -> None:
    gateway = gateway_of(["I look. ", CALL])
    [choice] = (await gateway.chat(tools=[WEATHER])).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "I look."
    [call] = message["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    prompt = gateway.pipeline.submitted[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert [json.loads(tool) for tool in prompt.tools_json] == [WEATHER]


async def test_streamed_call_has_id_and_name_once_and_then_only_arguments() -> None:
    chunks = await chunks_of(gateway_of(list(CALL)), tools=[WEATHER])
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": None, "refusal": None}
    calls = [choice["delta"]["tool_calls"][0] for choice in middle]
    assert calls[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert calls[0]["type"] == "function"
    assert all(call.keys() == {"index", "function"} and call["function"]["arguments"] for call in calls[1:])
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Paris"}'
    assert {call["index"] for call in calls} == {0}
    assert last["finish_reason"] == "tool_calls"
    assert all(choice["finish_reason"] is None for choice in middle)


async def test_a_call_cut_off_by_the_limit_says_length() -> None:
    gateway = gateway_of([])
    gateway.pipeline.script = says(CALL[:50], finish=LENGTH)
    [choice] = (await gateway.chat(tools=[WEATHER])).json()["choices"]
    assert choice["finish_reason"] == FinishReason.LENGTH.value
    assert choice["message"]["tool_calls"]


async def test_tools_that_must_not_be_called_are_not_shown_to_the_model_and_nothing_is_read_as_a_call() -> None:
    gateway = gateway_of([CALL])
    [choice] = (await gateway.chat(tools=[WEATHER], tool_choice="none")).json()["choices"]
    assert choice["message"]["content"] == CALL
    assert choice["finish_reason"] == "stop"
    prompt = gateway.pipeline.submitted[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools_json == ()


@pytest.mark.parametrize(
    ("choice", "prefix", "answer"),
    [
        ("required", '<tool_call>\n{"name": "', 'get_weather", "arguments": {}}</tool_call>'),
        (
            {"type": "function", "function": {"name": "get_weather"}},
            '<tool_call>\n{"name": "get_weather", "arguments": ',
            "{}}",
        ),
    ],
)
async def test_a_call_that_must_be_made_is_begun_in_the_prompt(choice: object, prefix: str, answer: str) -> None:
    gateway = gateway_of([answer])
    response = await gateway.chat(tools=[WEATHER], tool_choice=choice)
    [call] = response.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": "{}"}
    prompt = gateway.pipeline.submitted[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.assistant_prefix == prefix


async def test_one_call_only_if_none_may_be_parallel() -> None:
    gateway = gateway_of([CALL, CALL])
    for parallel, count in ((False, 1), (True, 2)):
        answer = await gateway.chat(tools=[WEATHER], parallel_tool_calls=parallel)
        assert len(answer.json()["choices"][0]["message"]["tool_calls"]) == count


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": "required", "add_generation_prompt": False}, "tool_choice"),
        ({"tools": [WEATHER] * 300}, "tools"),
        ({"tools": [WEATHER], "tool_choice": "required", "allowed_token_ids": [1]}, "allowed_token_ids"),
    ],
)
async def test_unsupported_and_invalid_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert error_of(await gateway_of(["x"]).chat(**fields), 400)["param"] == param


async def test_a_model_whose_template_knows_no_tools_refuses_them() -> None:
    gateway = gateway_of(["x"], style=None)
    assert error_of(await gateway.chat(tools=[WEATHER]), 400)["param"] == "tools"
    assert (await gateway.chat(tools=[WEATHER], tool_choice="none")).status_code == 200
    assert (await gateway.chat(tools=[])).status_code == 200


async def test_marks_that_are_special_tokens_are_asked_for() -> None:
    gateway = gateway_of(["x"], style=ToolStyle.MISTRAL)
    await gateway.chat(tools=[WEATHER])
    await gateway.chat()
    await gateway.chat(tools=[WEATHER], skip_special_tokens=True)
    assert [request.options.skip_special_tokens for request in gateway.pipeline.submitted] == [False, True, True]


async def test_reasoning_is_separated_and_counted() -> None:
    gateway = gateway_of(["<think>", "Hm", "m", "</think>", "Yes"], reasoning_style=ReasoningStyle.THINK)
    whole = (await gateway.chat()).json()
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hmm", "Yes")
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    chunks = await chunks_of(gateway, stream_options={"include_usage": True})
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hmm"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes"
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    left = (await gateway.chat(separate_reasoning=False)).json()["choices"][0]["message"]
    assert left["content"] == "<think>Hmm</think>Yes"


async def test_a_template_opens_the_reasoning_block_unless_thinking_is_disabled() -> None:
    gateway = gateway_of(["Hm</think>Yes"], reasoning_style=ReasoningStyle.THINK, begins_with_reasoning=True)
    assert (await gateway.chat()).json()["choices"][0]["message"]["reasoning_content"] == "Hm"
    gateway.pipeline.script = says("Yes")
    answer = await gateway.chat(chat_template_kwargs={"enable_thinking": False})
    assert answer.json()["choices"][0]["message"]["content"] == "Yes"


async def test_log_probabilities_of_answers_with_tool_calls_are_all_sent() -> None:
    gateway = gateway_of([])
    words = ["Hi ", *CALL.partition("name")]
    gateway.pipeline.script = says(*words, logprobs=[logprob(word, -1.0) for word in words])
    chunks = await chunks_of(gateway, tools=[WEATHER], logprobs=True)
    entries = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [token["token"] for entry in entries if entry for token in entry["content"]] == words


async def test_the_sdk_accumulates_streamed_calls() -> None:
    gateway = gateway_of(["<think>Hm</think>", *CALL, CALL], reasoning_style=ReasoningStyle.THINK)
    async with (
        listening(gateway) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x") as sdk,
    ):
        tools: Any = [WEATHER]
        async with sdk.chat.completions.stream(
            model="tiny", messages=[{"role": "user", "content": "Weather?"}], tools=tools
        ) as stream:
            message = (await stream.get_final_completion()).choices[0].message
    assert message.tool_calls is not None
    assert [call.function.arguments for call in message.tool_calls] == ['{"city": "Paris"}'] * 2
    assert len({call.id for call in message.tool_calls}) == 2


async def test_a_model_whose_notation_cannot_be_read_refuses_tools_with_the_reason_and_chats() -> None:
    gateway = gateway_of(["x"], style=None, tools_problem="its notation is not known")
    error = error_of(await gateway.chat(tools=[WEATHER]), 400)
    assert error["param"] == "tools"
    assert "its notation is not known" in error["message"]
    assert (await gateway.chat()).status_code == 200


async def test_calls_are_read_with_the_types_of_the_tool_s_schema() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    text = (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    gateway = gateway_of([text], style=ToolStyle.QWEN3_CODER)
    [call] = (await gateway.chat(tools=[tool])).json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "2"}


async def test_a_tool_without_parameters_is_called_without_arguments() -> None:
    gateway = gateway_of(["x"])
    for strict in (None, True):
        function = {"name": "refresh", "strict": strict}
        await gateway.chat(tools=[{"type": "function", "function": function}], tool_choice="required")
        grammar = gateway.pipeline.submitted[-1].options.sampling.grammar
        assert grammar is not None
        assert '"json_schema":{"type":"object","properties":{}}' in grammar.text


@pytest.mark.parametrize("stream", [False, True])
async def test_ids_of_calls_are_those_of_the_notation(stream: bool) -> None:
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:3<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    gateway = gateway_of([text], style=ToolStyle.KIMI_K2)
    if stream:
        chunks = await chunks_of(gateway, tools=[WEATHER])
        [id_] = [
            call["id"]
            for chunk in chunks
            for call in chunk["choices"][0]["delta"].get("tool_calls", ())
            if "id" in call
        ]
    else:
        id_ = (await gateway.chat(tools=[WEATHER])).json()["choices"][0]["message"]["tool_calls"][0]["id"]
    assert id_ == "functions.get_weather:3"


HARMONY_ANSWER = [
    "<|channel|>", "analysis", "<|message|>", "Hm", "<|end|>", "<|start|>", "assistant", "<|channel|>", "final",
    "<|message|>", "Yes",
]  # fmt: skip


async def test_messages_of_harmony_are_read_with_and_without_tools() -> None:
    gateway = gateway_of(HARMONY_ANSWER, style=ToolStyle.HARMONY, reasoning_style=ReasoningStyle.HARMONY)
    for fields in ({}, {"tools": [WEATHER]}, {"stream": False}):
        message = (await gateway.chat(**fields)).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm", "Yes")
    joined = (await gateway.chat(separate_reasoning=False)).json()["choices"][0]["message"]
    assert joined["content"] == "HmYes"
    assert not any(request.options.skip_special_tokens for request in gateway.pipeline.submitted)


def budget_of(gateway: FakedGateway) -> int | None:
    """Return the maximum tokens of reasoning in the last request's grammar."""
    grammar = gateway.pipeline.submitted[-1].options.sampling.grammar
    found = re.search(r'"max_tokens":(\d+)', grammar.text) if grammar is not None else None
    return int(found[1]) if found else None


def variables_of(gateway: FakedGateway) -> dict[str, Any]:
    prompt = gateway.pipeline.submitted[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    variables: dict[str, Any] = json.loads(prompt.template_variables_json or "{}")
    return variables


@pytest.mark.parametrize(
    ("fields", "budget", "variables"),
    [
        ({}, None, {}),
        ({"thinking_token_budget": 100}, 100, {"enable_thinking": True, "thinking": True, "thinking_budget": 100}),
        ({"thinking_token_budget": -1}, None, {}),
        ({"thinking_token_budget": 0}, 0, {"enable_thinking": False, "thinking": False, "thinking_budget": 0}),
        ({"reasoning_effort": "low"}, 1024, {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}),
        ({"reasoning_effort": "max"}, None, {"enable_thinking": True, "thinking": True, "reasoning_effort": "max"}),
        ({"reasoning_effort": "none"}, 0, {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, 0, {"enable_thinking": False}),
        (
            {"reasoning_effort": "low", "thinking_token_budget": 7},
            7,
            {"enable_thinking": True, "thinking": True, "reasoning_effort": "low", "thinking_budget": 7},
        ),
        ({"thinking_token_budget": 7, "add_generation_prompt": False}, None, None),
    ],
)
async def test_budgets_and_efforts_reach_the_template_and_limit_the_reasoning(
    fields: dict[str, Any], budget: int | None, variables: dict[str, Any] | None
) -> None:
    # The template opens the reasoning whatever the request says.
    gateway = gateway_of(
        ["x"],
        reasoning_style=ReasoningStyle.THINK,
        begins_with_reasoning=True,
        begins_with_reasoning_on_request=True,
        begins_with_reasoning_although_off=True,
    )
    assert (await gateway.chat(**fields)).status_code == 200
    assert budget_of(gateway) == budget
    assert variables is None or variables_of(gateway) == variables


async def test_an_effort_is_no_budget_where_the_template_reads_it() -> None:
    gateway = gateway_of(["x"], reasoning_style=ReasoningStyle.THINK, reads_reasoning_effort=True)
    await gateway.chat(reasoning_effort="low")
    assert budget_of(gateway) is None
    await gateway.chat(reasoning_effort="low", thinking_token_budget=5)
    assert budget_of(gateway) == 5


async def test_no_budget_is_set_for_models_that_do_not_reason_or_have_been_told_not_to() -> None:
    plain = gateway_of(["x"])
    await plain.chat(thinking_token_budget=5, reasoning_effort="low")
    assert budget_of(plain) is None
    switched = gateway_of(["x"], reasoning_style=ReasoningStyle.THINK, begins_with_reasoning_on_request=True)
    await switched.chat(reasoning_effort="none")
    assert switched.pipeline.submitted[-1].options.sampling.grammar is None
    await switched.chat(thinking_token_budget=5, tools=[WEATHER])
    assert budget_of(switched) == 5
    assert (await switched.chat(thinking_token_budget=-2)).status_code == 400


async def test_whether_an_answer_begins_with_reasoning_depends_on_the_request() -> None:
    gateway = gateway_of(["Hm</think>Yes"], reasoning_style=ReasoningStyle.THINK, begins_with_reasoning_on_request=True)
    asked = (await gateway.chat(chat_template_kwargs={"thinking": True})).json()["choices"][0]["message"]
    assert (asked["reasoning_content"], asked["content"]) == ("Hm", "Yes")
    not_asked = (await gateway.chat()).json()["choices"][0]["message"]
    assert not_asked["content"] == "Hm</think>Yes"

"""/v1/messages, event by event."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from common.requests import ChatPrompt
from common.types import Finish, FinishReason, ReasoningStyle, Subject, ToolStyle, View
from gateway.identity.keys import ApiKey, hash_of, save_keys
from tests.fakes.pipeline import CARD, LENGTH, FakeModel, FakePipeline, says
from tests.gateway.support import FakedGateway, error_of, faked, gateway_saying

if TYPE_CHECKING:
    from pathlib import Path

    import httpx

TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
IMAGE = "messages[0].content[0].source"


def thinking(*words: str) -> FakedGateway:
    card = dataclasses.replace(CARD, tool_style=ToolStyle.HERMES, reasoning_style=ReasoningStyle.THINK)
    return FakedGateway(FakePipeline(says(*words)), model=FakeModel(card))


async def post(gateway: FakedGateway, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "Hello"}]
    return await gateway.post("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": messages, **fields})


async def test_a_whole_message() -> None:
    body = (await post(thinking("<think>Hm</think>", "I add. ", CALL), tools=[TOOL])).json()
    thought, text, call = body["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "Hm")
    assert (text["type"], text["text"]) == ("text", "I add.")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 1})
    assert body["stop_reason"] == "tool_use"
    assert body["usage"]["input_tokens"] + body["usage"]["cache_read_input_tokens"] == 7


async def test_a_stream_opens_and_closes_each_block() -> None:
    response = await post(thinking("<think>Hm</think>", "I add. ", *CALL), tools=[TOOL], stream=True)
    events = [event.split("\n") for event in response.text.strip().split("\n\n")]
    datas = [orjson.loads(data.removeprefix("data: ")) for _, _, data in events]
    assert [event.removeprefix("event: ") for _, event, _ in events] == [data["type"] for data in datas]
    assert [id_.rpartition("/")[2].partition(".")[0] for id_, _, _ in events] == [
        str(number) for number in range(len(events))
    ]
    kinds = [data["type"] for data in datas if data["type"] != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert kinds == ["message_start", *block * 3, "message_delta", "message_stop"]
    parts = "".join(data["delta"].get("partial_json", "") for data in datas if data["type"] == "content_block_delta")
    assert orjson.loads(parts) == {"a": 1}
    assert datas[-2]["delta"]["stop_reason"] == "tool_use"


async def test_conversations_with_tools_reach_the_template() -> None:
    gateway = thinking("x")
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Add"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "2"}]},
    ]
    response = await post(gateway, messages=turns, system="Be kind.", tools=[TOOL], metadata={"user_id": "ann"})
    assert response.status_code == 200, response.text
    [request] = gateway.pipeline.submitted
    assert isinstance(request.prompt, ChatPrompt)
    assert [message.role for message in request.prompt.messages] == ["system", "user", "assistant", "tool"]
    assert request.options.stop.max_tokens == 9


async def test_the_stop_reason_is_reported() -> None:
    by_text = faked(says("x", finish=Finish(FinishReason.STOP, matched_text="END")))
    ended = (await post(by_text, stop_sequences=["END"])).json()
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", "END")
    assert (await post(faked(says("x", finish=LENGTH)))).json()["stop_reason"] == "max_tokens"
    assert (await post(faked(says("x")))).json()["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, IMAGE),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"output_config": {"effort": "some"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 3}}}, "output_config.format"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"temperature": 2}, "temperature"),
    ],
)
async def test_unsupported_and_invalid_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert error_of(await post(thinking("x"), **fields), 400)["param"] == param


async def test_tokens_are_counted_without_a_limit_of_the_answer() -> None:
    gateway = thinking("x")
    body = {"model": "tiny", "system": "Be", "messages": [{"role": "user", "content": "Hello"}], "tools": [TOOL]}
    response = await gateway.post("/v1/messages/count_tokens", body)
    assert response.json() == {"input_tokens": len("<system>Be<user>Hello")}
    assert not gateway.pipeline.submitted


async def test_an_error_has_the_type_field_of_the_messages_api() -> None:
    response = await post(thinking("x"), max_tokens=0)
    assert response.json()["type"] == "error"
    assert error_of(response, 400)["param"] == "max_tokens"
    assert int(response.headers["content-length"]) == len(response.content)
    assert "type" not in (await thinking("x").post("/v1/completions", {"model": "tiny"})).json()


@pytest.mark.parametrize(
    ("vouches", "view"), [(True, View(Subject("acme", "user/ann"))), (False, View(Subject("acme", "key/k")))]
)
async def test_metadata_names_a_subject_only_if_the_credential_vouches(
    tmp_path: Path, vouches: bool, view: View
) -> None:
    keys = tmp_path / "keys.toml"
    save_keys(keys, [ApiKey("k", hash_of("secret"), "acme", vouches_for_users=vouches)])
    gateway = gateway_saying("x", keys_file=keys)
    body = {
        "model": "tiny",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "Hi"}],
        "metadata": {"user_id": "ann"},
    }
    response = await gateway.post("/v1/messages", body, {"x-api-key": "secret"})
    assert response.status_code == 200, response.text
    assert [request.view for request in gateway.pipeline.submitted] == [view]


async def test_thinking_and_effort_reach_the_template_and_limit_the_reasoning() -> None:
    gateway = thinking("x")
    cases: list[tuple[dict[str, Any], int | None, dict[str, Any]]] = [
        (
            {"thinking": {"type": "enabled", "budget_tokens": 8}},
            8,
            {"thinking_budget": 8, "enable_thinking": True, "thinking": True},
        ),
        ({"thinking": {"type": "adaptive"}}, None, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "disabled"}}, None, {"enable_thinking": False, "thinking": False}),
        (
            {"output_config": {"effort": "low"}},
            1024,
            {"reasoning_effort": "low", "enable_thinking": True, "thinking": True},
        ),
    ]
    for fields, budget, variables in cases:
        response = await post(gateway, **fields)
        assert response.status_code == 200, response.text
        request = gateway.pipeline.submitted[-1]
        assert isinstance(request.prompt, ChatPrompt)
        assert json.loads(request.prompt.template_variables_json or "{}") == variables
        grammar = request.options.sampling.grammar
        assert (f'"max_tokens":{budget}' in grammar.text) if grammar is not None else budget is None


async def test_an_output_format_constrains_the_answer() -> None:
    gateway = thinking("x")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await post(gateway, output_config={"format": {"type": "json_schema", "schema": schema}})
    grammar = gateway.pipeline.submitted[-1].options.sampling.grammar
    assert grammar is not None
    assert '"a":{"type":"integer"}' in grammar.text


async def test_counting_tokens_accepts_any_budget() -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
    body["thinking"] = {"type": "enabled", "budget_tokens": 100_000}
    assert (await thinking("x").post("/v1/messages/count_tokens", body)).status_code == 200

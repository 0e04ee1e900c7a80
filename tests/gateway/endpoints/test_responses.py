"""/v1/responses with the official client, and whose responses they are."""

from __future__ import annotations

import dataclasses
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import openai
import pytest

from common.deltas import Delta
from common.requests import ChatPrompt
from common.types import Admission, ErrorCode, Finish, FinishReason, ReasoningStyle, RequestFailure, ToolStyle
from gateway.identity.keys import ApiKey, hash_of, save_keys
from tests.fakes.pipeline import CARD, LENGTH, FakeModel, FakePipeline, says
from tests.gateway.listening import listening
from tests.gateway.support import FakedGateway, error_of, faked, gateway_saying

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
IMAGE = "input[0].content[0].image_url"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@asynccontextmanager
async def sdk(gateway: FakedGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        listening(gateway) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as client,
    ):
        yield client


def thinking(*words: str) -> FakedGateway:
    card = dataclasses.replace(CARD, tool_style=ToolStyle.HERMES, reasoning_style=ReasoningStyle.THINK)
    return FakedGateway(FakePipeline(says(*words)), model=FakeModel(card))


async def post(gateway: FakedGateway, key: str | None = None, **fields: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"} if key else None
    return await gateway.post("/v1/responses", {"model": "tiny", "input": "Hello", **fields}, headers)


async def test_created_retrieved_continued_and_deleted() -> None:
    gateway = gateway_saying("Hi", " there")
    async with sdk(gateway) as client:
        first = await client.responses.create(model="tiny", input="Hello", instructions="Be kind.", metadata={"a": "b"})
        assert first.output_text == "Hi there"
        assert first.status == "completed"
        assert first.usage is not None
        assert first.usage.input_tokens_details.cached_tokens == 4
        again = await client.responses.retrieve(first.id)
        assert again == first
        second = await client.responses.create(model="tiny", input="And?", previous_response_id=first.id)
        items = await client.responses.input_items.list(second.id)
        assert len(items.data) == 1
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError) as unknown:
            await client.responses.create(model="tiny", input="And?", previous_response_id=first.id)
        assert unknown.value.param == "previous_response_id"
    prompts = [request.prompt for request in gateway.pipeline.submitted]
    assert all(isinstance(prompt, ChatPrompt) for prompt in prompts)
    assert [(m.role, m.content) for m in prompts[0].messages] == [("developer", "Be kind."), ("user", "Hello")]  # type: ignore[union-attr]
    # Instructions hold for one response only.
    assert [(m.role, m.content) for m in prompts[1].messages] == [  # type: ignore[union-attr]
        ("user", "Hello"),
        ("assistant", "Hi there"),
        ("user", "And?"),
    ]


async def test_events_of_a_stream_add_up_to_its_response() -> None:
    async with sdk(thinking("<think>", "Hm", "</think>", "I add. ", *CALL)) as client:
        stream = await client.responses.create(model="tiny", input="Add", tools=[TOOL], stream=True)
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    thoughts = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert (text, arguments, thoughts) == ("I add.", '{"a": 1}', "Hm")
    final = events[-1]
    assert final.type == "response.completed"
    assert [item.type for item in final.response.output] == ["reasoning", "message", "function_call"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in final.response.output]
    assert final.response.usage is not None
    assert final.response.usage.output_tokens_details.reasoning_tokens == 2


async def test_the_stream_helper_of_the_sdk_understands_it() -> None:
    async with sdk(thinking("Hi", " there")) as client, client.responses.stream(model="tiny", input="Hello") as stream:
        response = await stream.get_final_response()
    assert response.output_text == "Hi there"


async def test_tool_results_go_back_in_one_conversation() -> None:
    gateway = thinking("<think>Hm</think>", CALL)
    async with sdk(gateway) as client:
        first = await client.responses.create(model="tiny", input="Add", tools=[TOOL])
        call = first.output[-1]
        assert call.type == "function_call"
        gateway.pipeline.script = says("2")
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
        second = await client.responses.create(model="tiny", input=[result], previous_response_id=first.id)
    assert second.output_text == "2"
    prompt = gateway.pipeline.submitted[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert [message.role for message in prompt.messages] == ["user", "assistant", "tool"]
    assert prompt.messages[1].reasoning_content == "Hm"
    assert call.call_id in (prompt.messages[1].tool_calls_json or "")
    assert prompt.messages[2].tool_call_id == call.call_id


async def test_an_answer_cut_by_the_limit_is_incomplete() -> None:
    gateway = faked(says("Hi", finish=LENGTH))
    body = (await post(gateway, max_output_tokens=1)).json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert gateway.pipeline.submitted[0].options.stop.max_tokens == 1


async def test_a_failure_in_the_middle_is_an_event() -> None:
    def script(request: Any) -> Any:
        error = Finish(FinishReason.ERROR, error=RequestFailure(ErrorCode.INTERNAL, "broken"))
        yield Admission(request.request_id, 7)
        yield Delta(request.request_id, 0, 0, (1,), "Hi")
        yield Delta(request.request_id, 0, 1, (), "", finish=error)

    response = await post(faked(script), stream=True)
    assert "event: response.failed\n" in response.text
    assert '"message":"broken"' in response.text


async def test_a_response_with_store_false_is_not_stored() -> None:
    gateway = gateway_saying("x")
    response_id = (await post(gateway, store=False)).json()["id"]
    assert error_of(await gateway.get(f"/v1/responses/{response_id}"), 404)


async def test_stored_responses_of_others_are_unreachable(tmp_path: Path) -> None:
    keys = [
        ApiKey("ann", hash_of("ann"), "acme", "ann"),
        ApiKey("bob", hash_of("bob"), "acme", "bob"),
        ApiKey("eve", hash_of("eve"), "other", "ann"),
        ApiKey("app", hash_of("app"), "acme", vouches_for_users=True),
    ]
    save_keys(tmp_path / "keys.toml", keys)
    gateway = faked(says("x"), keys_file=tmp_path / "keys.toml", responses={"file": tmp_path / "responses.sqlite"})
    mine = (await post(gateway, "ann")).json()["id"]
    path = f"/v1/responses/{mine}"
    for stranger in ("bob", "eve", "app"):
        headers = {"authorization": f"Bearer {stranger}"}
        assert (await gateway.get(path, headers)).status_code == 404
        async with gateway.client() as client:
            assert (await client.delete(path, headers=headers)).status_code == 404
        assert (await post(gateway, stranger, previous_response_id=mine)).status_code == 400
    assert (await gateway.get(path, {"authorization": "Bearer ann"})).status_code == 200
    users = (await post(gateway, "app", user="carl")).json()["id"]
    assert (await post(gateway, "app", user="dora", previous_response_id=users)).status_code == 400
    assert (await post(gateway, "app", user="carl", previous_response_id=users)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 3}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, IMAGE),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"previous_response_id": "resp_unknown"}, "previous_response_id"),
        ({"metadata": {"a": "b" * 1000}}, "metadata"),
    ],
)
async def test_unsupported_and_invalid_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert error_of(await post(gateway_saying("x"), **fields), 400)["param"] == param

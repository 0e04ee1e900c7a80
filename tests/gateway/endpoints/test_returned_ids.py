"""`return_token_ids`, as vLLM has it."""

from __future__ import annotations

import dataclasses
from typing import Any

import orjson
import pytest

from common.types import ReasoningStyle
from tests.fakes.pipeline import CARD, PROMPT, FakeModel, says
from tests.gateway.support import FakedGateway, events, faked

PROMPT_IDS = list(range(PROMPT.prompt_tokens))


def chunks_of(text: str) -> list[dict[str, Any]]:
    return [orjson.loads(event) for event in events(text) if event != "[DONE]"]


def gateway_of(*words: str, **card: Any) -> FakedGateway:
    return FakedGateway(faked(says(*words)).pipeline, model=FakeModel(dataclasses.replace(CARD, **card)))


@pytest.mark.parametrize("style", [None, ReasoningStyle.THINK])
async def test_a_chat_returns_the_ids_of_prompt_and_output(style: ReasoningStyle | None) -> None:
    gateway = gateway_of("A", "B", "C", reasoning_style=style)
    body = (await gateway.chat(return_token_ids=True, n=2)).json()
    assert body["prompt_token_ids"] == PROMPT_IDS
    whole = [choice["token_ids"] for choice in body["choices"]]
    assert [len(ids) for ids in whole] == [3, 3]
    chunks = chunks_of((await gateway.chat(return_token_ids=True, n=2, stream=True)).text)
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [PROMPT_IDS]
    assert "prompt_token_ids" in chunks[0]
    streamed: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice.get("token_ids") or []
    assert list(streamed.values()) == whole


async def test_ids_of_tokens_without_a_piece_of_their_own_are_sent_with_the_next() -> None:
    gateway = gateway_of("<thi", "nk>", "Hm", "</think>", reasoning_style=ReasoningStyle.THINK)
    whole = (await gateway.chat(return_token_ids=True)).json()["choices"][0]["token_ids"]
    chunks = chunks_of((await gateway.chat(return_token_ids=True, stream=True)).text)
    streamed = [id_ for chunk in chunks for choice in chunk["choices"] for id_ in choice.get("token_ids", ())]
    assert (len(whole), streamed) == (4, whole)


async def test_completions_return_the_ids_of_each_prompt() -> None:
    gateway = gateway_of("A", "B")
    body = (await gateway.complete(return_token_ids=True, prompt=["x", "y"])).json()
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [PROMPT_IDS, PROMPT_IDS]
    assert [len(choice["token_ids"]) for choice in body["choices"]] == [2, 2]
    chunks = chunks_of((await gateway.complete(return_token_ids=True, prompt=["x", "y"], stream=True)).text)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index, whole in enumerate(body["choices"]):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["prompt_token_ids"] == PROMPT_IDS
        assert [id_ for choice in own for id_ in choice.get("token_ids", ())] == whole["token_ids"]


async def test_no_ids_are_returned_unless_they_are_asked_for() -> None:
    gateway = gateway_of("A")
    for response in (await gateway.chat(), await gateway.complete(), await gateway.chat(stream=True)):
        assert "token_ids" not in response.text
    assert not any(request.returns_prompt_ids for request in gateway.pipeline.submitted)

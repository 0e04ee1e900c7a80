from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from common.requests import ChatMessage, ChatPrompt
from common.types import CacheMode, Finish, FinishReason, SamplingParams, StopConditions, Subject, View
from gateway.identity.keys import ApiKey, hash_of, save_keys
from tests.fakes.pipeline import LENGTH, PROMPT, logprob, says
from tests.gateway.support import HELLO, FakedGateway, faked, gateway_saying

if TYPE_CHECKING:
    from pathlib import Path


async def test_whole_chat_completion_has_openai_shape() -> None:
    gateway = gateway_saying("Hi", " there")
    response = await gateway.chat()
    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "tiny"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi there", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "matched_stop": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": PROMPT.prompt_tokens,
        "completion_tokens": 2,
        "total_tokens": PROMPT.prompt_tokens + 2,
        "prompt_tokens_details": {"cached_tokens": PROMPT.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


async def test_choices_are_numbered_and_their_tokens_summed() -> None:
    body = (await gateway_saying("a", "b", "c").chat(n=3)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 9
    assert body["usage"]["prompt_tokens"] == PROMPT.prompt_tokens


async def test_every_field_reaches_the_pipeline() -> None:
    gateway = gateway_saying("x")
    response = await gateway.chat(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        seed=7,
        logit_bias={"5": -100, "6": 1.5},
        logprobs=True,
        top_logprobs=3,
        max_completion_tokens=20,
        max_tokens=99,
        min_tokens=2,
        stop=["\n", "END"],
        stop_token_ids=[2, 3],
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        n=2,
        priority=-4,
        cache_mode="none",
        user="ada",
        cache_salt="red",
        prompt_cache_key="thread-7",
    )
    assert response.status_code == 200
    (request,) = gateway.pipeline.submitted
    assert request.options.sampling == SamplingParams(0.5, 0.9, 40, 0.05, 1.1, 0.2, -0.3, 7, {5: -100.0, 6: 1.5}, 3)
    assert request.options.stop == StopConditions(20, 2, (2, 3), ("\n", "END"), ignore_eos=True, include_stop_text=True)
    assert (request.options.n, request.options.priority, request.options.cache_mode) == (2, -4, CacheMode.NONE)
    assert request.options.skip_special_tokens is False
    assert request.view == View(Subject("default", "local"), "salt=red&user=ada")
    assert request.routing_key == "thread-7"
    assert request.model == "tiny"
    assert request.options.trace is not None


@pytest.mark.parametrize("content", ["a b", [{"type": "text", "text": "a b"}]])
async def test_predictions_reach_the_pipeline_and_are_counted(content: object) -> None:
    finish = Finish(FinishReason.STOP, accepted_prediction_tokens=5, rejected_prediction_tokens=2)
    gateway = faked(says("a", "b", finish=finish))
    usage = (await gateway.chat(n=2, prediction={"type": "content", "content": content})).json()["usage"]
    assert gateway.pipeline.submitted[0].prediction == "a b"
    details = usage["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (10, 4)


async def test_defaults_are_those_of_openai() -> None:
    gateway = gateway_saying("x")
    await gateway.chat()
    (request,) = gateway.pipeline.submitted
    sampling = request.options.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, None)
    assert request.options.stop == StopConditions()
    assert sampling.top_logprobs is None
    assert request.options.n == 1
    assert request.options.skip_special_tokens is True


async def test_a_null_field_means_its_default() -> None:
    names = (
        "temperature",
        "top_p",
        "n",
        "stop",
        "max_tokens",
        "seed",
        "logprobs",
        "stream",
        "tools",
        "user",
        "logit_bias",
    )
    response = await gateway_saying("x").chat(**dict.fromkeys(names))
    assert response.status_code == 200


async def test_unknown_fields_are_ignored() -> None:
    response = await gateway_saying("x").chat(store=True, metadata={"a": "b"}, cache_control={"type": "ephemeral"})
    assert response.status_code == 200


async def test_requests_without_a_seed_get_different_ones() -> None:
    gateway = gateway_saying("x")
    await gateway.chat()
    await gateway.chat()
    first, second = gateway.pipeline.submitted
    assert first.options.sampling.seed != second.options.sampling.seed


async def test_negative_seed_is_taken_modulo_two_to_the_64() -> None:
    gateway = gateway_saying("x")
    await gateway.chat(seed=-1)
    assert gateway.pipeline.submitted[0].options.sampling.seed == 2**64 - 1


async def test_top_p_of_zero_keeps_the_most_likely_token() -> None:
    gateway = gateway_saying("x")
    await gateway.chat(top_p=0)
    # The wire carries single precision and reads 0 as "unset", so something small but positive must be sent.
    assert 0 < gateway.pipeline.submitted[0].options.sampling.top_p <= 1e-5


async def test_messages_reach_the_template_as_they_are() -> None:
    gateway = gateway_saying("x")
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    response = await gateway.chat(
        messages=[
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ada"},
            {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "hm"},
            {"role": "tool", "content": "3", "tool_call_id": "c1"},
            {"role": "assistant", "content": None},
        ],
        tools=[tool],
        chat_template_kwargs={"enable_thinking": False},
    )
    assert response.status_code == 200
    prompt = gateway.pipeline.submitted[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == (
        ChatMessage("system", "Be kind."),
        ChatMessage("user", "a\nb", name="ada"),
        ChatMessage(
            "assistant", None, tool_calls_json=json.dumps(calls, separators=(",", ":")), reasoning_content="hm"
        ),
        ChatMessage("tool", "3", tool_call_id="c1"),
        ChatMessage("assistant", ""),
    )
    assert [json.loads(text) for text in prompt.tools_json] == [tool]
    assert prompt.template_variables_json == '{"enable_thinking":false}'


async def test_tools_stay_out_of_the_prompt_if_none_may_be_chosen() -> None:
    gateway = gateway_saying("x")
    await gateway.chat(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="none")
    prompt = gateway.pipeline.submitted[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools_json == ()


@pytest.mark.parametrize(
    ("fields", "generation_prompt", "continues"),
    [
        ({}, True, False),
        ({"add_generation_prompt": False}, False, False),
        ({"continue_final_message": True}, False, True),
    ],
)
async def test_generation_prompt_flags(fields: dict[str, Any], generation_prompt: bool, continues: bool) -> None:
    gateway = gateway_saying("x")
    await gateway.chat(**fields)
    prompt = gateway.pipeline.submitted[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (generation_prompt, continues)


async def test_logprobs_are_reported_for_each_token() -> None:
    entries = [logprob("Hi", -0.1, ("Hi", -0.1), ("Ho", -2.5)), logprob("!", -0.5, ("!", -0.5), ("?", float("-inf")))]
    gateway = faked(says("Hi", "!", logprobs=entries))
    body = (await gateway.chat(logprobs=True, top_logprobs=2)).json()
    first, second = body["choices"][0]["logprobs"]["content"]
    assert first["token"] == "Hi"
    assert first["bytes"] == [72, 105]
    assert [top["token"] for top in first["top_logprobs"]] == ["Hi", "Ho"]
    assert second["top_logprobs"][1]["logprob"] == -9999.0
    assert body["choices"][0]["logprobs"]["refusal"] is None


async def test_length_is_reported_as_such() -> None:
    body = (await faked(says("a", finish=LENGTH)).chat(max_tokens=1)).json()
    assert body["choices"][0]["finish_reason"] == "length"


async def test_model_without_template_is_pointed_to_completions() -> None:
    gateway = gateway_saying("x")
    gateway.model.card = type(gateway.model.card)("tiny", 10, 10, has_chat_template=False, created_unix_s=0)
    response = await gateway.chat()
    assert response.status_code == 400
    assert "/v1/completions" in response.json()["error"]["message"]


async def test_journal_is_empty_when_all_is_done() -> None:
    gateway = gateway_saying("x")
    await gateway.chat()
    await gateway.chat(stream=True)
    assert len(gateway.journal) == 0
    assert gateway.pipeline.aborted == []


async def views_of(gateway: FakedGateway, *bodies: dict[str, str]) -> list[View]:
    for fields in bodies:
        await gateway.chat(messages=HELLO, **fields)
    return [request.view for request in gateway.pipeline.submitted]


async def test_the_three_user_fields_give_the_same_view_and_no_new_subject() -> None:
    views = await views_of(gateway_saying("x"), *({field: "ada"} for field in ("user", "user_id", "safety_identifier")))
    assert set(views) == {View(Subject("default", "local"), "user=ada")}


async def test_three_turns_without_a_name_have_one_view_and_one_subject() -> None:
    turns: tuple[dict[str, str], ...] = ({}, {"session_id": "one"}, {"prompt_cache_key": "thread"})
    assert set(await views_of(gateway_saying("x"), *turns)) == {View(Subject("default", "local"))}


@pytest.mark.parametrize("field", ["prompt_cache_key", "session_id", "cache_salt", "user"])
async def test_conversation_keys_make_no_subjects(field: str) -> None:
    views = await views_of(gateway_saying("x"), *({field: f"{number}"} for number in range(3)))
    assert {view.subject for view in views} == {Subject("default", "local")}


async def test_users_are_subjects_if_the_credential_vouches_for_them(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    save_keys(
        keys, [ApiKey("app", hash_of("s"), "acme", vouches_for_users=True), ApiKey("plain", hash_of("p"), "acme")]
    )
    gateway = gateway_saying("x", keys_file=keys)
    for secret in ("s", "p"):
        for user in ("ann", "bob"):
            body = {"model": "tiny", "messages": HELLO, "user": user}
            await gateway.post("/v1/chat/completions", body, {"authorization": f"Bearer {secret}"})
    assert [request.view for request in gateway.pipeline.submitted] == [
        View(Subject("acme", "user/ann")),
        View(Subject("acme", "user/bob")),
        View(Subject("acme", "key/plain"), "user=ann"),
        View(Subject("acme", "key/plain"), "user=bob"),
    ]

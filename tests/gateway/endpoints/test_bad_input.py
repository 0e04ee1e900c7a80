from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest

from gateway.identity.keys import ApiKey, hash_of, save_keys
from tests.gateway.support import HELLO, FakedGateway, error_of, gateway_saying

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

JSON = {"content-type": "application/json"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.fixture(scope="module")
def built() -> FakedGateway:
    """A gateway for all tests of this file: to build its routes takes longer than to ask it."""
    return gateway_saying("x")


@pytest.fixture
def gateway(built: FakedGateway) -> FakedGateway:
    built.pipeline.submitted.clear()
    return built


async def test_without_a_credential_nothing_of_a_body_is_read(tmp_path: Path) -> None:
    save_keys(tmp_path / "keys.toml", [ApiKey("ann", hash_of("ann"), "acme")])
    read = []

    async def body() -> AsyncIterator[bytes]:
        read.append("body")
        yield orjson.dumps({"model": "tiny", "messages": HELLO})

    async with gateway_saying("x", keys_file=tmp_path / "keys.toml").client() as client:
        refused = await client.post("/v1/chat/completions", content=body(), headers=JSON)
        assert (refused.status_code, read) == (401, [])
        headers = JSON | {"authorization": "Bearer ann"}
        answered = await client.post("/v1/chat/completions", content=body(), headers=headers)
        assert (answered.status_code, read) == (200, ["body"])


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "'messages': should have at least 1 item, got []"),
        ({"messages": "Hello"}, "messages", "list"),
        ({"messages": None}, "messages", "list"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "Missing"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "'system'"),
        ({"messages": [*HELLO, {"role": "user", "content": 3}]}, "messages[1].content", "string"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].image_url", "base64"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content", "text part"),
        ({"messages": [{"role": "user", "content": [{"type": {}, "text": "x"}]}]}, "messages[0].content", "text part"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls", "function.name"),
        ({"model": None}, "model", "must provide"),
        ({"model": 7}, "model", "string"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"temperature": True}, "temperature", "number"),
        ({"top_p": 1.5}, "top_p", "less than or equal to 1"),
        ({"top_k": -2}, "top_k", "-1"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "128"),
        ({"n": "2"}, "n", "integer"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 2**40}, "max_tokens", "less than or equal"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens", "integer"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens", "max_tokens"),
        ({"stop": ["a"] * 17}, "stop", "16"),
        ({"stop": ""}, "stop", "1 to"),
        ({"stop": [1]}, "stop", "string"),
        ({"stop": 5}, "stop", "string"),
        ({"seed": 2**70}, "seed", ""),
        ({"seed": "x"}, "seed", "integer"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "100"),
        ({"logit_bias": [1]}, "logit_bias", "an object"),
        ({"logprobs": 3}, "logprobs", "boolean"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "boolean"),
        ({"tools": [{"type": "retrieval"}]}, "tools", "function"),
        ({"chat_template_kwargs": 1}, "chat_template_kwargs", "an object"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "both"),
        ({"user": 7}, "user", "string"),
        ({"user": "x" * 257}, "user", "256"),
        ({"user_id": "a\u0000b"}, "user_id", "control"),
        ({"safety_identifier": "a\nb"}, "safety_identifier", "control"),
        ({"session_id": 7}, "session_id", "string"),
        ({"session_id": "a\nb"}, "session_id", "control"),
        ({"session_id": "x" * 257}, "session_id", "256"),
        ({"priority": 2**40}, "priority", "less than"),
        ({"cache_mode": "all"}, "cache_mode", "'default', 'private' or 'none'"),
        ({"prediction": "x"}, "prediction", "object"),
        ({"prediction": {"type": "text", "content": "x"}}, "prediction.type", "content"),
        ({"prediction": {"type": "content"}}, "prediction.content", "required"),
        ({"prediction": {"type": "content", "content": 3}}, "prediction.content", "string"),
        ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction.content", "text"),
    ],
)
async def test_wrong_chat_field_is_named(gateway: FakedGateway, fields: Any, param: str, words: str) -> None:
    error = error_of(await gateway.chat(**fields), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]
    assert param in error["message"]
    assert gateway.pipeline.submitted == []


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": [{"name": "f"}]},
        {"function_call": {"name": "f"}},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "alloy"}},
        {"chat_template": "{{ x }}"},
        {"use_beam_search": True},
        {"echo": True},
        {"web_search_options": {}},
    ],
)
async def test_unsupported_chat_fields_are_refused_by_name(gateway: FakedGateway, fields: Any) -> None:
    error = error_of(await gateway.chat(**fields), 400)
    (field,) = fields
    assert error["param"] == field
    assert "not supported" in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"tool_choice": "auto"},
        {"functions": []},
        {"modalities": ["text"]},
        {"guided_json": None},
        {"use_beam_search": False},
    ],
)
async def test_values_that_change_nothing_are_accepted(gateway: FakedGateway, fields: Any) -> None:
    assert (await gateway.chat(**fields)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"prompt": ["x"] * 100, "n": 20}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"stop_regex": ["a"] * 5}, "stop_regex"),
        ({"echo": True, "truncate_prompt_tokens": 3}, "echo"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"add_special_tokens": "no"}, "add_special_tokens"),
    ],
)
async def test_wrong_completion_field_is_named(gateway: FakedGateway, fields: Any, param: str) -> None:
    assert error_of(await gateway.complete(**fields), 400)["param"] == param


async def test_best_of_equal_to_n_is_accepted(gateway: FakedGateway) -> None:
    assert (await gateway.complete(best_of=2, n=2)).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{'a': 1}",
        b'{"a": NaN}',
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
    ],
)
async def test_invalid_json_is_reported_as_such(gateway: FakedGateway, body: bytes) -> None:
    async with gateway.client() as client:
        response = await client.post("/v1/chat/completions", content=body, headers=JSON)
    assert "JSON" in error_of(response, 400)["message"]


@pytest.mark.parametrize("body", [b"[]", b"3", b"null", b'"text"'])
async def test_json_that_is_not_an_object_is_reported_as_such(gateway: FakedGateway, body: bytes) -> None:
    async with gateway.client() as client:
        response = await client.post("/v1/chat/completions", content=body, headers=JSON)
    assert "object" in error_of(response, 400)["message"]


async def test_json_too_deep_to_pass_on_is_refused(gateway: FakedGateway) -> None:
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"a": deep}
    error = error_of(await gateway.chat(chat_template_kwargs=deep), 400)
    assert error["param"] == "chat_template_kwargs"


async def test_nul_inside_a_prompt_is_text_like_any_other(gateway: FakedGateway) -> None:
    assert (await gateway.complete(prompt="a\u0000b")).status_code == 200
    assert gateway.pipeline.submitted[0].prompt == "a\u0000b"


async def test_unknown_model_is_404(gateway: FakedGateway) -> None:
    for response in (await gateway.chat(model="gpt-4"), await gateway.complete(model="gpt-4")):
        error = error_of(response, 404)
        assert error["code"] == "model_not_found"
        assert error["param"] == "model"
        assert "tiny" in error["message"]


async def test_form_content_type_is_unsupported(gateway: FakedGateway) -> None:
    async with gateway.client() as client:
        response = await client.post("/v1/completions", data={"model": "tiny"})
    assert error_of(response, 415)["code"] == "unsupported_media_type"


async def test_a_foreign_page_must_send_a_content_type_that_forces_a_preflight(gateway: FakedGateway) -> None:
    body = b'{"model": "tiny", "prompt": "x"}'
    async with gateway.client() as client:
        for origin, status in (({}, 200), ({"origin": "http://elsewhere.example"}, 415)):
            assert (await client.post("/v1/completions", content=body, headers=origin)).status_code == status
        preflight = await client.options("/v1/completions", headers={"origin": "http://elsewhere.example"})
    assert "access-control-allow-origin" not in preflight.headers


async def test_compressed_body_is_unsupported(gateway: FakedGateway) -> None:
    async with gateway.client() as client:
        response = await client.post("/v1/completions", content=b"x", headers={**JSON, "content-encoding": "gzip"})
    assert "gzip" in error_of(response, 415)["message"]


async def test_unknown_path_and_method_have_the_same_shape(gateway: FakedGateway) -> None:
    assert error_of(await gateway.get("/v1/nothing"), 404)["code"] == "unknown_url"
    response = await gateway.get("/v1/chat/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


async def test_body_over_the_limit_is_413_by_its_announced_length() -> None:
    gateway = gateway_saying("x", max_body_bytes=1024)
    error = error_of(await gateway.complete(prompt="x" * 2000), 413)
    assert "1024 bytes" in error["message"]


async def test_body_over_the_limit_is_413_while_it_streams_in() -> None:
    gateway = gateway_saying("x", max_body_bytes=1024)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 100

    async with gateway.client() as client:
        response = await client.post("/v1/completions", content=chunks(), headers=JSON)
    error_of(response, 413)


async def test_body_of_exactly_the_limit_is_accepted() -> None:
    gateway = gateway_saying("x", max_body_bytes=1024)
    body = b'{"model":"tiny","prompt":"'
    body += b"x" * (1024 - len(body) - 2) + b'"}'
    async with gateway.client() as client:
        response = await client.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == 200

"""Embeddings as clients of Cohere, Jina and Text Embeddings Inference ask for them."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from common.deltas import Delta, PromptUsage
from common.requests import PooledText, Truncation
from common.types import Admission, Finish, FinishReason, Pooling
from tests.fakes.pipeline import CARD
from tests.gateway.support import FakedGateway, error_of, faked

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.requests import GenerateRequest
    from tests.fakes.pipeline import Event

PROMPTS = {"query": "Instruct: find\nQuery:", "passage": "passage: ", "clustering": "cluster: "}
# Of length 2.
VECTOR = np.array([0.8, -1.6, 0.0, 0.4, 0.4, 0.4, -0.4, 0.4], np.float32)


def embeds(request: GenerateRequest) -> Iterable[Event]:
    yield Admission(request.request_id, 5)
    finish = Finish(FinishReason.STOP, embedding=VECTOR.astype("<f4").tobytes())
    yield Delta(request.request_id, 0, 0, (), "", prompt_usage=PromptUsage(5, 2), finish=finish)


def gateway(**card: Any) -> FakedGateway:
    made = faked(embeds)
    fields = {"only_embeds": True, "embedding_dimensions": 8, "prompts": PROMPTS, **card}
    made.model.card = replace(CARD, **fields)
    return made


async def ask(path: str, body: dict[str, Any], **card: Any) -> tuple[Any, list[GenerateRequest]]:
    made = gateway(**card)
    response = await made.post(path, {"model": "tiny", **body})
    assert response.status_code == 200, response.text
    return response.json(), made.pipeline.submitted


LENGTH = float(np.linalg.norm(VECTOR))


async def test_cohere_gets_each_type_that_it_asks_for() -> None:
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    body = {"texts": ["a", "b"], "input_type": "search_document", "embedding_types": types}
    answer, requests = await ask("/v2/embed", body)
    found = answer["embeddings"]
    assert sorted(found) == sorted(types)
    assert all(len(vectors) == 2 for vectors in found.values())
    np.testing.assert_allclose(found["float"][0], VECTOR / LENGTH, rtol=1e-6)
    assert found["int8"][0] == [64, -127, 0, 32, 32, 32, -32, 32]
    assert found["uint8"][0] == [192, 1, 128, 160, 160, 160, 96, 160]
    assert found["ubinary"][0] == [0b10011101]
    assert found["binary"][0] == [0b10011101 - 128]
    decoded = np.frombuffer(base64.b64decode(found["base64"][1]), "<f4")
    np.testing.assert_allclose(decoded, VECTOR / LENGTH, rtol=1e-6)
    assert (answer["texts"], answer["meta"]["billed_units"]) == (["a", "b"], {"input_tokens": 10})
    assert answer["response_type"] == "embeddings_by_type"
    # Cohere cuts what is too long unless the request says otherwise.
    cut = Truncation(2048)
    assert [request.prompt for request in requests] == [
        PooledText("passage: a", truncation=cut), PooledText("passage: b", truncation=cut),
    ]  # fmt: skip


async def test_cohere_s_inputs_dimension_and_limits_are_honoured() -> None:
    inputs = [{"content": [{"type": "text", "text": "a"}]}]
    body = {"inputs": inputs, "output_dimension": 2, "max_tokens": 9, "truncate": "START", "input_type": "search_query"}
    answer, (request,) = await ask("/v2/embed", body)
    np.testing.assert_allclose(answer["embeddings"]["float"], [VECTOR[:2] / np.linalg.norm(VECTOR[:2])], rtol=1e-6)
    assert request.prompt == PooledText("Instruct: find\nQuery:a", truncation=Truncation(9, drop_beginning=True))
    assert request.prompt_name == "inputs"
    _, (request,) = await ask("/v2/embed", {"texts": ["a"], "truncate": "NONE"})
    assert request.prompt == "a"


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("texts", {}),
        ("texts", {"texts": ["a"], "inputs": [{"content": [{"type": "text", "text": "a"}]}]}),
        ("texts", {"texts": ["a"] * 2049}),
        ("inputs", {"inputs": [{"content": [{"type": "image_url", "image_url": {}}]}]}),
        ("inputs", {"inputs": [{"content": [{"type": "text"}]}]}),
        ("inputs", {"inputs": ["a"]}),
        ("images", {"images": ["data:"]}),
        ("embedding_types", {"texts": ["a"], "embedding_types": ["float16"]}),
        ("output_dimension", {"texts": ["a"], "output_dimension": 9}),
        ("truncate", {"texts": ["a"], "truncate": "MIDDLE"}),
        ("prompt_name", {"texts": ["a"], "prompt_name": "unknown"}),
    ],
)
async def test_errors_have_the_message_that_cohere_s_clients_read(param: str, body: dict[str, Any]) -> None:
    response = await gateway().post("/v2/embed", {"model": "tiny", **body})
    error = error_of(response, 400)
    assert (error["param"] or "").partition("[")[0] == param
    assert response.json()["message"] == error["message"]


async def test_an_unknown_prompt_is_refused_with_the_known_ones() -> None:
    error = error_of(await gateway().post("/v1/embeddings", {"model": "tiny", "input": "a", "prompt_name": "q"}), 400)
    assert "'query', 'passage', 'clustering'" in error["message"]
    error = error_of(
        await gateway().post("/v1/embeddings", {"model": "tiny", "input": [1], "prompt_name": "query"}), 400
    )
    assert error["param"] == "prompt_name"


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "a"),
        ({"prompt_name": "query"}, "Instruct: find\nQuery:a"),
        ({"input_type": "query"}, "Instruct: find\nQuery:a"),
        ({"task": "retrieval.query"}, "Instruct: find\nQuery:a"),
        ({"task": "retrieval.passage"}, "passage: a"),
        ({"task": "separation"}, "cluster: a"),
        ({"task": "text-matching"}, "a"),
    ],
)
async def test_the_prompt_of_a_use_is_put_before_the_text(fields: dict[str, Any], prompt: str) -> None:
    _, (request,) = await ask("/v1/embeddings", {"input": "a", **fields})
    assert request.prompt == prompt


async def test_a_default_prompt_is_for_requests_that_name_no_use() -> None:
    for fields, prompt in (
        ({}, "passage: a"),
        ({"task": "text-matching"}, "a"),
        ({"prompt_name": "clustering"}, "cluster: a"),
    ):
        _, (request,) = await ask("/v1/embeddings", {"input": "a", **fields}, default_prompt="passage")
        assert request.prompt == prompt


async def test_jina_s_fields_are_honoured() -> None:
    body = {"input": [{"text": "a"}, "b"], "embedding_type": ["ubinary"], "truncate": True, "late_chunking": False}
    answer, requests = await ask("/v1/embeddings", body)
    assert [entry["embedding"] for entry in answer["data"]] == [[0b10011101]] * 2
    assert [request.prompt for request in requests] == [
        PooledText(text, truncation=Truncation(2048)) for text in ("a", "b")
    ]
    answer, _ = await ask("/v1/embeddings", {"input": "a", "normalized": False, "dimensions": 2})
    np.testing.assert_allclose(answer["data"][0]["embedding"], VECTOR[:2], rtol=1e-6)
    error = error_of(
        await gateway().post("/v1/embeddings", {"model": "tiny", "input": "a", "late_chunking": True}), 400
    )
    assert error["param"] == "late_chunking"


async def test_reranking_by_embeddings_uses_the_prompts_of_queries_and_documents() -> None:
    body = {"query": "q", "documents": ["d"], "max_tokens_per_doc": 9}
    answer, requests = await ask("/v1/rerank", body)
    assert answer["results"][0]["relevance_score"] == pytest.approx(1)
    assert [request.prompt for request in requests] == [
        "Instruct: find\nQuery:q", PooledText("passage: d", truncation=Truncation(9)),
    ]  # fmt: skip
    error = error_of(await gateway().post("/v1/rerank", {**body, "instruction": "x"}), 400)
    assert error["param"] == "instruction"


async def test_text_embeddings_inference_returns_vectors_alone() -> None:
    answer, requests = await ask("/embed", {"inputs": ["a", "b"], "prompt_name": "passage"})
    np.testing.assert_allclose(answer, [VECTOR / LENGTH] * 2, rtol=1e-6)
    assert [request.prompt for request in requests] == ["passage: a", "passage: b"]
    assert requests[0].options.pooling is Pooling.LAST
    body = {"inputs": "a", "normalize": False, "dimensions": 3, "truncate": True, "truncation_direction": "Left"}
    answer, (request,) = await ask("/embed", body)
    np.testing.assert_allclose(answer, [VECTOR[:3]], rtol=1e-6)
    assert request.prompt == PooledText("a", truncation=Truncation(2048, drop_beginning=True))


async def test_a_model_for_embeddings_refuses_generation() -> None:
    response = await gateway().post("/v1/completions", {"model": "tiny", "prompt": "x"})
    assert "generates nothing; it embeds, at /v1/embeddings" in error_of(response, 400)["message"]
    (model,) = (await gateway().get("/v1/models")).json()["data"]
    assert (model["kind"], model["tasks"]) == ("embed", ["embed", "score"])


async def test_zero_vectors_have_no_length_and_no_bytes() -> None:
    from gateway.endpoints.embeddings.render import normalized, written

    zeros = np.zeros(8, np.float32)
    assert normalized(zeros).tolist() == [0.0] * 8
    assert np.array(written(zeros, "int8")).tolist() == [0] * 8
    assert np.array(written(zeros, "uint8")).tolist() == [128] * 8

"""/v1/embeddings, /v1/score and /v1/rerank over a pipeline that embeds texts as it is told."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
from openai import Omit, omit
from openai.types import CreateEmbeddingResponse

from common.deltas import Delta, PromptUsage
from common.requests import TokenPrompt
from common.types import (
    Admission,
    CacheMode,
    ErrorCode,
    Finish,
    FinishReason,
    Pooling,
    RequestFailure,
    RequestId,
)
from gateway.generation.generations import EMBEDDING_WINDOW
from tests.fakes.pipeline import CARD, rejects
from tests.gateway.support import FakedGateway, error_of, faked
from tests.gateway.test_openai_sdk import sdk

if TYPE_CHECKING:
    from collections.abc import Iterable

    import httpx

    from common.requests import GenerateRequest
    from tests.fakes.pipeline import Event

DIMENSIONS = 4
ENCODER = replace(CARD, is_encoder=True, pooling=Pooling.MEAN, embedding_dimensions=DIMENSIONS)
# Each of length 1.
VECTORS = {
    "cat": [0.6, 0.8, 0.0, 0.0],
    "kitten": [0.8, 0.6, 0.0, 0.0],
    "car": [0.0, 0.6, 0.8, 0.0],
    "anti-cat": [-0.6, -0.8, 0.0, 0.0],
}


def embedding_of(prompt: object) -> bytes:
    text = prompt if isinstance(prompt, str) else "cat"
    return np.array(VECTORS.get(text, [0.0, 0.0, 0.0, 1.0]), "<f4").tobytes()


def embeds(request: GenerateRequest) -> Iterable[Event]:
    yield Admission(request.request_id, 5)
    finish = Finish(FinishReason.STOP, embedding=embedding_of(request.prompt))
    yield Delta(request.request_id, 0, 0, (), "", prompt_usage=PromptUsage(5, 2), finish=finish)


def gateway(script: Any = embeds, **settings: Any) -> FakedGateway:
    made = faked(script, **settings)
    made.model.card = ENCODER
    return made


async def ask(path: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[GenerateRequest]]:
    made = gateway()
    response = await made.post(path, {"model": "tiny", **body})
    assert response.status_code == 200, response.text
    assert len(made.journal) == 0
    answer: dict[str, Any] = response.json()
    return answer, made.pipeline.submitted


async def test_an_answer_is_as_openai_sends_it() -> None:
    answer, (request,) = await ask("/v1/embeddings", {"input": "cat"})
    CreateEmbeddingResponse.model_validate(answer, strict=True)
    assert answer == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.6, 0.8, 0.0, 0.0]}],
        "model": "tiny",
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }
    assert (request.prompt, request.prompt_name) == ("cat", "input")
    assert (request.options.pooling, request.options.n) == (Pooling.MEAN, 1)


async def test_several_inputs_keep_their_order_and_count_together() -> None:
    answer, requests = await ask("/v1/embeddings", {"input": ["car", "cat", "car"]})
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2]
    assert [entry["embedding"] for entry in answer["data"]] == [VECTORS[text] for text in ("car", "cat", "car")]
    assert answer["usage"] == {"prompt_tokens": 15, "total_tokens": 15}
    assert len({request.request_id for request in requests}) == 3


@pytest.mark.parametrize(("given", "prompts"), [([7, 8], [(7, 8)]), ([[7], [8, 9]], [(7,), (8, 9)])])
async def test_token_ids_are_taken_as_they_are(given: Any, prompts: list[tuple[int, ...]]) -> None:
    _, requests = await ask("/v1/embeddings", {"input": given})
    assert [request.prompt for request in requests] == [TokenPrompt(ids) for ids in prompts]


async def test_base64_is_little_endian_float32() -> None:
    answer, _ = await ask("/v1/embeddings", {"input": ["cat", "car"], "encoding_format": "base64"})
    decoded = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in answer["data"]]
    np.testing.assert_array_equal(decoded, np.array([VECTORS["cat"], VECTORS["car"]], np.float32))


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_the_openai_client_sees_the_same_either_way(encoding: Literal["float", "base64"]) -> None:
    async with sdk(gateway()) as client:
        # Left out, the client asks for base64 and decodes it.
        chosen: Literal["float"] | Omit = omit if encoding == "base64" else "float"
        answer = await client.embeddings.create(model="tiny", input=["cat", "car"], encoding_format=chosen)
    assert answer.data[1].embedding == pytest.approx(VECTORS["car"])
    assert answer.usage.prompt_tokens == 10


async def test_fewer_dimensions_are_the_first_ones_at_length_one() -> None:
    answer, _ = await ask("/v1/embeddings", {"input": ["cat", "unknown"], "dimensions": 1})
    # What has nothing there stays nothing.
    assert [entry["embedding"] for entry in answer["data"]] == [[1.0], [0.0]]
    answer, _ = await ask("/v1/embeddings", {"input": "cat", "dimensions": DIMENSIONS})
    assert answer["data"][0]["embedding"] == VECTORS["cat"]


async def test_pooling_cache_mode_and_names_reach_the_pipeline() -> None:
    body = {"input": "cat", "pooling": "cls", "cache_mode": "none", "user": "ann", "session_id": "s", "priority": 3}
    _, (request,) = await ask("/v1/embeddings", body)
    assert request.options.pooling is Pooling.FIRST
    assert request.options.cache_mode is CacheMode.NONE
    assert request.view.salt == "user=ann"
    assert (request.options.session, request.options.priority) == ("s", 3)


@pytest.mark.parametrize(
    ("path", "param", "body"),
    [
        ("/v1/embeddings", "model", {"model": None, "input": "x"}),
        ("/v1/embeddings", "input", {}),
        ("/v1/embeddings", "input", {"input": None}),
        ("/v1/embeddings", "input", {"input": []}),
        ("/v1/embeddings", "input", {"input": [[]]}),
        ("/v1/embeddings", "input", {"input": ["x", 1]}),
        ("/v1/embeddings", "input", {"input": [-1]}),
        ("/v1/embeddings", "input", {"input": {"text": "x"}}),
        ("/v1/embeddings", "input", {"input": ["x"] * 2049}),
        ("/v1/embeddings", "encoding_format", {"input": "x", "encoding_format": "int8"}),
        ("/v1/embeddings", "dimensions", {"input": "x", "dimensions": 0}),
        ("/v1/embeddings", "dimensions", {"input": "x", "dimensions": 5}),
        ("/v1/embeddings", "dimensions", {"input": "x", "dimensions": True}),
        ("/v1/embeddings", "pooling", {"input": "x", "pooling": "max"}),
        ("/v1/embeddings", "user", {"input": "x", "user": 1}),
        ("/v1/score", "text_1", {"text_2": "x"}),
        ("/v1/score", "text_1", {"text_1": ["x", "y"], "text_2": ["x", "y", "z"]}),
        ("/v1/score", "text_1", {"text_1": ["x", "y"], "text_2": "z"}),
        ("/v1/score", "text_2", {"text_1": "x", "text_2": []}),
        ("/v1/score", "text_2", {"text_1": "x", "text_2": [1]}),
        ("/v1/score", "text_2", {"text_1": "x", "text_2": ["x"] * 2048}),
        ("/v1/rerank", "query", {"documents": ["x"]}),
        ("/v1/rerank", "query", {"query": {"image": "x"}, "documents": ["x"]}),
        ("/v1/rerank", "documents", {"query": "x", "documents": []}),
        ("/v1/rerank", "documents", {"query": "x", "documents": "x"}),
        ("/v1/rerank", "documents", {"query": "x", "documents": [{"title": "x"}]}),
        ("/v1/rerank", "documents", {"query": "x", "documents": ["x"] * 2048}),
        ("/v1/rerank", "top_n", {"query": "x", "documents": ["x"], "top_n": 0}),
    ],
)
async def test_invalid_fields_of_embedding_requests_are_refused_by_name(
    path: str, param: str, body: dict[str, Any]
) -> None:
    made = gateway()
    error = error_of(await made.post(path, {"model": "tiny", **body}), 400)
    assert (error["param"] or "").partition("[")[0] == param
    assert not made.pipeline.submitted


async def test_a_refused_text_fails_the_request_and_aborts_the_others() -> None:
    made = gateway(None)
    asking = asyncio.create_task(made.post("/v1/embeddings", {"model": "tiny", "input": ["cat", "long"]}))
    first, second = await made.pipeline.submissions(2)
    failure = RequestFailure(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long", "input")
    made.pipeline.tell(Admission(second.request_id, 0, failure))
    error = error_of(await asking, 400)
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert made.pipeline.aborted == [first.request_id]


async def test_a_full_queue_is_a_429_with_retry_after() -> None:
    failure = RequestFailure(ErrorCode.QUEUE_FULL, "full", retryable=True, retry_after_ms=1000)
    made = gateway(rejects(failure))
    response = await made.post("/v1/embeddings", {"model": "tiny", "input": "cat"})
    assert error_of(response, 429)["code"] == "rate_limit_exceeded"
    assert response.headers["retry-after"] == "1"


async def test_thousands_of_inputs_go_round_a_few_at_a_time() -> None:
    made = gateway(None)
    count = EMBEDDING_WINDOW + 40
    asking = asyncio.create_task(made.post("/v1/embeddings", {"model": "tiny", "input": ["cat"] * count}))
    await made.pipeline.submissions(EMBEDDING_WINDOW)
    await asyncio.sleep(0.01)
    assert len(made.pipeline.submitted) == EMBEDDING_WINDOW
    for number in range(count):
        (request, *_) = (await made.pipeline.submissions(number + 1))[number:]
        for event in embeds(request):
            made.pipeline.tell(event)
    answer = (await asking).json()
    assert len(answer["data"]) == count
    assert answer["usage"]["prompt_tokens"] == 5 * count


async def test_an_input_lost_with_a_service_is_submitted_again() -> None:
    made = gateway(None)
    asking = asyncio.create_task(made.post("/v1/embeddings", {"model": "tiny", "input": "cat"}))
    (first,) = await made.pipeline.submissions(1)
    made.pipeline.tell(Admission(first.request_id, 5))
    made.pipeline.lose(first.request_id, RequestFailure(ErrorCode.UNAVAILABLE, "gone", retryable=True))
    _, again = await made.pipeline.submissions(2)
    assert again.request_id != first.request_id
    assert (again.prompt, again.options.pooling, again.options.resume) == ("cat", Pooling.MEAN, None)
    for event in embeds(again):
        made.pipeline.tell(event)
    assert (await asking).json()["data"][0]["embedding"] == VECTORS["cat"]


async def test_one_text_is_scored_against_many() -> None:
    answer, requests = await ask("/v1/score", {"text_1": "cat", "text_2": ["kitten", "car", "anti-cat"]})
    assert [request.prompt_name for request in requests] == ["text_1", "text_2", "text_2", "text_2"]
    assert answer["object"] == "list"
    assert answer["model"] == "tiny"
    assert answer["id"].startswith("score-")
    assert [(entry["index"], entry["object"]) for entry in answer["data"]] == [(i, "score") for i in range(3)]
    assert [entry["score"] for entry in answer["data"]] == pytest.approx([0.96, 0.48, -1.0])
    assert answer["usage"] == {"prompt_tokens": 20, "total_tokens": 20}


async def test_pairs_are_scored_pair_by_pair() -> None:
    answer, _ = await ask("/score", {"text_1": ["cat", "car"], "text_2": ["cat", "kitten"]})
    assert [entry["score"] for entry in answer["data"]] == pytest.approx([1.0, 0.36])


async def test_documents_come_in_the_order_of_their_relevance() -> None:
    documents = ["car", "cat", {"text": "anti-cat"}, "kitten", "cat"]
    answer, requests = await ask("/v1/rerank", {"query": "cat", "documents": documents})
    assert [request.prompt_name for request in requests] == ["query", *["documents"] * 5]
    assert [result["index"] for result in answer["results"]] == [1, 4, 3, 0, 2]
    assert [result["relevance_score"] for result in answer["results"]] == pytest.approx([1, 1, 0.96, 0.48, -1])
    assert answer["results"][0]["document"] == {"text": "cat"}
    assert answer["usage"] == {"prompt_tokens": 30, "total_tokens": 30}
    assert answer["id"].startswith("rerank-")


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_rerank_returns_only_the_top_n_and_omits_texts_on_request(path: str) -> None:
    body = {"query": "cat", "documents": ["car", "kitten"], "top_n": 1, "return_documents": False}
    answer, _ = await ask(path, body)
    (result,) = answer["results"]
    assert result.keys() == {"index", "relevance_score"}
    assert result["index"] == 1


async def test_top_n_may_exceed_the_number_of_documents() -> None:
    answer, _ = await ask("/v1/rerank", {"query": "cat", "documents": ["car"], "top_n": 9})
    assert len(answer["results"]) == 1


async def test_score_and_rerank_need_no_model_where_there_is_one() -> None:
    made = gateway()
    response: httpx.Response = await made.post("/v1/score", {"text_1": "cat", "text_2": "cat"})
    assert response.json()["model"] == "tiny"


async def test_a_client_that_leaves_has_all_its_inputs_aborted() -> None:
    made = gateway(None)
    asking = asyncio.create_task(made.post("/v1/embeddings", {"model": "tiny", "input": ["cat", "car"]}))
    requests = await made.pipeline.submissions(2)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert set(made.pipeline.aborted) == {RequestId(request.request_id) for request in requests}
    assert len(made.journal) == 0

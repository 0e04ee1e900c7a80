"""No request body makes the gateway fail."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.heads import Head, HeadActivation
from common.types import Pooling, ReplyTo, SubscriberId
from gateway.endpoints.chat.schema import ChatCompletionBody
from gateway.endpoints.classification.schema import ClassifyBody, PoolingBody, TeiPredictBody
from gateway.endpoints.completions.schema import CompletionBody
from gateway.endpoints.embeddings.schema import CohereEmbedBody, EmbeddingBody, TeiEmbedBody
from gateway.endpoints.scoring.schema import RerankBody, ScoreBody, TeiRerankBody
from gateway.pipeline.wire import generate_to_wire
from tests.examples import examples
from tests.fakes.pipeline import CARD
from tests.gateway.support import HELLO, FakedGateway, error_of, gateway_saying

if TYPE_CHECKING:
    import httpx

    from gateway.endpoints.schema import Schema

CHAT_FIELDS = [*sorted(ChatCompletionBody.model_fields), "response_format", "tool_choice", "functions", "best_of"]
COMPLETION_FIELDS = [*sorted(CompletionBody.model_fields), "suffix", "best_of", "response_format"]

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 1, 2**31, 2**32, 2**63, 2**64, 10**30, -(2**70)]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=10),
    st.sampled_from(["text", "user", "assistant", "function", "none", "\x00", "1", "9" * 400]),
)
KEYS = st.one_of(
    st.sampled_from(["role", "content", "type", "text", "function", "name", "arguments", "include_usage", "1"]),
    st.text(max_size=5),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def bodies(fields: list[str], base: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    changed = st.dictionaries(st.sampled_from(fields), VALUES, max_size=4)
    return changed.map(lambda fields: {**base, **fields})


@pytest.fixture(scope="module")
def gateway() -> FakedGateway:
    return gateway_saying("x")


@pytest.fixture(scope="module")
def classifier() -> FakedGateway:
    made = gateway_saying("x")
    # The pipeline of these tests returns two numbers.
    made.model.card = replace(CARD, head=Head(Pooling.CLASSIFY, ("a", "b"), HeadActivation.SOFTMAX))
    return made


@examples(75)
@given(bodies(CHAT_FIELDS, {"model": "tiny", "messages": HELLO}))
async def test_no_chat_body_is_a_server_error(gateway: FakedGateway, body: dict[str, Any]) -> None:
    await _check(gateway, "/v1/chat/completions", body)


@examples(75)
@given(bodies(COMPLETION_FIELDS, {"model": "tiny", "prompt": "Hello"}))
async def test_no_completion_body_is_a_server_error(gateway: FakedGateway, body: dict[str, Any]) -> None:
    await _check(gateway, "/v1/completions", body)


EMBEDDERS: dict[str, tuple[type[Schema], dict[str, Any]]] = {
    "/v1/embeddings": (EmbeddingBody, {"model": "tiny", "input": "Hello"}),
    "/v1/score": (ScoreBody, {"text_1": "Hello", "text_2": "world"}),
    "/v1/rerank": (RerankBody, {"query": "Hello", "documents": ["world"]}),
    "/rerank": (TeiRerankBody, {"query": "Hello", "texts": ["world"]}),
    "/v2/embed": (CohereEmbedBody, {"model": "tiny", "texts": ["Hello"]}),
    "/embed": (TeiEmbedBody, {"inputs": "Hello"}),
    "/pooling": (PoolingBody, {"input": "Hello"}),
    "/v1/classify": (ClassifyBody, {"input": "Hello"}),
    "/predict": (TeiPredictBody, {"inputs": "Hello"}),
}


@pytest.mark.parametrize("path", EMBEDDERS)
@examples(75)
@given(data=st.data())
async def test_no_body_sent_to_an_embedding_endpoint_causes_a_server_error(
    gateway: FakedGateway, classifier: FakedGateway, path: str, data: st.DataObject
) -> None:
    schema, good = EMBEDDERS[path]
    used = classifier if path in ("/v1/classify", "/predict") else gateway
    await _check(used, path, data.draw(bodies(sorted(schema.model_fields), good)))


@examples(75)
@given(st.sampled_from(["/tokenize", "/detokenize"]), st.dictionaries(KEYS | st.just("prompt"), VALUES, max_size=4))
async def test_no_tokenization_body_is_a_server_error(gateway: FakedGateway, path: str, body: dict[str, Any]) -> None:
    await _check(gateway, path, body)


@examples(75)
@given(st.binary(max_size=200))
async def test_no_bytes_are_a_server_error(gateway: FakedGateway, content: bytes) -> None:
    async with gateway.client() as client:
        response = await client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400


async def _check(gateway: FakedGateway, path: str, body: dict[str, Any]) -> None:
    content = json.dumps(body)
    async with gateway.client() as client:
        response = await client.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404), response.text
    # What is accepted can also be sent: no value overflows its type on the wire.
    for request in gateway.pipeline.submitted:
        generate_to_wire(request, ReplyTo(SubscriberId("test")))
    gateway.pipeline.submitted.clear()
    if response.status_code != 200:
        _check_error(response)


def _check_error(response: httpx.Response) -> None:
    assert error_of(response, response.status_code)["message"]

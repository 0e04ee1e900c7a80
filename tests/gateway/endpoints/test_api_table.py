"""The table in `gateway/API.md` says what is so."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as OpenAiChat
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as OpenAiCompletion
from openai.types.embedding_create_params import EmbeddingCreateParams as OpenAiEmbedding
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming as OpenAiResponse
from openai.types.shared_params.reasoning_effort import ReasoningEffort

from common.heads import Head, HeadActivation
from common.types import Pooling
from gateway.endpoints.chat.schema import ChatCompletionBody, Effort
from gateway.endpoints.classification.schema import (
    ClassifyBody,
    ClassifyChatBody,
    PoolingBody,
    PoolingChatBody,
    TeiPredictBody,
)
from gateway.endpoints.completions.schema import CompletionBody
from gateway.endpoints.embeddings.schema import CohereEmbedBody, EmbeddingBody, TeiEmbedBody
from gateway.endpoints.messages.schema import MessagesBody
from gateway.endpoints.native.schema import GenerateBody, NativeSampling
from gateway.endpoints.responses.schema import ResponseBody
from gateway.endpoints.scoring.schema import RerankBody, ScoreBody, TeiRerankBody
from tests.fakes.pipeline import CARD
from tests.gateway.support import HELLO, FakedGateway, error_of, gateway_saying

if TYPE_CHECKING:
    from gateway.endpoints.schema import Schema
    from gateway.pipeline.port import ModelInfo

# The pipeline of these tests returns two numbers.
CLASSIFIER = replace(CARD, head=Head(Pooling.CLASSIFY, ("a", "b"), HeadActivation.SOFTMAX))
TABLE = Path(__file__).parents[3] / "gateway" / "API.md"


@dataclass(frozen=True)
class Endpoint:
    path: str
    schema: type[Schema]
    good: dict[str, Any]
    official: frozenset[str] = frozenset()
    # Fields stand inside this one.
    inside: str | None = None
    card: ModelInfo = CARD

    def gateway(self) -> FakedGateway:
        return classifying() if self.card is CLASSIFIER else generating()

    def body(self, **fields: Any) -> dict[str, Any]:
        return {**self.good, self.inside: fields} if self.inside else {**self.good, **fields}


@cache
def generating() -> FakedGateway:
    """Return a gateway for all tests of this file: to build its routes takes longer than to ask it."""
    return gateway_saying("x")


@cache
def classifying() -> FakedGateway:
    made = gateway_saying("x")
    made.model.card = CLASSIFIER
    return made


ENDPOINTS = {
    "/v1/chat/completions": Endpoint(
        "/v1/chat/completions",
        ChatCompletionBody,
        {"model": "tiny", "messages": HELLO},
        frozenset(OpenAiChat.__annotations__),
    ),
    "/v1/completions": Endpoint(
        "/v1/completions",
        CompletionBody,
        {"model": "tiny", "prompt": "x"},
        frozenset(OpenAiCompletion.__annotations__),
    ),
    "/v1/responses": Endpoint(
        "/v1/responses",
        ResponseBody,
        {"model": "tiny", "input": "x"},
        frozenset(OpenAiResponse.__annotations__),
    ),
    "/v1/embeddings": Endpoint(
        "/v1/embeddings",
        EmbeddingBody,
        {"model": "tiny", "input": "x"},
        frozenset(OpenAiEmbedding.__annotations__),
    ),
    "/v2/embed": Endpoint("/v2/embed", CohereEmbedBody, {"model": "tiny", "texts": ["x"]}),
    "/embed": Endpoint("/embed", TeiEmbedBody, {"inputs": "x"}),
    "/v1/score": Endpoint("/v1/score", ScoreBody, {"text_1": "x", "text_2": "y"}),
    "/v1/rerank": Endpoint("/v1/rerank", RerankBody, {"query": "x", "documents": ["y"]}),
    "/rerank: texts": Endpoint("/rerank", TeiRerankBody, {"query": "x", "texts": ["y"]}),
    "/v1/classify": Endpoint("/v1/classify", ClassifyBody, {"input": "x"}, card=CLASSIFIER),
    "/v1/classify: messages": Endpoint("/v1/classify", ClassifyChatBody, {"messages": HELLO}, card=CLASSIFIER),
    "/pooling": Endpoint("/pooling", PoolingBody, {"input": "x"}),
    "/pooling: messages": Endpoint("/pooling", PoolingChatBody, {"messages": HELLO}),
    "/predict": Endpoint("/predict", TeiPredictBody, {"inputs": "x"}, card=CLASSIFIER),
    "/v1/messages": Endpoint("/v1/messages", MessagesBody, {"model": "tiny", "max_tokens": 2, "messages": HELLO}),
    "/generate": Endpoint("/generate", GenerateBody, {"text": "x"}),
    "/generate: sampling_params": Endpoint("/generate", NativeSampling, {"text": "x"}, inside="sampling_params"),
}
# Fields of requests to SGLang and vLLM as their sources had them in 2026, by endpoint and where they stand.
OTHER_SERVERS: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("other_servers.json").read_text())
# A value that would change the answer, where 1 would not.
PROBES: dict[str, Any] = {
    "/v1/chat/completions add_special_tokens": True,
    "response_format": {"type": "json_object"},
    "modalities": ["audio"],
    "function_call": {"name": "f"},
    "add_special_tokens": False,
    "truncation": "auto",
    "thinking": {"type": "enabled"},
    "verbosity": "high",
    "best_of": 2,
    "include_reasoning": False,
    "stream_reasoning": False,
    "truncation_side": "right",
}


def rows() -> dict[str, list[frozenset[str]]]:
    found = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0].startswith("`/"):
            found[cells[0].strip("`")] = [frozenset(re.findall(r"`([^`]+)`", cell)) for cell in cells[1:]]
    return found


ROWS = rows()


def test_every_endpoint_has_its_row() -> None:
    assert ROWS.keys() == ENDPOINTS.keys()


@pytest.mark.parametrize("name", ENDPOINTS)
def test_table_rows_match_schemas_and_refusals(name: str) -> None:
    honoured, refused, ignored = ROWS[name]
    endpoint = ENDPOINTS[name]
    assert honoured == endpoint.schema.model_fields.keys()
    assert refused == {refusal.field for refusal in endpoint.schema.unsupported}
    assert not (ignored & (honoured | refused))


@pytest.mark.parametrize("name", [name for name, endpoint in ENDPOINTS.items() if endpoint.official])
def test_every_field_of_the_official_client_is_in_the_table(name: str) -> None:
    assert ENDPOINTS[name].official <= frozenset().union(*ROWS[name])


@pytest.mark.parametrize(
    ("name", "source"), [(name, source) for name in OTHER_SERVERS for source in OTHER_SERVERS[name]]
)
def test_every_field_of_sglang_and_vllm_is_in_the_table(name: str, source: str) -> None:
    fields = set(" ".join(OTHER_SERVERS[name][source]).split())
    assert fields <= frozenset().union(*ROWS[name])


def test_every_effort_of_the_official_client_is_known() -> None:
    assert set(get_args(Effort)) == set(get_args(get_args(ReasoningEffort)[0]))


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, row in ROWS.items() for field in sorted(row[1])])
async def test_refused_fields_are_named_in_the_error(name: str, field: str) -> None:
    endpoint = ENDPOINTS[name]
    response = await endpoint.gateway().post(
        endpoint.path, endpoint.body(**{field: PROBES.get(f"{name} {field}", PROBES.get(field, 1))})
    )
    error = error_of(response, 400)
    # Errors of Text Embeddings Inference have no field of this name.
    assert error["param"] == field or (error["param"] is None and f"'{field}'" in error["message"])


@pytest.mark.parametrize("name", ENDPOINTS)
async def test_ignored_fields_are_accepted_with_any_type(name: str) -> None:
    endpoint = ENDPOINTS[name]
    for value in (1, "x", ["x"], {"x": "y"}):
        response = await endpoint.gateway().post(
            endpoint.path, endpoint.body(**dict.fromkeys(ROWS[name][2], value), unknown=value)
        )
        assert response.status_code == 200, response.text


async def test_endpoints_listed_outside_the_table_exist() -> None:
    text = TABLE.read_text(encoding="utf-8").partition("Other endpoints:")[2]
    spelled = {re.sub(r"\{\w+\}", "{id}", path) for path in gateway_saying("x").app.openapi()["paths"]}
    assert set(re.findall(r"`(/[^`]+)`", text.partition("\n\n")[0])) <= spelled

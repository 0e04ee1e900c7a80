"""/v1/classify, /pooling, /v1/score and /v1/rerank over a pipeline with a classification head."""

from __future__ import annotations

import base64
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from common.deltas import Delta, PromptUsage
from common.heads import Head, HeadActivation
from common.requests import ChatMessage, ChatPrompt, PooledText, TokenPrompt, Truncation
from common.types import Admission, CacheMode, Finish, FinishReason, Pooling
from tests.fakes.pipeline import CARD
from tests.gateway.support import FakedGateway, error_of, faked

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.requests import GenerateRequest
    from tests.fakes.pipeline import Event

LABELS = ("negative", "neutral", "positive")
SENTIMENT = Head(Pooling.CLASSIFY, LABELS, HeadActivation.SOFTMAX)
RERANKER = Head(Pooling.CLASSIFY, ("LABEL_0",), HeadActivation.SIGMOID)
REWARD = Head(Pooling.CLASSIFY, ("LABEL_0",), HeadActivation.NONE)
ENTITIES = Head(Pooling.TOKEN_CLASSIFY, ("O", "PER"), HeadActivation.SOFTMAX)
# By the text or the second text of a pair.
OUTPUTS = {"bad": [2.0, 0.0, -1.0], "good": [-1.0, 0.0, 2.0], "near": [1.5], "far": [-1.5], "same": [1.5]}
HELLO = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


def classifies(head: Head) -> Any:
    def script(request: GenerateRequest) -> Iterable[Event]:
        yield Admission(request.request_id, 5)
        prompt = request.prompt
        text = (prompt.second or prompt.text) if isinstance(prompt, PooledText) else prompt
        rows = 3 if head.pooling is Pooling.TOKEN_CLASSIFY else 1
        known = OUTPUTS.get(text, []) if isinstance(text, str) else []
        values = known if len(known) == len(head.labels) else list(range(rows * len(head.labels)))
        finish = Finish(FinishReason.STOP, embedding=np.array(values, "<f4").tobytes())
        yield Delta(request.request_id, 0, 0, (), "", prompt_usage=PromptUsage(5, 2), finish=finish)

    return script


def gateway(head: Head, **settings: Any) -> FakedGateway:
    made = faked(classifies(head), **settings)
    made.model.card = replace(CARD, head=head)
    return made


async def ask(head: Head, path: str, body: dict[str, Any]) -> tuple[Any, list[GenerateRequest]]:
    made = gateway(head)
    response = await made.post(path, body)
    assert response.status_code == 200, response.text
    assert len(made.journal) == 0
    return response.json(), made.pipeline.submitted


def softmax(values: list[float]) -> list[float]:
    powers = [math.exp(value) for value in values]
    return [power / sum(powers) for power in powers]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
async def test_classes_are_as_vllm_sends_them(path: str) -> None:
    answer, requests = await ask(SENTIMENT, path, {"model": "tiny", "input": ["good", "bad"]})
    assert answer["id"].startswith("classify-")
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert [entry["label"] for entry in answer["data"]] == ["positive", "negative"]
    assert [(entry["index"], entry["num_classes"]) for entry in answer["data"]] == [(0, 3), (1, 3)]
    assert answer["data"][0]["probs"] == pytest.approx(softmax(OUTPUTS["good"]))
    assert answer["usage"] == {"prompt_tokens": 10, "total_tokens": 10, "completion_tokens": 0}
    assert [(request.prompt, request.prompt_name) for request in requests] == [("good", "input"), ("bad", "input")]
    assert {request.options.pooling for request in requests} == {Pooling.CLASSIFY}


@pytest.mark.parametrize("field", ["use_activation", "activation"])
async def test_a_head_s_outputs_are_returned_without_an_activation(field: str) -> None:
    answer, _ = await ask(SENTIMENT, "/v1/classify", {"input": "bad", field: False})
    assert answer["data"][0]["probs"] == OUTPUTS["bad"]


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (HeadActivation.SOFTMAX, softmax(OUTPUTS["bad"])),
        (HeadActivation.SIGMOID, [sigmoid(value) for value in OUTPUTS["bad"]]),
        (HeadActivation.NONE, OUTPUTS["bad"]),
    ],
)
async def test_each_activation_is_applied(activation: HeadActivation, expected: list[float]) -> None:
    answer, _ = await ask(replace(SENTIMENT, activation=activation), "/v1/classify", {"input": "bad"})
    assert answer["data"][0]["probs"] == pytest.approx(expected)


async def test_a_conversation_is_classified_without_the_beginning_of_an_answer() -> None:
    answer, (request,) = await ask(REWARD, "/v1/classify", {"messages": HELLO})
    assert answer["data"] == [{"index": 0, "label": "LABEL_0", "probs": [0.0], "num_classes": 1}]
    assert request.prompt == ChatPrompt(
        (ChatMessage("user", "Hello"), ChatMessage("assistant", "Hi")), add_generation_prompt=False
    )
    assert request.prompt_name == "messages"
    _, (request,) = await ask(REWARD, "/pooling", {"messages": HELLO, "add_generation_prompt": True})
    assert isinstance(request.prompt, ChatPrompt)
    assert request.prompt.add_generation_prompt


async def test_names_priorities_and_cache_modes_reach_the_pipeline() -> None:
    body = {"input": "x", "cache_mode": "none", "user": "ann", "session_id": "s", "priority": 3, "cache_salt": "salt"}
    for path in ("/v1/classify", "/pooling"):
        _, (request,) = await ask(SENTIMENT, path, body)
        assert request.options.cache_mode is CacheMode.NONE
        assert request.view.salt == "salt=salt&user=ann"
        assert (request.options.session, request.options.priority) == ("s", 3)


@pytest.mark.parametrize("path", ["/pooling", "/v1/pooling"])
async def test_pooling_returns_classes_as_vllm_does(path: str) -> None:
    answer, _ = await ask(SENTIMENT, path, {"input": "good"})
    assert answer["id"].startswith("pool-")
    assert answer["data"][0].keys() == {"index", "object", "data"}
    assert answer["data"][0]["object"] == "pooling"
    assert answer["data"][0]["data"] == pytest.approx(softmax(OUTPUTS["good"]))


async def test_pooling_returns_the_classes_of_each_token() -> None:
    answer, (request,) = await ask(ENTITIES, "/pooling", {"input": "x", "task": "token_classify"})
    assert request.options.pooling is Pooling.TOKEN_CLASSIFY
    assert answer["data"][0]["data"] == [pytest.approx(softmax([float(row), row + 1.0])) for row in (0, 2, 4)]
    body = {"input": "x", "encoding_format": "base64", "use_activation": False}
    answer, _ = await ask(ENTITIES, "/pooling", body)
    decoded = np.frombuffer(base64.b64decode(answer["data"][0]["data"]), "<f4")
    assert decoded.tolist() == [0, 1, 2, 3, 4, 5]


async def test_pooling_embeds_with_a_model_that_embeds() -> None:
    made = gateway(REWARD)
    made.model.card = replace(CARD, embedding_dimensions=1)
    answer = (await made.post("/pooling", {"input": [3, 4], "normalize": False})).json()
    assert answer["data"][0]["data"] == [0.0]
    (request,) = made.pipeline.submitted
    assert (request.prompt, request.options.pooling) == (TokenPrompt((3, 4)), Pooling.LAST)


@pytest.mark.parametrize(
    ("head", "path", "body", "words"),
    [
        (SENTIMENT, "/v1/chat/completions", {"messages": HELLO}, "generates nothing; it classifies texts, at /v1/cl"),
        (SENTIMENT, "/v1/completions", {"prompt": "x"}, "generates nothing"),
        (SENTIMENT, "/v1/embeddings", {"input": "x"}, "does not embed; it classifies texts, at /v1/classify"),
        (SENTIMENT, "/v1/score", {"text_1": "x", "text_2": "y"}, "does not score pairs"),
        (SENTIMENT, "/pooling", {"input": "x", "task": "token_classify"}, "does not classify tokens"),
        (ENTITIES, "/v1/classify", {"input": "x"}, "does not classify texts; it classifies tokens, at /pooling"),
        (ENTITIES, "/predict", {"inputs": "x"}, "does not classify texts"),
        (RERANKER, "/v2/embed", {"texts": ["x"]}, "it classifies texts, .*; scores pairs of texts, at /v1/score"),
        (None, "/v1/classify", {"input": "x"}, "does not classify texts; it generates, at /v1/chat"),
        (None, "/pooling", {"input": "x", "task": "classify"}, "does not classify texts; .*; embeds, at /v1/emb"),
    ],
)
async def test_a_task_that_the_model_lacks_is_refused_with_the_endpoints_that_it_serves(
    head: Head | None, path: str, body: dict[str, Any], words: str
) -> None:
    made = gateway(SENTIMENT)
    made.model.card = replace(CARD, head=head)
    error = error_of(await made.post(path, {"model": "tiny", **body}), 400)
    assert error["param"] in ("model", None)
    with pytest.raises(ValueError, match=words):
        raise ValueError(error["message"])
    assert not made.pipeline.submitted


@pytest.mark.parametrize(
    ("path", "param", "body"),
    [
        ("/v1/classify", "input", {}),
        ("/v1/classify", "input", {"input": []}),
        ("/v1/classify", "input", {"input": ["x"] * 2049}),
        ("/v1/classify", "input", {"input": "x", "messages": HELLO}),
        ("/v1/classify", "truncate", {"messages": HELLO, "truncate": True}),
        ("/v1/classify", "truncate_prompt_tokens", {"input": "x", "truncate_prompt_tokens": 4096}),
        ("/v1/classify", "truncate_prompt_tokens", {"input": "x", "truncate_prompt_tokens": -2}),
        ("/pooling", "task", {"input": "x", "task": "token_embed"}),
        ("/pooling", "dimensions", {"input": "x", "dimensions": 1}),
        ("/pooling", "normalize", {"input": "x", "normalize": False}),
        ("/pooling", "encoding_format", {"input": "x", "encoding_format": "bytes"}),
    ],
)
async def test_invalid_fields_of_classification_are_refused_by_name(
    path: str, param: str, body: dict[str, Any]
) -> None:
    made = gateway(SENTIMENT)
    error = error_of(await made.post(path, body), 400)
    assert (error["param"] or "").partition("[")[0] == param
    assert not made.pipeline.submitted


async def test_inputs_whose_outputs_would_not_fit_are_refused() -> None:
    made = gateway(replace(ENTITIES, labels=tuple(map(str, range(9)))))
    error = error_of(await made.post("/pooling", {"input": ["x" * 2048] * 1000}), 400)
    assert "send fewer at a time" in error["message"]
    assert not made.pipeline.submitted


async def test_pairs_are_scored_by_the_head() -> None:
    answer, requests = await ask(RERANKER, "/v1/score", {"text_1": "query", "text_2": ["near", "far"]})
    assert [entry["score"] for entry in answer["data"]] == pytest.approx([sigmoid(1.5), sigmoid(-1.5)])
    assert [request.prompt for request in requests] == [PooledText("query", "near"), PooledText("query", "far")]
    assert {(request.prompt_name, request.options.pooling) for request in requests} == {("text_2", Pooling.CLASSIFY)}
    assert answer["usage"] == {"prompt_tokens": 10, "total_tokens": 10}
    answer, requests = await ask(RERANKER, "/score", {"text_1": ["a", "b"], "text_2": ["near", "far"]})
    assert [request.prompt for request in requests] == [PooledText("a", "near"), PooledText("b", "far")]


@pytest.mark.parametrize("names", [("queries", "documents"), ("data_1", "data_2")])
async def test_vllm_s_other_names_of_the_texts_are_known(names: tuple[str, str]) -> None:
    _, requests = await ask(RERANKER, "/score", {names[0]: "query", names[1]: ["near"]})
    assert [request.prompt for request in requests] == [PooledText("query", "near")]


async def test_scores_have_the_activation_of_the_head_unless_it_is_turned_off() -> None:
    body = {"text_1": "query", "text_2": "far"}
    answer, _ = await ask(replace(RERANKER, score_activation=HeadActivation.NONE), "/v1/score", body)
    assert answer["data"][0]["score"] == -1.5
    answer, _ = await ask(RERANKER, "/v1/score", {**body, "use_activation": False})
    assert answer["data"][0]["score"] == -1.5


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_documents_are_ranked_by_the_head(path: str) -> None:
    documents = ["far", {"text": "near"}, "same"]
    answer, requests = await ask(RERANKER, path, {"query": {"text": "query"}, "documents": documents})
    assert [result["index"] for result in answer["results"]] == [1, 2, 0]
    assert [result["relevance_score"] for result in answer["results"]] == pytest.approx(
        [sigmoid(1.5), sigmoid(1.5), sigmoid(-1.5)]
    )
    assert answer["results"][0]["document"] == {"text": "near"}
    assert answer["meta"]["billed_units"] == {"search_units": 1}
    assert answer["usage"]["total_tokens"] == 15
    assert [request.prompt_name for request in requests] == ["documents"] * 3


async def test_instructions_and_limits_reach_the_pipeline() -> None:
    body = {
        "query": "query", "documents": ["near"], "instruction": "Find it", "max_tokens_per_doc": 7,
        "truncate_prompt_tokens": 100, "top_n": 1,
    }  # fmt: skip
    _, (request,) = await ask(RERANKER, "/v2/rerank", body)
    assert request.prompt == PooledText("query", "near", "Find it", 7, Truncation(100))


async def test_a_head_refuses_the_pooling_of_embeddings() -> None:
    made = gateway(RERANKER)
    error = error_of(await made.post("/v1/score", {"text_1": "a", "text_2": "b", "pooling": "mean"}), 400)
    assert error["param"] == "pooling"


@pytest.mark.parametrize(
    ("fields", "cut"),
    [
        ({}, None),
        ({"truncate": False}, None),
        ({"truncate": "NONE"}, None),
        ({"truncate": True}, Truncation(2048)),
        ({"truncate": "END"}, Truncation(2048)),
        ({"truncate": "START"}, Truncation(2048, drop_beginning=True)),
        ({"truncate": True, "truncation_side": "left"}, Truncation(2048, drop_beginning=True)),
        ({"truncate_prompt_tokens": -1}, Truncation(2048)),
        ({"truncate_prompt_tokens": 9}, Truncation(9)),
    ],
)
async def test_every_way_to_ask_for_truncation_is_understood(fields: dict[str, Any], cut: Truncation | None) -> None:
    _, (request,) = await ask(SENTIMENT, "/v1/classify", {"input": "good", **fields})
    assert request.prompt == ("good" if cut is None else PooledText("good", truncation=cut))


async def test_token_ids_are_cut_as_well() -> None:
    for side, ids in (("right", (1, 2)), ("left", (2, 3))):
        body = {"input": [1, 2, 3], "truncate_prompt_tokens": 2, "truncation_side": side}
        _, (request,) = await ask(SENTIMENT, "/pooling", body)
        assert request.prompt == TokenPrompt(ids)


async def test_models_state_their_tasks_and_labels() -> None:
    for head, tasks in (
        (SENTIMENT, ["classify"]),
        (RERANKER, ["classify", "score"]),
        (ENTITIES, ["token_classify"]),
    ):
        (model,) = (await gateway(head).get("/v1/models")).json()["data"]
        assert (model["kind"], model["tasks"], model["labels"]) == (tasks[0], tasks, list(head.labels))
    made = faked(None)
    (model,) = (await made.get("/v1/models")).json()["data"]
    assert (model["kind"], model["tasks"], model["labels"]) == ("generate", ["generate", "embed", "score"], None)


class TestTextEmbeddingsInference:
    """The requests of Hugging Face's clients, as the server's documentation has them."""

    async def test_a_text_is_predicted(self) -> None:
        answer, (request,) = await ask(SENTIMENT, "/predict", {"inputs": "good"})
        assert [entry["label"] for entry in answer] == ["positive", "neutral", "negative"]
        assert [entry["score"] for entry in answer] == pytest.approx(sorted(softmax(OUTPUTS["good"]), reverse=True))
        assert request.prompt == "good"

    @pytest.mark.parametrize(
        ("inputs", "prompts", "in_lists"),
        [
            (["a", "b"], [PooledText("a", "b")], False),
            (["a"], ["a"], False),
            ([["a"], ["b", "c"]], ["a", PooledText("b", "c")], True),
            ([["a"]], ["a"], True),
        ],
    )
    async def test_pairs_and_batches_are_predicted(
        self, inputs: Any, prompts: list[str | PooledText], in_lists: bool
    ) -> None:
        answer, requests = await ask(RERANKER, "/predict", {"inputs": inputs, "raw_scores": True})
        assert [request.prompt for request in requests] == prompts
        expected = [{"score": 0.0, "label": "LABEL_0"}]
        assert answer == ([expected] * len(prompts) if in_lists else expected)

    async def test_texts_are_reranked(self) -> None:
        body = {"query": "query", "texts": ["far", "near"]}
        answer, requests = await ask(RERANKER, "/rerank", body)
        assert [entry["index"] for entry in answer] == [1, 0]
        assert answer[0]["score"] == pytest.approx(sigmoid(1.5))
        assert answer[0].keys() == {"index", "score"}
        assert [request.prompt_name for request in requests] == ["texts"] * 2
        more = {"raw_scores": True, "return_text": True, "truncate": True, "truncation_direction": "Left"}
        answer, requests = await ask(RERANKER, "/rerank", {**body, **more})
        assert answer == [{"index": 1, "score": 1.5, "text": "near"}, {"index": 0, "score": -1.5, "text": "far"}]
        cut = Truncation(2048, drop_beginning=True)
        assert [request.prompt for request in requests] == [
            PooledText("query", "far", truncation=cut), PooledText("query", "near", truncation=cut),
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/predict", {"inputs": []}),
            ("/predict", {"inputs": [["a", "b", "c"]]}),
            ("/predict", {"inputs": ["a", "b", "c"]}),
            ("/predict", {"inputs": {"text": "a"}}),
            ("/rerank", {"query": "a", "texts": []}),
            ("/embed", {"inputs": ["a"], "truncation_direction": "up"}),
        ],
    )
    async def test_errors_are_those_of_its_api(self, path: str, body: dict[str, Any]) -> None:
        response = await gateway(RERANKER).post(path, body)
        assert response.status_code == 400
        assert response.json().keys() == {"error", "error_type"}
        assert response.json()["error_type"] == "validation"
        assert int(response.headers["content-length"]) == len(response.content)

    async def test_info_describes_the_model(self) -> None:
        info = (await gateway(SENTIMENT).get("/info")).json()
        assert (info["model_id"], info["max_input_length"]) == ("tiny", 2048)
        assert info["model_type"]["classifier"]["id2label"] == {"0": "negative", "1": "neutral", "2": "positive"}
        assert "reranker" in (await gateway(RERANKER).get("/info")).json()["model_type"]
        assert (await faked(None).get("/info")).json()["model_type"] == {"embedding": {"pooling": "last_token"}}

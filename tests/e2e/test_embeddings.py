"""Embeddings through all five services: of the bundled encoder against its reference, and of the served decoder."""

from __future__ import annotations

import base64
import json
import socket
import threading
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from openai import BadRequestError, NotFoundError

from common.models import resolve_model
from common.settings import GatewaySettings, ModelSettings, Settings
from tests.e2e.conftest import serve
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.e2e.served import Served

ENCODER = "all-minilm-l6-v2"
TEXTS = [
    "A man is eating food.",
    "A man eats pasta for lunch.",
    "The stock market fell sharply on Monday.",
    "Aktienkurse brachen am Montag ein – Ünïcode!",
    "word " * 200,
    "x",
]


@pytest.fixture(scope="module")
def encoder(run_root: Path) -> Iterator[Served]:
    yield from serve(
        Settings(model=ModelSettings(reference=ENCODER), gateway=GatewaySettings(port=0, anonymous="vouched")), run_root
    )


@pytest.fixture(scope="module")
def reference() -> NDArray[np.float32]:
    """What `transformers` computes in fp32: the mean of the last states over real tokens, at length 1."""
    import torch
    import transformers

    path = resolve_model(ENCODER).path
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    mask = batch["attention_mask"].unsqueeze(-1)
    with torch.inference_mode():
        states = model(**batch).last_hidden_state
    vectors: NDArray[np.float32] = torch.nn.functional.normalize((states * mask).sum(1), dim=1).numpy()
    return vectors


def vectors_of(served: Served, given: Any, **options: Any) -> NDArray[np.float32]:
    # Left out, the SDK asks for base64.
    answer = served.client().embeddings.create(model=served.model, input=given, **options)
    return np.array([entry.embedding for entry in answer.data], np.float32)


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}])
def test_embeddings_are_those_of_the_reference(
    encoder: Served, reference: NDArray[np.float32], options: dict[str, str]
) -> None:
    np.testing.assert_allclose(vectors_of(encoder, TEXTS, **options), reference, atol=1e-4)
    np.testing.assert_allclose(vectors_of(encoder, TEXTS[0], **options), reference[:1], atol=1e-4)


def test_token_ids_and_usage_are_those_of_the_tokenizer(encoder: Served, reference: NDArray[np.float32]) -> None:
    with encoder.http() as http:
        encoded = [http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in TEXTS]
    np.testing.assert_allclose(vectors_of(encoder, encoded), reference, atol=1e-4)
    np.testing.assert_allclose(vectors_of(encoder, encoded[1]), reference[1:2], atol=1e-4)
    answer = encoder.client().embeddings.create(model=encoder.model, input=TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, encoded))


def test_similar_texts_are_near_and_fewer_dimensions_keep_that(encoder: Served) -> None:
    for dimensions in (384, 64):
        food, pasta, market, german = vectors_of(encoder, TEXTS[:4], dimensions=dimensions)
        assert food.shape == (dimensions,)
        assert abs(float(np.linalg.norm(food)) - 1) < 1e-5
        assert food @ pasta > 0.5 > market @ german > food @ market


def test_scores_and_rankings_follow_from_embeddings(encoder: Served, reference: NDArray[np.float32]) -> None:
    with encoder.http() as http:
        scored = http.post("/v1/score", json={"text_1": TEXTS[0], "text_2": TEXTS[1:4]}).json()
        ranked = http.post("/v1/rerank", json={"query": TEXTS[0], "documents": TEXTS[1:], "top_n": 2}).json()
    expected = reference[1:] @ reference[0]
    assert [entry["score"] for entry in scored["data"]] == pytest.approx(expected[:3].tolist(), abs=1e-4)
    best = np.argsort(-expected)[:2].tolist()
    assert [result["index"] for result in ranked["results"]] == best
    assert ranked["results"][0]["document"]["text"] == TEXTS[1:][best[0]]


def test_an_encoder_refuses_generation_and_names_the_embeddings_endpoint(encoder: Served) -> None:
    client = encoder.client()
    with pytest.raises(BadRequestError, match="/v1/embeddings") as refused:
        client.chat.completions.create(model=encoder.model, messages=[{"role": "user", "content": "Hello"}])
    assert refused.value.param == "model"
    with pytest.raises(BadRequestError, match="/v1/embeddings"):
        client.completions.create(model=encoder.model, prompt="Hello", stream=True)
    (model,) = client.models.list()
    assert model.model_extra is not None
    assert (model.model_extra["kind"], model.model_extra["max_model_len"]) == ("embed", 256)


def test_wrong_inputs_are_refused_by_their_field(encoder: Served) -> None:
    client = encoder.client()
    for given, complaint in (("word " * 255, "maximum context length is 256"), ([30522], "vocabulary"), ([], "list")):
        with pytest.raises(BadRequestError, match=complaint) as refused:
            client.embeddings.create(model=encoder.model, input=given)
        assert refused.value.param == "input"
    with pytest.raises(BadRequestError) as refused:
        client.embeddings.create(model=encoder.model, input="x", dimensions=385)
    assert refused.value.param == "dimensions"
    with pytest.raises(NotFoundError):
        client.embeddings.create(model="another", input="x")
    with encoder.http() as http:
        answer = http.post("/v1/rerank", json={"query": "x", "documents": ["y", "word " * 255]})
    assert answer.json()["error"]["param"] == "documents"
    wait_until(encoder.is_idle)


def test_inputs_of_a_disconnected_client_are_dropped(encoder: Served) -> None:
    host, port = encoder.url.removeprefix("http://").split(":")
    content = json.dumps({"model": encoder.model, "input": TEXTS[4:5] * 2048}).encode()
    head = (
        f"POST /v1/embeddings HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    with encoder.leaving_nothing_behind():
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(head.encode() + content)
            wait_until(lambda: encoder.state().running_rows > 0, timeout_s=120)
        steps = encoder.state().finished_steps
    # 2,048 texts of 200 tokens, at most two of which fit into a step.
    assert encoder.state().finished_steps - steps < 300
    assert vectors_of(encoder, "x").shape == (1, 384)


@pytest.mark.extended
@pytest.mark.parametrize("name", ["worker", "scheduler"])
def test_embeddings_survive_the_death_of_a_service(encoder: Served, reference: NDArray[np.float32], name: str) -> None:
    got: list[NDArray[np.float32]] = []
    asking = threading.Thread(target=lambda: got.append(vectors_of(encoder, TEXTS[4:] * 150)))
    asking.start()
    wait_until(lambda: encoder.state().running_rows > 0, timeout_s=120)
    encoder.deployment.kill(name)
    asking.join()
    np.testing.assert_allclose(got[0], np.tile(reference[4:], (150, 1)), atol=1e-4)
    wait_until(encoder.is_ready, 120)
    with encoder.leaving_nothing_behind():
        pass


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_decoder_embeds_and_generates_concurrently(served: Served, pooling: str) -> None:
    texts = [*TEXTS[:3], TEXTS[4] * 3]
    options = {"extra_body": {"pooling": pooling, "user": "embedding"}}
    with served.leaving_nothing_behind():
        alone = [vectors_of(served, text, **options)[0] for text in texts]
        expected = served.complete("The capital of France is", max_tokens=16)
        written: list[str] = []
        writing = threading.Thread(target=lambda: written.append(served.complete(max_tokens=16)))
        writing.start()
        together = vectors_of(served, texts, **options)
        writing.join()
    assert together.shape == (4, 576)
    assert written == [expected]
    for one, other in zip(alone, together, strict=True):
        assert one @ other > 0.999
    assert abs(float(alone[0] @ alone[2])) < 0.999


def test_an_embedding_as_curl_sees_it(served: Served) -> None:
    body = {"model": served.model, "input": "Hello", "encoding_format": "base64"}
    answer = httpx.post(f"{served.url}/v1/embeddings", json=body, timeout=60).json()
    vector = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    assert vector.shape == (576,)
    assert answer["usage"] == {"prompt_tokens": 1, "total_tokens": 1}

"""A cross-encoder and a reward model with random weights through all five services, against `transformers`."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from huggingface_hub import InferenceClient
from openai import BadRequestError

from common.models import resolve_model
from common.settings import GatewaySettings, ModelSettings, Settings
from common.tokenization import load_served_model
from tests.e2e.conftest import serve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.e2e.served import Served

QUERY = "Who eats lunch?"
DOCUMENTS = ["A man eats pasta for lunch.", "The stock market fell sharply on Monday.", "x", "word " * 50]
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONVERSATION = [{"role": "user", "content": "What is two and two?"}, {"role": "assistant", "content": "Four."}]


def served_from(model: Path, run_root: Path) -> Iterator[Served]:
    settings = Settings(
        model=ModelSettings(reference=str(model), dtype="float32"), gateway=GatewaySettings(port=0, anonymous="vouched")
    )
    yield from serve(settings, run_root)


@pytest.fixture(scope="module")
def reranker_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=30522, num_labels=1, initializer_range=0.3, **SHAPE)
    model = transformers.BertForSequenceClassification(config)
    directory, source = tmp_path_factory.mktemp("reranker"), resolve_model("all-minilm-l6-v2").path
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(source / name, directory / name)
    return directory


@pytest.fixture(scope="module")
def reranker(reranker_directory: Path, run_root: Path) -> Iterator[Served]:
    yield from served_from(reranker_directory, run_root)


@pytest.fixture(scope="module")
def scores(reranker_directory: Path) -> NDArray[np.float32]:
    """The outputs of `transformers` for the query with each document."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(reranker_directory)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(reranker_directory).eval()
    batch = tokenizer([QUERY] * len(DOCUMENTS), DOCUMENTS, padding=True, return_tensors="pt")
    with torch.inference_mode():
        logits: NDArray[np.float32] = model(**batch).logits[:, 0].numpy()
    return logits


def test_documents_are_ranked_by_the_scores_of_the_reference(reranker: Served, scores: NDArray[np.float32]) -> None:
    probabilities = 1 / (1 + np.exp(-scores))
    order = np.argsort(-scores).tolist()
    with reranker.http() as http:
        ranked = http.post("/v2/rerank", json={"query": QUERY, "documents": DOCUMENTS}).json()["results"]
        scored = http.post("/v1/score", json={"text_1": QUERY, "text_2": DOCUMENTS}).json()["data"]
        raw = http.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS, "raw_scores": True}).json()
    assert [result["index"] for result in ranked] == [result["index"] for result in raw] == order
    assert [result["relevance_score"] for result in ranked] == pytest.approx(probabilities[order].tolist(), abs=1e-4)
    assert [entry["score"] for entry in scored] == pytest.approx(probabilities.tolist(), abs=1e-4)
    assert [result["score"] for result in raw] == pytest.approx(scores[order].tolist(), abs=1e-4)


def test_documents_that_are_too_long_are_refused_or_cut(reranker: Served) -> None:
    body: dict[str, Any] = {"query": QUERY, "documents": ["word " * 600, "y"]}
    with reranker.http() as http:
        refused = http.post("/v1/rerank", json=body)
        cut = http.post("/v1/rerank", json={**body, "truncate": True}).json()
        short = http.post("/v1/rerank", json={**body, "max_tokens_per_doc": 3}).json()
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents")
    assert cut["usage"]["prompt_tokens"] > 512 > short["usage"]["prompt_tokens"]


def test_a_cross_encoder_names_its_endpoints_where_it_is_asked_for_something_else(reranker: Served) -> None:
    with pytest.raises(BadRequestError, match="scores pairs of texts, at /v1/score and /v1/rerank"):
        reranker.client().embeddings.create(model=reranker.model, input="x")
    (model,) = reranker.client().models.list()
    assert model.model_extra is not None
    assert model.model_extra["tasks"] == ["classify", "score"]


def test_the_client_of_text_embeddings_inference_gets_vectors(run_root: Path) -> None:
    settings = Settings(model=ModelSettings(reference="all-minilm-l6-v2"), gateway=GatewaySettings(port=0))
    for served in serve(settings, run_root):
        client = InferenceClient(model=f"{served.url}/embed")
        vectors = client.feature_extraction(["a", "b"], normalize=True, truncate=True, truncation_direction="left")
        expected = served.client().embeddings.create(model=served.model, input=["a", "b"])
        np.testing.assert_allclose(vectors, [entry.embedding for entry in expected.data], atol=1e-6)


@pytest.fixture(scope="module")
def reward_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=49152, num_key_value_heads=2, num_labels=1, pad_token_id=2, max_position_embeddings=512,
        initializer_range=0.3, **SHAPE,
    )  # fmt: skip
    model = transformers.LlamaForSequenceClassification(config)
    directory, text = tmp_path_factory.mktemp("reward"), load_served_model(ModelSettings())
    model.save_pretrained(directory)
    text.tokenizer.save(str(directory / "tokenizer.json"))
    settings = {**text.special_tokens, "chat_template": text.chat_templates["default"]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def test_a_conversation_has_the_reward_of_the_reference_and_cached_prefixes_stay_private(
    reward_directory: Path, run_root: Path
) -> None:
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(reward_directory).eval()
    # The end of a turn is not padding here: the last token is the last one.
    model.config.pad_token_id = None
    for served in served_from(reward_directory, run_root):
        body = {"messages": CONVERSATION, "use_activation": False}
        with served.http() as http:
            encoded = http.post("/tokenize", json={"messages": CONVERSATION, "add_generation_prompt": False}).json()
            answers = [http.post("/v1/classify", json={**body, "user": user}).json() for user in ("ann", "ann", "bob")]
            (model_object,) = http.get("/v1/models").json()["data"]
        with torch.inference_mode():
            reward = float(model(torch.tensor([encoded["tokens"]])).logits[0, 0])
        for answer in answers:
            assert answer["data"][0]["probs"] == [pytest.approx(reward, abs=1e-3)]
            assert answer["usage"]["prompt_tokens"] == encoded["count"] > 16
        assert model_object["tasks"] == ["classify", "score"]
        # Only the second request found what the first one had computed.
        assert sum(served.state().cache_accounting.hit_tokens.values()) == (encoded["count"] - 1) // 16 * 16

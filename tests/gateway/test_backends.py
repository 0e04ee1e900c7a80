"""Several models behind one gateway: who answers for which name, and what one that is away means to the others."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from common.errors import ConfigurationError, UnavailableError
from common.settings import GatewaySettings
from common.types import ErrorCode, RequestFailure
from gateway.backends import Backend, Backends, ModelPipelines, ServedModel
from gateway.generation.journal import ResumePolicy
from tests.fakes.pipeline import CARD, FakeAdministration, FakeModel, FakePipeline, FakeReadiness, says
from tests.gateway.support import HELLO, FakedGateway, error_of


@dataclass
class FakedModel:
    """One model with all that stands behind it."""

    name: str
    pipeline: FakePipeline
    aliases: tuple[str, ...] = ()
    is_encoder: bool = False
    readiness: FakeReadiness = field(default_factory=FakeReadiness)
    administration: FakeAdministration = field(default_factory=FakeAdministration)

    def __post_init__(self) -> None:
        self.model = FakeModel(replace(CARD, name=self.name, is_encoder=self.is_encoder))

    @property
    def backend(self) -> Backend:
        served = ServedModel(self.model, self.name)
        return Backend(served, self.model, self.readiness, self.administration, self.name, self.aliases)


class TwoModels(FakedGateway):
    """`small` and `large`, of which each says its name; `extra` come on top."""

    def __init__(self, *extra: FakedModel, resume: ResumePolicy | None = None, **settings: object) -> None:
        self.small = FakedModel("small", FakePipeline(says("small")), aliases=("gpt-4o-mini", "org/small"))
        self.large = FakedModel("large", FakePipeline(says("large")))
        models = (self.small, self.large, *extra)
        pipelines = ModelPipelines({model.name: model.pipeline for model in models})
        super().__init__(
            pipelines,  # type: ignore[arg-type]  # as good a pipeline
            GatewaySettings(**settings),  # type: ignore[arg-type]  # checked by pydantic
            model=self.small.model,
            readiness=self.small.readiness,
            administration=self.small.administration,
            name="small",
            aliases=self.small.aliases,
            others=[model.backend for model in models[1:]],
            resume=resume or ResumePolicy(),
        )


def text_of(answer: dict[str, list[dict[str, dict[str, str]]]]) -> str:
    return answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize(("asked", "answers"), [("small", "small"), ("large", "large"), ("org/small", "small")])
async def test_the_model_that_is_named_answers(asked: str, answers: str) -> None:
    gateway = TwoModels()
    response = await gateway.chat(model=asked)
    assert text_of(response.json()) == answers
    # Whatever it was called, an answer says what it is.
    assert response.json()["model"] == answers
    completion = (await gateway.complete(model=asked)).json()
    assert completion["choices"][0]["text"] == answers
    native = (await gateway.post("/generate", {"text": "x", "model": asked})).json()
    assert native["text"] == answers


async def test_an_unknown_model_name_is_refused_with_the_known_ones() -> None:
    error = error_of(await TwoModels().chat(model="huge"), 404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert "'small', 'large'" in error["message"]
    assert error_of(await TwoModels().get("/v1/models/huge"), 404)["code"] == "model_not_found"


async def test_without_a_name_the_default_answers_if_there_is_one() -> None:
    assert text_of((await TwoModels(default_model="large").chat(model=None)).json()) == "large"
    assert text_of((await TwoModels(default_model="gpt-4o-mini").chat(model=None)).json()) == "small"
    error = error_of(await TwoModels().chat(model=None), 400)
    assert error["param"] == "model"
    error = error_of(await TwoModels().post("/generate", {"text": "x"}), 400)
    assert "'small', 'large'" in error["message"]
    native = await TwoModels(default_model="large").post("/generate", {"text": "x"})
    assert native.json()["text"] == "large"


async def test_all_models_are_listed_with_kind_and_context_length() -> None:
    encoder = FakedModel("minilm", FakePipeline(), is_encoder=True)
    gateway = TwoModels(encoder)
    listed = (await gateway.get("/v1/models")).json()["data"]
    assert [(card["id"], card["kind"], card["max_model_len"]) for card in listed] == [
        ("small", "generate", 2048),
        ("large", "generate", 2048),
        ("minilm", "embed", 2048),
    ]
    assert listed[0]["aliases"] == ["gpt-4o-mini", "org/small"]
    assert (await gateway.get("/v1/models/org/small")).json() == listed[0]


async def test_an_encoder_generates_nothing() -> None:
    gateway = TwoModels(FakedModel("minilm", FakePipeline(), is_encoder=True))
    for response in (
        await gateway.chat(model="minilm"),
        await gateway.complete(model="minilm"),
        await gateway.post("/generate", {"text": "x", "model": "minilm"}),
        await gateway.post("/v1/responses", {"input": "x", "model": "minilm"}),
    ):
        assert "/v1/embeddings" in error_of(response, 400)["message"]


async def test_a_model_with_unreachable_services_gives_503_and_other_models_still_answer() -> None:
    gateway = TwoModels(resume=ResumePolicy(deadline_s=0.0))
    gateway.small.model.error = UnavailableError("the tokenizer is away")
    assert error_of(await gateway.chat(model="small"), 503)["message"] == "the tokenizer is away"
    assert text_of((await gateway.chat(model="large")).json()) == "large"
    # It is known by name, and nothing more.
    listed = (await gateway.get("/v1/models")).json()["data"]
    assert [(card["id"], card["max_model_len"]) for card in listed] == [("small", None), ("large", 2048)]
    assert error_of(await gateway.get("/v1/models/small"), 503)


async def test_an_interrupted_choice_is_resumed_at_its_own_model() -> None:
    gateway = TwoModels()
    gateway.large.pipeline.script = None
    async with gateway.client() as client:
        body = {"model": "large", "messages": HELLO}
        answer = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        (first,) = await gateway.large.pipeline.submissions(1)
        gateway.large.pipeline.script = says("large")
        gateway.large.pipeline.lose(first.request_id, RequestFailure(ErrorCode.UNAVAILABLE, "away", retryable=True))
        assert text_of((await answer).json()) == "large"
    assert len(gateway.large.pipeline.submitted) == 2
    assert not gateway.small.pipeline.submitted


async def test_readiness_is_reported_per_model() -> None:
    gateway = TwoModels()
    assert (await gateway.get("/ready")).json() == {"status": "ready", "missing": []}
    gateway.large.readiness.lacking = ["tokenizer: not connected"]
    partial = await gateway.get("/ready")
    assert partial.status_code == 200
    assert partial.json() == {"status": "partial", "missing": ["large: tokenizer: not connected"]}
    assert (await gateway.get("/ready?model=small")).status_code == 200
    assert (await gateway.get("/ready?model=large")).status_code == 503
    assert (await gateway.get("/ready?model=huge")).status_code == 404
    assert (await gateway.get("/health_generate")).status_code == 200
    gateway.small.readiness.lacking = ["detokenizer: not subscribed"]
    assert (await gateway.get("/ready")).status_code == 503


async def test_text_is_encoded_by_the_model_that_is_named() -> None:
    gateway = TwoModels()
    gateway.small.model.error = UnavailableError("away")
    assert (await gateway.post("/tokenize", {"prompt": "x", "model": "large"})).json()["count"] == 2
    assert error_of(await gateway.post("/tokenize", {"prompt": "x", "model": "small"}), 503)
    assert error_of(await gateway.post("/tokenize", {"prompt": "x"}), 400)["param"] == "model"
    assert (await gateway.post("/detokenize", {"tokens": [65], "model": "large"})).json() == {"prompt": "A"}


async def test_administrators_flush_all_models_or_one() -> None:
    gateway = TwoModels()
    assert "84 pages" in (await gateway.post("/flush_cache", {})).text
    assert (gateway.small.administration.flushes, gateway.large.administration.flushes) == (1, 1)
    assert "42 pages" in (await gateway.post("/flush_cache?model=large", {})).text
    assert (gateway.small.administration.flushes, gateway.large.administration.flushes) == (1, 2)
    assert (await gateway.get("/get_server_info?model=large")).json()["served_model_name"] == "large"
    assert (await gateway.get("/get_model_info?model=small")).json()["model_path"] == "small"


async def test_metrics_name_the_model() -> None:
    gateway = TwoModels()
    await gateway.chat(model="gpt-4o-mini")
    await gateway.chat(model="large")
    text = (await gateway.get("/metrics")).text
    assert 'pando_gateway_completion_tokens_total{model="small"} 1.0' in text
    assert 'pando_gateway_completion_tokens_total{model="large"} 1.0' in text


async def test_services_of_another_model_than_configured_are_refused() -> None:
    gateway = TwoModels()
    gateway.large.model.card = replace(CARD, name="small")
    assert "serve 'small'" in error_of(await gateway.chat(model="large"), 503)["message"]


async def test_stored_responses_keep_their_model() -> None:
    gateway = TwoModels()
    made = (await gateway.post("/v1/responses", {"input": "x", "model": "large"})).json()
    assert (await gateway.get(f"/v1/responses/{made['id']}")).json()["model"] == "large"


def test_names_are_unique_and_the_default_is_one_of_them() -> None:
    small, large = FakedModel("small", FakePipeline()), FakedModel("large", FakePipeline(), aliases=("small",))
    with pytest.raises(ConfigurationError, match="two models"):
        Backends([small.backend, large.backend])
    with pytest.raises(ConfigurationError, match="huge"):
        Backends([small.backend], default="huge")

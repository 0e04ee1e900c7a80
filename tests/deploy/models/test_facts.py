"""What `pando models inspect` says of public models, from facts of their configurations."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigurationError
from common.models import resolve_model
from deploy.models import support as deciding
from deploy.models.evidence import gather_local
from deploy.models.facts import Evidence, ModelFacts, facts_of
from deploy.models.support import Service, Support, support_of, transformers_shape
from services.worker.engine.transformers_models.support import SHAPE_FIELDS, read_transformers_config

CONFIGS = sorted((Path(__file__).parent / "configs").glob("*.json"))
OWN = ("llama-3.1-8b", "qwen3-8b", "qwen3-30b-a3b", "gemma-3-4b", "mistral-7b-v0.1", "mixtral-8x7b", "phi-3-mini-4k")


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Asks the worker's code without a process for each question, which would import the library each time."""

    def ask(config: dict[str, Any]) -> Support:
        (tmp_path / "config.json").write_text(json.dumps(config))
        shape = read_transformers_config(tmp_path, config, {})
        answer = {name: getattr(shape, name) for name in SHAPE_FIELDS}
        return Support(Service.TRANSFORMERS, "", transformers_shape(answer))

    monkeypatch.setattr(deciding, "_through_transformers", ask)


def facts(name: str) -> tuple[ModelFacts, dict[str, Any]]:
    described = json.loads((Path(__file__).parent / "configs" / f"{name}.json").read_text())
    return facts_of(Evidence(config=described["config"], **described["evidence"])), described["expected"]


def test_there_are_configs_of_all_kinds() -> None:
    assert len(CONFIGS) >= 23
    served = {json.loads(path.read_text())["expected"]["service"] for path in CONFIGS}
    assert served == {"OWN", "TRANSFORMERS", "REFUSED", "ENCODER"}


@pytest.mark.parametrize("name", [path.stem for path in CONFIGS])
def test_public_models(in_this_process: None, name: str) -> None:
    found, expected = facts(name)
    assert found.service is Service[expected.pop("service")]
    assert expected.pop("reason", "") in found.reason
    if "bf16" in expected:
        assert found.memory is not None
        assert found.memory["bf16"] == expected.pop("bf16")
    assert expected
    for field, value in expected.items():
        assert getattr(found, field) == value, field


@pytest.mark.parametrize("name", OWN)
def test_fewer_bits_take_less_memory_but_for_the_embedding(name: str) -> None:
    found, _ = facts(name)
    assert found.memory is not None
    bf16, fp8, four_bits = (found.memory[kind] for kind in ("bf16", "fp8", "4 bits"))
    assert bf16 / 2 < fp8 < 0.7 * bf16
    assert bf16 / 4 < four_bits < 0.8 * fp8


def test_the_count_of_an_own_model_is_that_of_its_tensors() -> None:
    evidence = gather_local(resolve_model("smollm2-135m-instruct"))
    found = facts_of(evidence)
    assert found.parameters == evidence.stated_parameters == 134_515_008
    assert (found.service, found.max_context, found.has_tokenizer, found.has_chat_template) == (
        Service.OWN, 8192, True, True,
    )  # fmt: skip


def test_an_encoder_of_this_host_keeps_no_keys_and_values() -> None:
    found = facts_of(gather_local(resolve_model("all-minilm-l6-v2")))
    assert (found.service, found.kv_bytes_per_token, found.memory is not None) == (Service.ENCODER, None, True)
    assert found.parameters is not None
    assert math.isclose(found.parameters, 22.7e6, rel_tol=0.01)


def test_a_gguf_file_of_another_architecture_is_refused() -> None:
    found = facts_of(Evidence(architecture="gptoss", stated_parameters=20_914_757_184, gguf_context=131_072))
    assert found.service is Service.REFUSED
    assert "GGUF architecture 'gptoss' is not supported; supported: " in found.reason
    assert (found.family, found.max_context, found.parameters) == ("gptoss", 131_072, 20_914_757_184)


def test_the_program_that_asks_transformers_answers_as_the_worker_does() -> None:
    config = json.loads((Path(__file__).parent / "configs" / "starcoder2-7b.json").read_text())["config"]
    found = support_of(config, {})
    assert found.service is Service.TRANSFORMERS
    assert found.config is not None
    assert (found.config.layers, found.config.kv_heads, found.config.head_dim) == (32, 4, 128)
    refused = support_of({**config, "quantization_config": {"quant_method": "awq"}}, {})
    assert (refused.service, refused.reason) == (
        Service.REFUSED, "quantization_config: weights quantised by 'awq' are not supported",
    )  # fmt: skip


def test_without_the_worker_the_answer_is_that_it_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert support_of({"model_type": "starcoder2"}, {}).service is Service.UNKNOWN


@pytest.mark.parametrize(
    "changes",
    [{"num_hidden_layers": 10**9}, {"num_hidden_layers": None}, {"quantization_config": "fp8"}, {"text_config": "x"}],
)
@pytest.mark.parametrize("model", ["qwen3-8b", "bge-small"])
def test_malformed_fields_do_not_end_the_inspection(model: str, changes: dict[str, Any]) -> None:
    config = json.loads((Path(__file__).parent / "configs" / f"{model}.json").read_text())["config"]
    facts = facts_of(Evidence(config={**config, **changes}))
    assert facts.family == config["model_type"]
    assert facts.parameters is None or "text_config" in changes


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigurationError, match=r"config\.json: a JSON object is expected"):
        gather_local(resolve_model(str(tmp_path)))


@pytest.mark.parametrize(
    ("config", "tasks", "labels"),
    [
        ({"architectures": ["XLMRobertaForSequenceClassification"], "num_labels": 1}, ("classify", "score"), 1),
        ({"architectures": ["XLMRobertaForSequenceClassification"]}, ("classify",), 2),
        ({"architectures": ["XLMRobertaForTokenClassification"], "num_labels": 9}, ("token_classify",), 9),
        ({"architectures": ["XLMRobertaModel"]}, ("embed", "score"), 0),
    ],
)
def test_the_tasks_of_an_encoder_are_those_of_its_head(
    config: dict[str, Any], tasks: tuple[str, ...], labels: int
) -> None:
    described = json.loads((Path(__file__).parent / "configs" / "bge-small.json").read_text())
    found = facts_of(Evidence(config={**described["config"], "model_type": "xlm-roberta", **config}))
    assert (found.service, found.tasks, len(found.labels)) == (Service.ENCODER, tasks, labels)


def test_the_tasks_of_a_decoder_are_those_of_its_head_or_its_files() -> None:
    config = json.loads((Path(__file__).parent / "configs" / "qwen3-8b.json").read_text())["config"]
    whole = facts_of(Evidence(config=config))
    assert (whole.tasks, whole.labels) == (("generate", "embed", "score"), ())
    assert facts_of(Evidence(config=config, has_pooling=True)).tasks == ("embed", "score")
    reward = facts_of(Evidence(config={**config, "architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}))
    assert reward.tasks == ("classify", "score")
    # The head of the vocabulary is replaced by that of one label.
    assert whole.parameters is not None
    assert reward.parameters == whole.parameters - (config["vocab_size"] - 1) * config["hidden_size"]
    refused = facts_of(Evidence(config={**config, "rope_scaling": {"rope_type": "unknown", "factor": 2.0}}))
    assert (refused.service, refused.tasks) == (Service.REFUSED, ())

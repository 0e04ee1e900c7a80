"""Classification heads as config.json describes them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from common.errors import ConfigurationError
from common.heads import HeadActivation, has_pooling_module, only_embeds, read_head
from common.types import Pooling

if TYPE_CHECKING:
    from pathlib import Path

SEQUENCE = {"architectures": ["BertForSequenceClassification"]}


@pytest.mark.parametrize(
    ("architecture", "pooling", "labels"),
    [
        ("XLMRobertaForSequenceClassification", Pooling.CLASSIFY, 2),
        ("Qwen3ForTokenClassification", Pooling.TOKEN_CLASSIFY, 2),
        ("Qwen2ForRewardModel", Pooling.CLASSIFY, 1),
        ("Qwen2ForProcessRewardModel", Pooling.TOKEN_CLASSIFY, 2),
    ],
)
def test_the_architecture_names_the_head(architecture: str, pooling: Pooling, labels: int) -> None:
    head = read_head({"architectures": [architecture]})
    assert head is not None
    assert (head.pooling, len(head.labels)) == (pooling, labels)


@pytest.mark.parametrize("architectures", [["Qwen3ForCausalLM"], ["BertModel"], [], None])
def test_other_architectures_have_none(architectures: list[str] | None) -> None:
    assert read_head({"architectures": architectures}) is None


def test_labels_are_those_of_id2label_in_the_order_of_their_numbers() -> None:
    names = {str(number): f"label {number}" for number in reversed(range(11))}
    head = read_head({**SEQUENCE, "id2label": names})
    assert head is not None
    assert head.labels == tuple(f"label {number}" for number in range(11))
    with pytest.raises(ConfigurationError, match="id2label"):
        read_head({**SEQUENCE, "id2label": {"1": "a", "2": "b"}})


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"num_labels": 3}, HeadActivation.SOFTMAX),
        ({"num_labels": 1}, HeadActivation.SIGMOID),
        ({"num_labels": 1, "problem_type": "regression"}, HeadActivation.NONE),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, HeadActivation.SIGMOID),
        ({"num_labels": 1, "problem_type": "single_label_classification"}, HeadActivation.SOFTMAX),
    ],
)
def test_activations_are_those_of_the_pipelines_of_transformers(
    config: dict[str, Any], activation: HeadActivation
) -> None:
    head = read_head({**SEQUENCE, **config})
    assert head is not None
    assert head.activation is activation
    assert head.scores_pairs == (config["num_labels"] == 1)


def test_scores_have_the_activation_that_sentence_transformers_states() -> None:
    modern = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    old = {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}
    heads = [read_head({**SEQUENCE, **stated}) for stated in (modern, old, {})]
    assert [head and head.score_activation for head in heads] == [
        HeadActivation.NONE, HeadActivation.SIGMOID, HeadActivation.SIGMOID,
    ]  # fmt: skip
    with pytest.raises(ConfigurationError, match="Tanh"):
        read_head({**SEQUENCE, "sbert_ce_default_activation_function": "torch.nn.Tanh"})


def test_two_tokens_make_a_head_with_one_label() -> None:
    stated = {"architectures": ["Qwen3ForCausalLM"], "classifier_from_token": ["no", "yes"]}
    for head in (read_head(stated), read_head({}, ("no", "yes"))):
        assert head is not None
        assert (head.tokens, head.scores_pairs, head.activation) == (("no", "yes"), True, HeadActivation.SIGMOID)


def test_a_model_without_a_head_or_with_a_pooling_module_only_embeds(tmp_path: Path) -> None:
    causal = {"architectures": ["Qwen3ForCausalLM"]}
    assert only_embeds({"architectures": ["Qwen3Model"]}, has_pooling=False)
    assert not only_embeds({"architectures": ["GPT2LMHeadModel"]}, has_pooling=False)
    assert not only_embeds(causal, has_pooling=False)
    assert only_embeds(causal, has_pooling=True)
    assert not only_embeds(SEQUENCE, has_pooling=True)
    assert not has_pooling_module(tmp_path)
    modules = [{"type": f"sentence_transformers.models.{name}", "path": name} for name in ("Transformer", "Pooling")]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert has_pooling_module(tmp_path)

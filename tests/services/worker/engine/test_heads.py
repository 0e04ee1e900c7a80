"""Classification heads of decoders against the classes of `transformers` in fp32, on one rank and on two."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.torch
import tokenizers
import torch

from common.errors import ConfigurationError
from common.steps import EngineSpec, StepPlan
from common.types import FinishReason, Pooling, RowSlot, StepId
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.interface import InvalidPlanError
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.loader import load_model
from tests.services.worker.engine.driving import random_ids
from tests.services.worker.engine.families import FAMILIES, VOCABULARY, save_family, save_model
from tests.services.worker.engine.scenario import chunk, open_row

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from common.steps import EngineCapacity, StepResult
    from services.worker.engine.execution.engine import ModelEngine
    from tests.services.worker.engine.parallel.ranks import Ranks

PAGES = 8
# No padding tokens, after which the classes of `transformers` look for the last token.
PROMPTS = [
    [2 + token % (VOCABULARY - 2) for token in random_ids(length, VOCABULARY, seed=length)] for length in (37, 1, 90)
]
GPT_NEO_X = {"hidden_act": "gelu", "rotary_pct": 0.5, "intermediate_size": 80}


def save_classifier(directory: Path, family: str, task: str, labels: int, **config: Any) -> Path:
    name, options = FAMILIES.get(family, (family, {}))
    return save_model(directory, name, {**options, "num_labels": labels, **config}, task=task)


def reference(model: Path, prompt: list[int], task: str) -> NDArray[np.float32]:
    """Return the outputs of the class that `transformers` chooses: [labels], or [tokens, labels]."""
    import transformers

    automatic = getattr(transformers, f"AutoModelFor{task}")
    classifier = automatic.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: NDArray[np.float32] = classifier(torch.tensor([prompt])).logits[0].numpy()
    return logits


def configured(model: Path, **changes: object) -> tuple[ModelEngine, EngineCapacity]:
    fields: dict[str, object] = {"max_rows": 8, "device_pages": 64, "dtype": "float32", **changes}
    spec = EngineSpec(str(model), **fields)  # type: ignore[arg-type]  # whatever a test wants to change
    made = torch_engine(lambda spec, report: load_model(spec, report, RunnerOptions(device="cpu", threads=1)))
    return made, made.configure(spec, lambda _fraction, _stage: None)


def classify(
    engine: ModelEngine, prompt: list[int], pooling: Pooling, borders: tuple[int, ...] = ()
) -> list[tuple[RowSlot, bytes]]:
    """Compute one prompt, in chunks that end at `borders`."""
    opened = replace(open_row(0, prompt, range(PAGES), total=len(prompt)), pooling=pooling)
    cuts = [0, *borders, len(prompt)]
    results: list[StepResult] = []
    for step, (start, end) in enumerate(pairwise(cuts), start=1):
        opens = (opened,) if step == 1 else ()
        engine.execute(StepPlan(StepId(step), opens=opens, prefills=(chunk(0, start, end - start),)), results.append)
    assert not any(result.embeddings or result.stops for result in results[:-1])
    engine.reset()
    return list(results[-1].embeddings)


def outputs(given: list[tuple[RowSlot, bytes]]) -> NDArray[np.float32]:
    ((_, content),) = given
    return np.frombuffer(content, "<f4")


@pytest.mark.parametrize(
    ("family", "labels"),
    [
        ("llama", 1),
        ("qwen2", 3),
        ("qwen3", 1),
        ("mistral windowed", 2),
        ("gemma3", 4),
        ("qwen3 moe", 2),
        ("Phi3", 2),
        ("Starcoder2", 2),
    ],
)
def test_sequence_classifiers_have_the_outputs_of_transformers(tmp_path: Path, family: str, labels: int) -> None:
    model = save_classifier(tmp_path, family, "SequenceClassification", labels)
    engine, capacity = configured(model)
    assert (capacity.head, capacity.only_pools, capacity.is_encoder) == (Pooling.CLASSIFY, True, False)
    for prompt in PROMPTS:
        expected = reference(model, prompt, "SequenceClassification")
        assert expected.shape == (labels,)
        for borders in ((), (len(prompt) // 2,))[: len(prompt)]:
            got = outputs(classify(engine, prompt, Pooling.CLASSIFY, borders))
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize(("family", "labels"), [("qwen3", 5), ("llama tied", 1), ("mistral", 2)])
def test_token_classifiers_have_the_outputs_of_transformers(tmp_path: Path, family: str, labels: int) -> None:
    model = save_classifier(tmp_path, family, "TokenClassification", labels)
    engine, capacity = configured(model)
    assert capacity.head is Pooling.TOKEN_CLASSIFY
    for borders in ((), (1, 20)):
        got = outputs(classify(engine, PROMPTS[0], Pooling.TOKEN_CLASSIFY, borders))
        expected = reference(model, PROMPTS[0], "TokenClassification")
        assert expected.shape == (37, labels)
        np.testing.assert_allclose(got.reshape(37, labels), expected, rtol=1e-4, atol=5e-5)


def test_several_prompts_of_a_pass_keep_their_own_outputs(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, "qwen3", "TokenClassification", 2)
    engine, _ = configured(model)
    opens = tuple(
        replace(
            open_row(row, prompt, range(row * PAGES, (row + 1) * PAGES), total=len(prompt)),
            pooling=Pooling.TOKEN_CLASSIFY,
        )
        for row, prompt in enumerate(PROMPTS)
    )
    results: list[StepResult] = []
    chunks = tuple(chunk(row, 0, len(prompt)) for row, prompt in enumerate(PROMPTS))
    engine.execute(StepPlan(StepId(1), opens=opens, prefills=chunks), results.append)
    (result,) = results
    assert [(stop.row, stop.reason) for stop in result.stops] == [(row, FinishReason.STOP) for row in range(3)]
    for row, content in result.embeddings:
        expected = reference(model, PROMPTS[row], "TokenClassification")
        np.testing.assert_allclose(np.frombuffer(content, "<f4").reshape(-1, 2), expected, rtol=1e-4, atol=5e-5)


def test_a_reward_model_with_two_layers_is_what_its_own_code_computes(tmp_path: Path) -> None:
    """Qwen2ForRewardModel, whose code its repositories bring along: a linear layer, a ReLU and another one."""
    import transformers

    save_family(tmp_path, "qwen2")
    file = tmp_path / "config.json"
    config = {**json.loads(file.read_text()), "architectures": ["Qwen2ForRewardModel"]}
    file.write_text(json.dumps(config))
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.ReLU(), torch.nn.Linear(48, 1))
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    weights |= {f"score.{name}": value.clone() for name, value in layers.state_dict().items()}
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    decoder = transformers.Qwen2Model.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = layers(decoder(torch.tensor([PROMPTS[0]])).last_hidden_state[0, -1]).numpy()
    engine, capacity = configured(tmp_path)
    assert capacity.head is Pooling.CLASSIFY
    np.testing.assert_allclose(outputs(classify(engine, PROMPTS[0], Pooling.CLASSIFY)), expected, rtol=1e-4, atol=5e-5)


def save_vocabulary(directory: Path) -> None:
    """Write a tokenizer in which `no` and `yes` are tokens 7 and 9."""
    names = {"no": 7, "yes": 9}
    vocabulary = names | {f"w{i}": i for i in range(VOCABULARY) if i not in names.values()}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.save(str(directory / "tokenizer.json"))


@pytest.mark.parametrize("family", ["qwen3", "llama tied"])
def test_two_tokens_make_a_classifier_of_a_model_that_generates(tmp_path: Path, family: str) -> None:
    model = save_family(tmp_path, family)
    save_vocabulary(model)
    engine, capacity = configured(model, classifier_from_token=("no", "yes"))
    assert (capacity.head, capacity.only_pools) == (Pooling.CLASSIFY, True)
    logits = reference(model, PROMPTS[2], "CausalLM")[-1]
    got = outputs(classify(engine, PROMPTS[2], Pooling.CLASSIFY))
    np.testing.assert_allclose(got, logits[[9]] - logits[[7]], rtol=1e-4, atol=5e-5)
    with pytest.raises(ConfigurationError, match=r"\['maybe'\] are no tokens"):
        configured(model, classifier_from_token=("no", "maybe"))
    with pytest.raises(ConfigurationError, match="two tokens are expected, got 1"):
        configured(model, classifier_from_token=("no",))


def classify_as_rank(rank: int, world_size: int, rendezvous: str, model: Path, pooling: Pooling) -> list[bytes]:
    made, _ = configured(model, rank=rank, world_size=world_size, rendezvous=rendezvous)
    given = classify(made, PROMPTS[0], pooling, (20,))
    made.close()
    return [content for _, content in given]


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification"])
def test_two_ranks_classify_as_one_does_and_only_the_first_reports(tmp_path: Path, ranks: Ranks, task: str) -> None:
    model = save_classifier(tmp_path, "qwen3", task, 3)
    pooling = Pooling.CLASSIFY if task.startswith("Sequence") else Pooling.TOKEN_CLASSIFY
    (content,), nothing = ranks.run(classify_as_rank, 2, model, pooling)
    assert nothing == []
    expected = reference(model, PROMPTS[0], task)
    np.testing.assert_allclose(np.frombuffer(content, "<f4").reshape(expected.shape), expected, rtol=1e-4, atol=5e-5)


def test_classification_uses_a_cached_prefix(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, "qwen3", "SequenceClassification", 2)
    engine, _ = configured(model)
    prompt, results = PROMPTS[0], list[Any]()
    first = replace(open_row(0, prompt, range(PAGES), total=37), pooling=Pooling.CLASSIFY)
    engine.execute(StepPlan(StepId(1), opens=(first,), prefills=(chunk(0, 0, 37),)), results.append)
    hit = replace(open_row(1, prompt, range(PAGES), computed=32, total=37), pooling=Pooling.CLASSIFY)
    plan = StepPlan(StepId(2), closes=(RowSlot(0),), opens=(hit,), prefills=(chunk(1, 32, 5),))
    engine.execute(plan, results.append)
    cold, warm = (outputs(list(result.embeddings)) for result in results)
    np.testing.assert_allclose(warm, cold, atol=1e-5)


@pytest.mark.parametrize(
    ("task", "pooling", "complaint"),
    [
        ("SequenceClassification", None, "cannot generate"),
        ("SequenceClassification", Pooling.LAST, "does not support last"),
        ("SequenceClassification", Pooling.TOKEN_CLASSIFY, "does not support token_classify"),
        ("TokenClassification", Pooling.CLASSIFY, "does not support classify"),
        ("CausalLM", Pooling.CLASSIFY, "does not support classify"),
    ],
)
def test_plans_for_which_the_model_has_no_head_are_invalid(
    tmp_path: Path, task: str, pooling: Pooling | None, complaint: str
) -> None:
    engine, _ = configured(save_classifier(tmp_path, "qwen3", task, 2))
    row = replace(open_row(0, PROMPTS[0], range(PAGES)), pooling=pooling)
    with pytest.raises(InvalidPlanError, match=complaint):
        engine.execute(StepPlan(StepId(1), opens=(row,)), lambda _result: None)


def test_a_token_classifier_cannot_use_a_cached_prefix(tmp_path: Path) -> None:
    engine, _ = configured(save_classifier(tmp_path, "qwen3", "TokenClassification", 2))
    hit = replace(open_row(0, PROMPTS[0], range(PAGES), computed=32, total=37), pooling=Pooling.TOKEN_CLASSIFY)
    with pytest.raises(InvalidPlanError, match="hidden states are lost"):
        engine.execute(StepPlan(StepId(1), opens=(hit,)), lambda _result: None)


def test_a_head_of_another_shape_is_refused_at_the_start(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, "qwen3", "SequenceClassification", 2)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "id2label": {"0": "a", "1": "b", "2": "c"}}))
    with pytest.raises(ConfigurationError, match="3 labels"):
        configured(model)


def test_dummy_weights_have_a_head(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, "qwen3", "SequenceClassification", 5)
    engine, _ = configured(model, load_format="dummy")
    assert outputs(classify(engine, PROMPTS[0], Pooling.CLASSIFY)).shape == (5,)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_without_any_head_embeds(tmp_path: Path, tied: bool) -> None:
    """As Qwen3-Embedding is published: names without a prefix, and often without a head of the vocabulary."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3Model(config)
    model.save_pretrained(tmp_path)
    engine, capacity = configured(tmp_path)
    assert (capacity.head, capacity.only_pools) == (None, True)
    with torch.inference_mode():
        expected = model.eval()(torch.tensor([PROMPTS[0]])).last_hidden_state[0, -1].numpy()
    np.testing.assert_allclose(outputs(classify(engine, PROMPTS[0], Pooling.LAST, (20,))), expected, atol=2e-5)
    row = open_row(0, PROMPTS[0], range(PAGES))
    with pytest.raises(InvalidPlanError, match="cannot generate"):
        engine.execute(StepPlan(StepId(1), opens=(row,)), lambda _result: None)

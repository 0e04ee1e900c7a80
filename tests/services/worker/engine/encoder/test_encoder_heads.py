"""Classification heads of encoders against the classes of `transformers` in fp32: single texts and pairs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from common.errors import ConfigurationError
from common.steps import StepPlan
from common.types import Pooling, StepId
from services.worker.engine.execution.interface import InvalidPlanError
from tests.services.worker.engine.encoder.test_encoder import PROMPTS, configured, opened, run, vectors, whole
from tests.services.worker.engine.encoder.tiny_bert import save_encoder
from tests.services.worker.engine.scenario import chunk

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

# Position at which the second text of each pair starts; None: a single text.
SECOND = (2, None, 20, 1, None, 59)


def reference(model: Path, prompt: list[int], task: str, second: int | None = None) -> NDArray[np.float32]:
    """Return the outputs of the class of `transformers`, [labels] or [tokens, labels]."""
    import transformers

    classifier = getattr(transformers, f"AutoModelFor{task}").from_pretrained(model, dtype=torch.float32).eval()
    types = [int(second is not None and position >= second) for position in range(len(prompt))]
    ids = torch.tensor([prompt])
    has_types = classifier.config.model_type != "modernbert"
    more = {"token_type_ids": torch.tensor([types])} if has_types else {}
    with torch.inference_mode():
        logits: NDArray[np.float32] = classifier(ids, attention_mask=torch.ones_like(ids), **more).logits[0].numpy()
    return logits


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta", "modernbert"])
@pytest.mark.parametrize("labels", [1, 3])
def test_sequence_classifiers_have_the_outputs_of_transformers(tmp_path: Path, name: str, labels: int) -> None:
    model = save_encoder(tmp_path, name, head="ForSequenceClassification", num_labels=labels)
    engine, capacity = configured(model)
    assert (capacity.head, capacity.only_pools, capacity.is_encoder) == (Pooling.CLASSIFY, True, True)
    got = vectors(run(engine, whole(PROMPTS, Pooling.CLASSIFY)))
    assert sorted(got) == list(range(len(PROMPTS)))
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(got[row], reference(model, prompt, "SequenceClassification"), rtol=1e-4, atol=5e-5)


def test_a_modern_classifier_may_read_the_mean_of_all_tokens(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "num_labels": 2,
        "classifier_pooling": "mean",
        "classifier_bias": True,
        "norm_bias": True,
    }
    model = save_encoder(tmp_path, "modernbert", head="ForSequenceClassification", **changes)
    got = vectors(run(configured(model)[0], whole(PROMPTS, Pooling.CLASSIFY)))
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(got[row], reference(model, prompt, "SequenceClassification"), rtol=1e-4, atol=5e-5)


def test_tokens_of_a_second_text_have_the_second_type(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "bert", head="ForSequenceClassification", num_labels=2)
    opens = tuple(
        replace(opened(row, prompt, Pooling.CLASSIFY), second_text_start=start)
        for row, (prompt, start) in enumerate(zip(PROMPTS, SECOND, strict=True))
    )
    chunks = tuple(chunk(row, 0, len(prompt)) for row, prompt in enumerate(PROMPTS))
    got = vectors(run(configured(model)[0], StepPlan(StepId(1), opens=opens, prefills=chunks)))
    for row, (prompt, start) in enumerate(zip(PROMPTS, SECOND, strict=True)):
        expected = reference(model, prompt, "SequenceClassification", start)
        np.testing.assert_allclose(got[row], expected, rtol=1e-4, atol=5e-5)
        if start is not None:
            single = reference(model, prompt, "SequenceClassification")
            assert float(np.abs(single - expected).max()) > 1e-3


def test_families_with_one_token_type_ignore_where_a_second_text_starts(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "xlm-roberta", head="ForSequenceClassification", num_labels=1)
    row = replace(opened(0, PROMPTS[2], Pooling.CLASSIFY), second_text_start=5)
    plan = StepPlan(StepId(1), opens=(row,), prefills=(chunk(0, 0, len(PROMPTS[2])),))
    got = vectors(run(configured(model)[0], plan))[0]
    np.testing.assert_allclose(got, reference(model, PROMPTS[2], "SequenceClassification"), rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_token_classifiers_have_the_outputs_of_transformers(tmp_path: Path, name: str) -> None:
    model = save_encoder(tmp_path, name, head="ForTokenClassification", num_labels=5)
    engine, capacity = configured(model)
    assert capacity.head is Pooling.TOKEN_CLASSIFY
    got = vectors(run(engine, whole(PROMPTS, Pooling.TOKEN_CLASSIFY)))
    for row, prompt in enumerate(PROMPTS):
        expected = reference(model, prompt, "TokenClassification")
        assert expected.shape == (len(prompt), 5)
        np.testing.assert_allclose(got[row].reshape(-1, 5), expected, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("pooling", [Pooling.MEAN, Pooling.TOKEN_CLASSIFY])
def test_a_classifier_has_no_other_pooling(tmp_path: Path, pooling: Pooling) -> None:
    engine, _ = configured(save_encoder(tmp_path, "bert", head="ForSequenceClassification"))
    with pytest.raises(InvalidPlanError, match="does not support"):
        run(engine, whole(PROMPTS[:1], pooling))


def test_heads_that_do_not_fit_the_configuration_are_refused_at_the_start(tmp_path: Path) -> None:
    save_encoder(tmp_path, "bert", head="ForSequenceClassification", num_labels=2)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "id2label": {"0": "a"}}))
    with pytest.raises(ConfigurationError, match="1 labels"):
        configured(tmp_path)
    file.write_text(json.dumps({**config, "problem_type": "ranking"}))
    with pytest.raises(ConfigurationError, match="'ranking' is not supported"):
        configured(tmp_path)
    with pytest.raises(ConfigurationError, match="this is an encoder"):
        configured(tmp_path, classifier_from_token=("no", "yes"))

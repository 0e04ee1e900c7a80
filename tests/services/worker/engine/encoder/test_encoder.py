"""Encoders against `transformers` in fp32: alone, in ragged batches, and as rows of plans."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from common.errors import ConfigurationError
from common.steps import EngineSpec, StepPlan
from common.types import FinishReason, Pooling, RowSlot, StepId
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.encoder import runner as runner_module
from services.worker.engine.encoder.runner import EncoderRunner
from services.worker.engine.execution.interface import InvalidPlanError
from services.worker.engine.execution.torch_model import TorchModel, torch_engine
from services.worker.engine.loader import load_model
from services.worker.engine.model_runner import ModelRunner
from tests.services.worker.engine.driving import random_ids
from tests.services.worker.engine.encoder.tiny_bert import ENCODERS, VOCABULARY, reference_states, save_encoder
from tests.services.worker.engine.scenario import chunk, open_row
from tests.services.worker.engine.tiny_llama import save_tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from common.steps import EngineCapacity, RowOpen, StepResult
    from services.worker.engine.execution.engine import ModelEngine

LENGTHS = (5, 1, 33, 17, 16, 60)
PROMPTS = [
    [2 + token % (VOCABULARY - 2) for token in random_ids(length, VOCABULARY, seed=length)] for length in LENGTHS
]


def configured(model: Path, **changes: object) -> tuple[ModelEngine, EngineCapacity]:
    fields: dict[str, object] = {"max_rows": 8, "max_step_tokens": 512, **changes}
    spec = EngineSpec(str(model), **fields)  # type: ignore[arg-type]  # whatever a test wants to change
    engine = torch_engine(lambda spec, report: load_model(spec, report, RunnerOptions(device="cpu", threads=1)))
    return engine, engine.configure(spec, lambda _fraction, _stage: None)


def opened(row: int, prompt: list[int], pooling: Pooling | None = Pooling.MEAN) -> RowOpen:
    return replace(open_row(row, prompt, total=len(prompt)), pooling=pooling)


def run(engine: ModelEngine, plan: StepPlan) -> StepResult:
    results: list[StepResult] = []
    engine.execute(plan, results.append)
    (result,) = results
    return result


def whole(prompts: list[list[int]], pooling: Pooling = Pooling.MEAN) -> StepPlan:
    opens = tuple(opened(row, prompt, pooling) for row, prompt in enumerate(prompts))
    chunks = tuple(chunk(row, 0, len(prompt)) for row, prompt in enumerate(prompts))
    return StepPlan(StepId(1), opens=opens, prefills=chunks)


def vectors(result: StepResult) -> dict[int, NDArray[np.float32]]:
    return {row: np.frombuffer(embedding, "<f4") for row, embedding in result.embeddings}


def expected(model: Path, prompt: list[int], pooling: Pooling) -> NDArray[np.float32]:
    states = reference_states(model, prompt)
    pooled = {Pooling.FIRST: states[0], Pooling.LAST: states[-1], Pooling.MEAN: states.mean(dim=0)}[pooling]
    vector: NDArray[np.float32] = pooled.numpy()
    return vector


def assert_embeds(model: Path, result: StepResult, prompts: list[list[int]], pooling: Pooling = Pooling.MEAN) -> None:
    """Row i has the embedding of prompt i, and there are no other rows."""
    got = vectors(result)
    assert sorted(got) == list(range(len(prompts)))
    for row, prompt in enumerate(prompts):
        np.testing.assert_allclose(got[row], expected(model, prompt, pooling), atol=2e-5)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_ragged_batch_has_the_embeddings_of_transformers(tmp_path: Path, name: str) -> None:
    model = save_encoder(tmp_path, name)
    engine, capacity = configured(model)
    assert capacity.is_encoder
    assert (capacity.device_pages, capacity.kv_bytes_per_token, capacity.eos_token_ids) == (0, 0, ())
    result = run(engine, whole(PROMPTS))
    assert [(stop.row, stop.reason) for stop in result.stops] == [(row, FinishReason.STOP) for row in range(6)]
    assert result.token_ids.size == 0
    assert_embeds(model, result, PROMPTS)


@pytest.mark.parametrize("pooling", [each for each in Pooling if each.embeds])
def test_an_encoder_supports_each_kind_of_pooling(tmp_path: Path, pooling: Pooling) -> None:
    model = save_encoder(tmp_path)
    assert_embeds(model, run(configured(model)[0], whole(PROMPTS[:3], pooling)), PROMPTS[:3], pooling)


def test_a_text_alone_has_the_embedding_that_it_has_among_others(tmp_path: Path) -> None:
    engine, _ = configured(save_encoder(tmp_path))
    together = vectors(run(engine, whole(PROMPTS)))
    for row, prompt in enumerate(PROMPTS):
        engine.reset()
        np.testing.assert_allclose(vectors(run(engine, whole([prompt])))[0], together[row], atol=1e-6)


def test_a_closed_slot_is_reused_and_a_reset_closes_all_rows(tmp_path: Path) -> None:
    model = save_encoder(tmp_path)
    engine, _ = configured(model)
    run(engine, whole(PROMPTS[:2]))
    again = opened(0, PROMPTS[3])
    plan = StepPlan(StepId(2), closes=(RowSlot(0),), opens=(again,), prefills=(chunk(0, 0, len(PROMPTS[3])),))
    np.testing.assert_allclose(vectors(run(engine, plan))[0], expected(model, PROMPTS[3], Pooling.MEAN), atol=2e-5)
    assert engine.open_rows == 2
    engine.reset()
    assert engine.open_rows == 0


def test_weights_saved_with_a_head_are_found(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "roberta", head="ForMaskedLM")
    (vector,) = vectors(run(configured(model)[0], whole(PROMPTS[:1]))).values()
    np.testing.assert_allclose(vector, expected(model, PROMPTS[0], Pooling.MEAN), atol=2e-5)


@pytest.mark.parametrize(("name", "context"), [("bert", 66), ("roberta", 64)])
def test_the_longest_text_is_embedded(tmp_path: Path, name: str, context: int) -> None:
    model = save_encoder(tmp_path, name)
    engine, capacity = configured(model)
    assert capacity.max_context == context
    longest = [5 + i % 100 for i in range(context)]
    np.testing.assert_allclose(
        vectors(run(engine, whole([longest])))[0], expected(model, longest, Pooling.MEAN), atol=2e-5
    )


def test_an_encoder_s_context_is_limited_to_one_pass(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    assert configured(tmp_path, max_step_tokens=32)[1].max_context == 32
    assert configured(tmp_path, max_context=20)[1].max_context == 20


def test_bfloat16_embeddings_are_close_to_the_reference(tmp_path: Path) -> None:
    model = save_encoder(tmp_path)
    got = vectors(run(configured(model, dtype="bfloat16")[0], whole(PROMPTS)))
    assert sorted(got) == list(range(len(PROMPTS)))
    for row, vector in got.items():
        wanted = expected(model, PROMPTS[row], Pooling.MEAN)
        assert float(vector @ wanted) > 0.995 * float(np.linalg.norm(vector) * np.linalg.norm(wanted))


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        (StepPlan(StepId(1), opens=(opened(0, PROMPTS[0]),), prefills=(chunk(0, 0, 3),)), "in one pass"),
        (StepPlan(StepId(1), opens=(open_row(0, PROMPTS[0]),)), "cannot generate"),
    ],
)
def test_plans_that_an_encoder_cannot_run_are_invalid(tmp_path: Path, plan: StepPlan, complaint: str) -> None:
    with pytest.raises(InvalidPlanError, match=complaint):
        run(configured(save_encoder(tmp_path))[0], plan)


def test_where_memory_does_not_suffice_fewer_texts_are_computed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_encoder(tmp_path)
    engine, _ = configured(model)
    assert isinstance(engine._model, TorchModel)
    assert isinstance(engine._model.runner, EncoderRunner)
    encoder = engine._model.runner.encoder
    forward = encoder.forward

    def short_of_memory(token_ids: torch.Tensor, *others: Any) -> torch.Tensor:
        if len(token_ids) > 40:
            raise torch.OutOfMemoryError("made up")
        return forward(token_ids, *others)

    monkeypatch.setattr(encoder, "forward", short_of_memory)
    result = run(engine, whole(PROMPTS))
    assert_embeds(model, result, PROMPTS[:5])
    assert [stop.row for stop in result.stops if stop.reason is FinishReason.ERROR] == [5]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"hidden_act": "tanh"}, "tanh"),
        ({"is_decoder": True}, "is_decoder"),
        ({"num_attention_heads": 5}, "5 heads"),
        ({"layer_norm_eps": None}, "layer_norm_eps"),
    ],
)
def test_unsupported_encoder_configurations_are_refused_at_the_start(
    tmp_path: Path, changes: dict[str, object], complaint: str
) -> None:
    save_encoder(tmp_path)
    file = tmp_path / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    with pytest.raises(ConfigurationError, match=complaint):
        configured(tmp_path)


@pytest.mark.parametrize(
    ("changes", "complaint"), [({"world_size": 2}, "one rank"), ({"load_format": "dummy"}, "dummy")]
)
def test_unsupported_encoder_settings_are_refused(tmp_path: Path, changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        configured(save_encoder(tmp_path), **changes)


def test_other_models_are_decoders(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    runner = load_model(
        EngineSpec(str(tmp_path), device_pages=4), lambda _f, _s: None, RunnerOptions(device="cpu", threads=1)
    )
    assert isinstance(runner, ModelRunner)
    assert not runner.capacity.is_encoder


def test_loading_an_encoder_imports_its_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr(runner_module, "import_flash_attention", devices.append)
    configured(save_encoder(tmp_path))
    assert devices == [torch.device("cpu")]

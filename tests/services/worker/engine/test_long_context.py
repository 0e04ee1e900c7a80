"""Contexts beyond the one that a model was trained with: stretched rotary embeddings, and prompts of many chunks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from common.errors import ConfigurationError
from common.models import resolve_model
from common.models.rope import with_rope_parameters
from common.steps import EngineSpec
from common.tokenization.text_model import load_text_model
from deploy.evaluation.experiments.long_context import TINY, YARN, LongContextBench, LongContextFigures
from services.worker.engine.encoder.runner import EncoderRunner
from tests.services.scheduler.core.harness import Harness, make_request
from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.families import FAMILIES, VOCABULARY, reference_logits, save_model
from tests.services.worker.engine.test_window_pool import EngineWorker
from tests.services.worker.engine.test_window_pool import load as load_engine

if TYPE_CHECKING:
    from pathlib import Path

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SHORT_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("parameters", [LLAMA3, SHORT_YARN, {"rope_type": "linear", "factor": 4.0}])
@pytest.mark.parametrize("theta", [10_000.0, 500.0])
def test_stretched_embeddings_are_those_of_the_same_config(
    parameters: dict[str, Any], theta: float, tmp_path: Path
) -> None:
    context = int(64 * parameters["factor"])
    name, own = FAMILIES["llama"]
    plain = {**own, "max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    stretched = {**own, "max_position_embeddings": context, "rope_parameters": {**parameters, "rope_theta": theta}}
    save_model(tmp_path / "plain", name, plain)
    save_model(tmp_path / "stretched", name, stretched)
    prompt = random_ids(200, VOCABULARY)
    runner = load(tmp_path / "plain", rope_parameters=json.dumps(parameters))
    assert runner.capacity.max_context == context
    driver = Driver(runner)
    got = driver.run([(driver.open(200), prompt)], all_tokens=True)
    torch.testing.assert_close(got, reference_logits(tmp_path / "stretched", prompt), atol=5e-4, rtol=1e-4)
    same = load(tmp_path / "stretched")
    assert same.capacity.max_context == context
    assert same.capacity.fingerprint != load(tmp_path / "plain").capacity.fingerprint


def test_requests_are_checked_against_the_stretched_context(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    files = resolve_model(str(tmp_path), weights=False)
    plain, stretched = (load_text_model(files, placeholder=True, rope_parameters=each) for each in (None, YARN))
    assert (plain.max_context_tokens, stretched.max_context_tokens) == (32_768, 131_072)


def test_the_text_model_of_a_container_is_stretched() -> None:
    found = with_rope_parameters({"model_type": "mistral3", "text_config": TINY}, YARN)
    assert found["text_config"]["max_position_embeddings"] == 131_072
    assert found["text_config"]["rope_parameters"] == YARN


@pytest.mark.parametrize(
    ("config", "parameters", "complaint"),
    [
        (TINY, {"factor": 4}, "has no rope_type"),
        (TINY, {"rope_type": "yarn"}, "factor has to be a number of at least 1, not None"),
        (TINY, {"rope_type": "yarn", "factor": 0.5}, "at least 1, not 0.5"),
        ({"model_type": "x"}, {"rope_type": "yarn", "factor": 2}, "no original_max_position_embeddings"),
        ({**TINY, "rope_parameters": {"full_attention": {}}}, YARN, "kinds of layers that have their own"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(
    config: dict[str, Any], parameters: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        with_rope_parameters(config, parameters)


def test_models_whose_embedding_cannot_be_stretched_are_refused(tmp_path: Path) -> None:
    rope = json.dumps(YARN)
    with pytest.raises(ConfigurationError, match="this is a GGUF file"):
        load("smollm2-135m-instruct", rope_parameters=rope)
    (tmp_path / "config.json").write_text('{"model_type": "starcoder2"}')
    with pytest.raises(ConfigurationError, match="'starcoder2' runs through transformers"):
        load(tmp_path, load_format="dummy", rope_parameters=rope)
    with pytest.raises(ConfigurationError, match="a JSON object is expected"):
        load(tmp_path, load_format="dummy", rope_parameters="[]")
    with pytest.raises(ConfigurationError, match="this is an encoder"):
        EncoderRunner.load(tmp_path, EngineSpec(str(tmp_path), rope_parameters=rope), lambda *_: None, None)  # type: ignore[arg-type]  # refused before options are read


def measured(directory: Path, length: int) -> LongContextFigures:
    (directory / "config.json").write_text(json.dumps(TINY))
    spec = EngineSpec(
        str(directory), load_format="dummy", dtype="float32", max_step_tokens=2048, rope_parameters=json.dumps(YARN)
    )
    return LongContextBench(spec, length=length, rows=3, new_tokens=12, device="cpu", threads=1).run()


@pytest.mark.parametrize(
    "length", [33_333, pytest.param(131_072 - 12, marks=[pytest.mark.extended, pytest.mark.timeout(900)])]
)
def test_a_long_prompt_continues_the_same_from_the_host_tier(length: int, tmp_path: Path) -> None:
    figures = measured(tmp_path, length)
    assert len(figures.itl_beside_prefill_ms) == -(-length // 2045)
    assert figures.ttft_ms == sum(figures.itl_beside_prefill_ms)
    assert len(figures.itl_afterwards_ms) == 11
    # Two layers, keys and values of 16 numbers in four bytes.
    assert figures.bytes_copied == -(-length // 16) * 16 * 2 * 2 * 16 * 4
    assert len(figures.tokens) == 12
    assert len(set(figures.tokens)) > 1
    assert figures.tokens_after_load == figures.tokens


def test_the_scheduler_cuts_a_long_prompt_beside_rows_that_decode(tmp_path: Path) -> None:
    """Every token of the short rows comes while the prompt is computed; found in the cache, it continues the same."""
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "vocab_size": VOCABULARY}))
    length, context, pages, chunk = 33_000, 33_100, 4200, 2048
    engine, capacity = load_engine(
        tmp_path, "auto", 16, load_format="dummy", rope_parameters=json.dumps(YARN), max_context=context,
        device_pages=pages, max_step_tokens=chunk, window_pages=None, window_ratio=0.0,
    )  # fmt: skip
    assert capacity.max_context == context
    harness = Harness(pages=pages, page_size=16, max_rows=3, max_context=context, max_step_tokens=chunk, cache="shared")
    harness.worker = worker = EngineWorker(engine)
    for number in range(2):
        harness.core.submit(make_request(f"short{number}", random_ids(20, VOCABULARY, seed=number), max_tokens=12), 0.0)
    harness.plan()
    harness.result()
    prompt = random_ids(length, VOCABULARY, seed=7)
    harness.core.submit(make_request("long", prompt, max_tokens=5), 0.0)
    harness.run()
    rows = [row for row, _ in worker.told]
    assert rows.index(rows[-1]) == sum(len(harness.outputs[f"short{number}", 0]) for number in range(2)) > 2
    harness.core.submit(make_request("again", prompt, max_tokens=5), 0.0)
    harness.run()
    harness.audit()
    assert harness.cached["again", 0] >= length - 16
    assert harness.outputs["again", 0] == harness.outputs["long", 0]
    engine.close()

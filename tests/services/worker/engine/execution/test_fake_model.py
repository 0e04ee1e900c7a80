from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.prompt_logprobs import PromptLogprobs
from common.steps import EngineSpec, StepPlan, StepResult
from common.transfers import Transfer, TransferDirection, TransferId
from common.types import Pooling, SamplingParams, StepId
from services.worker.engine.execution.fake_model import DEFAULT_CONTEXT, FIRST_WORD, FakeOptions, fake_engine
from services.worker.engine.execution.interface import InvalidPlanError
from tests.services.worker.engine.scenario import chunk, ids, open_row, tokens_by_row

if TYPE_CHECKING:
    from services.worker.engine.execution.engine import ModelEngine

BACKUP, LOAD = TransferDirection.DEVICE_TO_HOST, TransferDirection.HOST_TO_DEVICE
SPEC = EngineSpec("anything", "fake", max_rows=300)


def generate(engine: ModelEngine, seeds: list[int], steps: int = 8, prompt: int = 3) -> list[list[int]]:
    """Open one row for each seed and return what each generates."""
    opens = tuple(
        open_row(
            i, range(prompt), [2 * i, 2 * i + 1], total=prompt + steps, stop=(2,), sampling=SamplingParams(seed=seed)
        )
        for i, seed in enumerate(seeds)
    )
    chunks = tuple(chunk(i, 0, prompt) for i in range(len(seeds)))
    results: list[StepResult] = []
    engine.reset()
    engine.execute(StepPlan(StepId(1), opens=opens, prefills=chunks, steps=steps), results.append)
    return [[tokens_by_row(result)[i] for result in results if i in tokens_by_row(result)] for i in range(len(seeds))]


def configured(options: FakeOptions | None = None, sleep: object = None) -> ModelEngine:
    engine = fake_engine(options, sleep or (lambda _seconds: None))  # type: ignore[arg-type]
    engine.configure(SPEC, lambda _fraction, _stage: None)
    return engine


def test_tokens_are_a_function_of_seed_and_position() -> None:
    engine = configured()
    first, second = generate(engine, [5, 2**64 - 1])
    assert generate(engine, [2**64 - 1, 7, 5])[2] == first
    assert first != second
    # One position further on, the same tokens one step earlier.
    assert generate(engine, [5], prompt=4)[0][:-1] == first[1:]


def test_fake_tokens_are_vocabulary_words_and_never_eos() -> None:
    engine = configured(FakeOptions(vocabulary_size=2000))
    tokens = np.array(generate(engine, list(range(200)), steps=20))
    assert tokens.shape == (200, 20)
    assert tokens.min() >= 1000
    assert tokens.max() < 2000
    assert configured().configure(SPEC, lambda _fraction, _stage: None).vocabulary_size > FIRST_WORD


def test_an_embedding_is_a_function_of_all_ids() -> None:
    engine = configured(FakeOptions(embedding_dimensions=8))
    prompts = ([1, 2, 3], [1, 2, 4], [1, 2, 3])
    opens = tuple(replace(open_row(i, prompt, [i], total=3), pooling=Pooling.MEAN) for i, prompt in enumerate(prompts))
    results: list[StepResult] = []
    engine.execute(StepPlan(StepId(1), opens=opens, prefills=tuple(chunk(i, 0, 3) for i in range(3))), results.append)
    first, other, again = (np.frombuffer(embedding, "<f4") for _, embedding in results[0].embeddings)
    assert first.shape == (8,)
    assert abs(float(np.linalg.norm(first)) - 1) < 1e-6
    np.testing.assert_array_equal(first, again)
    assert abs(float(first @ other)) < 0.999


def test_eos_is_sampled_with_the_configured_probability() -> None:
    engine = configured(FakeOptions(eos_probability=0.25))
    ended = [tokens[-1] == 2 for tokens in generate(engine, list(range(250)), steps=1)]
    assert 0.15 < np.mean(ended) < 0.35


def test_a_pass_takes_its_configured_time() -> None:
    slept: list[float] = []
    engine = configured(FakeOptions(step_s=0.25), slept.append)
    generate(engine, [1], steps=3)
    assert slept == [0.25] * 3


def test_capacity_is_the_requested_one_or_enough_for_every_row() -> None:
    engine = fake_engine()
    asked = engine.configure(replace(SPEC, device_pages=77, max_context=100), lambda _fraction, _stage: None)
    assert (asked.device_pages, asked.max_context, asked.eos_token_ids) == (77, 100, (2,))
    default = engine.configure(SPEC, lambda _fraction, _stage: None)
    assert default.device_pages * default.page_size == SPEC.max_rows * DEFAULT_CONTEXT


def moving(*transfers: Transfer) -> tuple[ModelEngine, list[StepResult]]:
    """Return an engine with a host tier that has begun these transfers, and where its results go."""
    engine = fake_engine(FakeOptions(transfer_passes=2))
    engine.configure(replace(SPEC, host_pages=20), lambda _fraction, _stage: None)
    results: list[StepResult] = []
    engine.execute(StepPlan(StepId(1), transfers=transfers), results.append)
    return engine, results


def transfer(number: int, direction: TransferDirection, device: list[int], host: list[int]) -> Transfer:
    return Transfer(TransferId(number), direction, ids(device), ids(host))


def test_a_transfer_is_acknowledged_once_and_not_by_its_own_plan() -> None:
    engine, results = moving(transfer(1, BACKUP, [3, 4], [5, 6]))
    for step in range(2, 5):
        engine.execute(StepPlan(StepId(step)), results.append)
    assert [[(ack.transfer_id, ack.done_pages) for ack in result.acks] for result in results] == [[], [(1, 2)], [], []]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (transfer(1, BACKUP, [3], [5]), transfer(1, BACKUP, [4], [6])),
        (transfer(1, BACKUP, [3], [5]), transfer(2, BACKUP, [4], [5])),
        (transfer(1, BACKUP, [3], [5]), transfer(2, LOAD, [3], [6])),
        (transfer(1, BACKUP, [3], [5]), transfer(2, LOAD, [4], [5])),
        (transfer(1, LOAD, [3], [5]), transfer(2, LOAD, [3], [6])),
        (transfer(1, LOAD, [3], [5]), transfer(2, BACKUP, [3], [6])),
        (transfer(1, LOAD, [3], [5]), transfer(2, BACKUP, [4], [5])),
    ],
)
def test_races_between_transfers_are_refused(first: Transfer, second: Transfer) -> None:
    with pytest.raises(InvalidPlanError, match="transfer"):
        moving(first, second)


def test_a_new_stream_begins_without_transfers() -> None:
    engine, results = moving(transfer(1, BACKUP, [3], [5]))
    engine.reset()
    before = len(results)
    for step in range(1, 4):
        engine.execute(StepPlan(StepId(step)), results.append)
    assert len(results) == before + 3
    assert not any(result.acks for result in results)


def test_an_engine_without_host_tier_refuses_transfers() -> None:
    with pytest.raises(InvalidPlanError, match="a host page outside"):
        configured().execute(StepPlan(StepId(1), transfers=(transfer(1, BACKUP, [3], [0]),)), lambda _result: None)


def test_256_rows_generate_together() -> None:
    engine = configured()
    tokens = generate(engine, list(range(256)), steps=8)
    assert [len(row) for row in tokens] == [8] * 256


def test_nothing_of_torch_is_imported() -> None:
    code = "import sys, services.worker.__main__; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"


def test_the_fake_model_scores_prompts_with_invented_values() -> None:
    engine = fake_engine()
    engine.configure(SPEC, lambda *_: None)
    wanted = PromptLogprobs(1, 2, (9,))
    opened = replace(open_row(0, range(10, 20), [0]), prompt_logprobs=wanted)
    results: list[StepResult] = []
    engine.execute(StepPlan(StepId(1), opens=(opened,), prefills=(chunk(0, 0, 10),)), results.append)
    ((_, span),) = [entry for result in results for entry in result.prompt_logprobs]
    assert span.token_ids.tolist() == list(range(12, 20))
    assert span.top_ids.shape == span.top_logprobs.shape == (8, 2)
    assert span.asked.shape == (8, 1)

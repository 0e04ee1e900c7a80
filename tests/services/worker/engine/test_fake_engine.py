from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np

from common.steps import EngineSpec, StepPlan, StepResult
from common.types import SamplingParams, StepId
from services.worker.engine.fake_engine import DEFAULT_CONTEXT, FIRST_WORD, FakeEngine, FakeOptions
from tests.services.worker.engine.scenario import chunk, open_row, tokens_by_row

SPEC = EngineSpec("anything", "fake", max_rows=300)


def generate(engine: FakeEngine, seeds: list[int], steps: int = 8, prompt: int = 3) -> list[list[int]]:
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


def configured(options: FakeOptions | None = None, sleep: object = None) -> FakeEngine:
    engine = FakeEngine(options, sleep or (lambda _seconds: None))  # type: ignore[arg-type]
    engine.configure(SPEC, lambda _fraction, _stage: None)
    return engine


def test_tokens_are_a_function_of_seed_and_position() -> None:
    engine = configured()
    first, second = generate(engine, [5, 2**64 - 1])
    assert generate(engine, [2**64 - 1, 7, 5])[2] == first
    assert first != second
    # One position further on, the same tokens one step earlier.
    assert generate(engine, [5], prompt=4)[0][:-1] == first[1:]


def test_tokens_are_words_of_the_vocabulary_and_never_its_end() -> None:
    engine = configured(FakeOptions(vocabulary_size=2000))
    tokens = np.array(generate(engine, list(range(200)), steps=20))
    assert tokens.shape == (200, 20)
    assert tokens.min() >= 1000
    assert tokens.max() < 2000
    assert configured().configure(SPEC, lambda _fraction, _stage: None).vocabulary_size > FIRST_WORD


def test_the_end_comes_as_often_as_asked() -> None:
    engine = configured(FakeOptions(eos_probability=0.25))
    ended = [tokens[-1] == 2 for tokens in generate(engine, list(range(250)), steps=1)]
    assert 0.15 < np.mean(ended) < 0.35


def test_a_pass_takes_the_time_it_was_told_to() -> None:
    slept: list[float] = []
    engine = configured(FakeOptions(step_s=0.25), slept.append)
    generate(engine, [1], steps=3)
    assert slept == [0.25] * 3


def test_capacity_is_what_was_asked_for_or_enough_for_every_row() -> None:
    engine = FakeEngine()
    asked = engine.configure(replace(SPEC, device_pages=77, max_context=100), lambda _fraction, _stage: None)
    assert (asked.device_pages, asked.max_context, asked.eos_token_ids) == (77, 100, (2,))
    default = engine.configure(SPEC, lambda _fraction, _stage: None)
    assert default.device_pages * default.page_size == SPEC.max_rows * DEFAULT_CONTEXT


def test_a_full_house_of_rows_runs_in_few_passes() -> None:
    engine = configured()
    tokens = generate(engine, list(range(256)), steps=8)
    assert all(len(row) == 8 for row in tokens)


def test_nothing_of_torch_is_imported() -> None:
    code = "import sys, services.worker.__main__, services.worker.engine.fake_engine; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"

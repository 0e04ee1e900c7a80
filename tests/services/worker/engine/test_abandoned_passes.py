"""Passes that are abandoned between layers, and their rows afterwards, on every backend of this processor."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from common.steps import EngineSpec, StepPlan, StepResult
from common.types import RowSlot, StepId
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.loader import load_decoder
from tests.services.worker.engine.scenario import chunk, ids, open_row, tokens_by_row

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from services.worker.engine.execution.engine import ModelEngine

LAYERS, TOKENS = 5, 6
PROMPT = [5, 17, 3, 80, 41, 22, 9, 60, 33, 71]
OPENED = open_row(0, PROMPT, [3, 1], total=len(PROMPT) + TOKENS)
PREFILL = StepPlan(StepId(1), opens=(OPENED,), prefills=(chunk(0, 0, len(PROMPT)),), can_abandon=True)
DECODE = StepPlan(StepId(2), steps=TOKENS - 1, can_abandon=True)


class Calls:
    """Says that a plan is overtaken at the call of this number; counts the calls."""

    def __init__(self, overtaken_at: int | None = None) -> None:
        self._at = overtaken_at
        self.made = 0

    def __call__(self) -> bool:
        self.made += 1
        return self._at is not None and self.made > self._at


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=2, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(params=["compiled", "torch"])
def engine(checkpoint: Path, request: pytest.FixtureRequest) -> ModelEngine:
    options = RunnerOptions(threads=1, backend=request.param)
    engine = torch_engine(lambda spec, report: load_decoder(spec, report, options))
    spec = EngineSpec(str(checkpoint), dtype="float32", max_rows=4, max_context=256, page_size=8, device_pages=16)
    assert engine.configure(spec, lambda _fraction, _stage: None).abandons_passes
    return engine


def run(engine: ModelEngine, plan: StepPlan, is_overtaken: Callable[[], bool]) -> list[StepResult]:
    results: list[StepResult] = []
    engine.execute(plan, results.append, is_overtaken)
    return results


def tokens(results: list[StepResult]) -> list[int]:
    return [token for result in results for token in result.token_ids.tolist()]


def test_passes_that_can_be_abandoned_but_are_not_give_the_same_tokens(engine: ModelEngine) -> None:
    expected = []
    for plan in (PREFILL, DECODE):
        expected += tokens(run(engine, replace(plan, can_abandon=False), Calls()))
    assert len(expected) == TOKENS
    engine.reset()
    calls = Calls()
    assert tokens(run(engine, PREFILL, calls) + run(engine, DECODE, calls)) == expected
    # Before each layer but the last, and at the beginning of a plan.
    assert calls.made == TOKENS * (LAYERS - 1) + 2


@pytest.mark.parametrize("overtaken_at", [0, 1, LAYERS - 1])
def test_a_row_whose_prompt_was_abandoned_is_computed_again(engine: ModelEngine, overtaken_at: int) -> None:
    expected = tokens(run(engine, PREFILL, Calls()) + run(engine, DECODE, Calls()))
    engine.reset()
    (result,) = run(engine, PREFILL, Calls(overtaken_at))
    assert result.abandoned
    assert result.last
    assert not tokens([result])
    # A plan of more of the same that was sent before is abandoned, too, though its chunks do not fit the row any more.
    (result,) = run(engine, replace(DECODE, can_abandon=True), Calls(0))
    assert result.abandoned
    urgent = StepPlan(
        StepId(3), closes=(RowSlot(0),), opens=(replace(OPENED, row=RowSlot(2)),), prefills=(chunk(2, 0, len(PROMPT)),)
    )
    assert tokens(run(engine, urgent, Calls(0)) + run(engine, replace(DECODE, can_abandon=False), Calls(0))) == expected


def test_tokens_of_the_passes_before_an_abandoned_one_are_reported(engine: ModelEngine) -> None:
    expected = tokens(run(engine, PREFILL, Calls()) + run(engine, DECODE, Calls()))
    engine.reset()
    results = run(engine, PREFILL, Calls())
    # In the third pass.
    results += run(engine, DECODE, Calls(1 + 2 * (LAYERS - 1) + 1))
    assert [result.abandoned for result in results] == [False, False, False, True]
    assert tokens(results) == expected[:3]
    assert [result.last for result in results] == [True, False, False, True]


@pytest.mark.parametrize("passes", [0, 2])
def test_passes_that_a_prompt_need_not_wait_for_are_left_out(engine: ModelEngine, passes: int) -> None:
    expected = tokens(run(engine, PREFILL, Calls()) + run(engine, DECODE, Calls()))
    engine.reset()
    results = run(engine, PREFILL, Calls())
    shortened = replace(DECODE, can_abandon=False, can_shorten=True)
    results += run(engine, shortened, Calls(passes))
    assert [(result.substep, result.abandoned, result.last) for result in results[1:]] == [
        *((number, False, False) for number in range(passes)), (passes, True, True),
    ]  # fmt: skip
    # The row gets on beside the prompt, and after it.
    other = replace(OPENED, row=RowSlot(2), pages=ids([5, 6]))
    with_prompt = StepPlan(StepId(3), opens=(other,), prefills=(chunk(2, 0, len(PROMPT)),))
    (beside,) = run(engine, with_prompt, Calls(0))
    assert tokens_by_row(beside) == {0: expected[passes + 1], 2: expected[0]}
    calls = Calls()
    after = run(engine, replace(shortened, step_id=StepId(4)), calls)
    assert [tokens_by_row(result).get(0) for result in after[: TOKENS - passes - 2]] == expected[passes + 2 :]
    # Asked before each pass, and not amid one.
    assert calls.made == len(after)

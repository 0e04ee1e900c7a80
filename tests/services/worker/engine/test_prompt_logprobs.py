"""Log probabilities of prompts, against `transformers` in fp32."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from common.prompt_logprobs import MAX_PART_VALUES, PromptLogprobs, PromptLogprobSpan
from common.steps import EngineSpec, StepPlan, StepResult
from common.types import RowSlot, StepId
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.interface import InvalidPlanError
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.loader import load_decoder
from services.worker.engine.sampling import logprobs as prompt_scores
from tests.services.worker.engine.driving import random_ids
from tests.services.worker.engine.scenario import chunk, open_row
from tests.services.worker.engine.tiny_llama import VOCABULARY, save_tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

    from services.worker.engine.execution.engine import ModelEngine
    from tests.services.worker.engine.parallel.ranks import Ranks

TOLERANCE = 1e-3
PROMPT = random_ids(90, VOCABULARY)
OTHER = random_ids(50, VOCABULARY, seed=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(directory)
    return directory


@pytest.fixture(scope="module")
def expected(model: Path) -> torch.Tensor:
    """What each position of PROMPT says of the token behind it, [tokens, vocabulary]."""
    import transformers

    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        return torch.log_softmax(loaded(torch.tensor([PROMPT])).logits[0], dim=-1)


def load(model: Path, rank: int = 0, world_size: int = 1, rendezvous: str = "") -> ModelEngine:
    engine = torch_engine(lambda spec, report: load_decoder(spec, report, RunnerOptions(threads=1)))
    spec = EngineSpec(
        str(model), dtype="float32", rank=rank, world_size=world_size, rendezvous=rendezvous, max_rows=4,
        max_context=256, page_size=16, device_pages=64,
    )  # fmt: skip
    engine.configure(spec, lambda _fraction, _stage: None)
    return engine


@pytest.fixture(scope="module")
def loaded(model: Path) -> ModelEngine:
    return load(model)


@pytest.fixture
def engine(loaded: ModelEngine) -> ModelEngine:
    loaded.reset()
    return loaded


def plans(wanted: PromptLogprobs, lengths: list[int], *, computed: int = 0) -> list[StepPlan]:
    """Return plans that prefill PROMPT in chunks of `lengths`, beside a row that decodes."""
    other = open_row(3, OTHER, range(20, 26), total=100)
    opened = replace(open_row(1, PROMPT, range(8), total=100, computed=computed), prompt_logprobs=wanted)
    made = [StepPlan(StepId(1), opens=(other,), prefills=(chunk(3, 0, len(OTHER)),))]
    start = computed
    for length in lengths:
        opens = (opened,) if start == computed else ()
        made.append(StepPlan(StepId(2 + start), opens=opens, prefills=(chunk(1, start, length),)))
        start += length
    return made


def results_of(engine: ModelEngine, made: list[StepPlan]) -> list[StepResult]:
    results: list[StepResult] = []
    for plan in made:
        engine.execute(plan, results.append)
    return results


def spans_of(results: list[StepResult], row: int = 1) -> list[PromptLogprobSpan]:
    return [span for result in results for of, span in result.prompt_logprobs if of == row]


def check(spans: list[PromptLogprobSpan], expected: torch.Tensor, wanted: PromptLogprobs) -> None:
    position = wanted.start + 1
    for span in spans:
        assert span.first == position
        told = expected[position - 1 : position - 1 + span.tokens]
        targets = torch.tensor(PROMPT[position : position + span.tokens])
        own = told.gather(1, targets[:, None])
        assert span.token_ids.tolist() == targets.tolist()
        np.testing.assert_allclose(span.logprobs, own[:, 0], atol=TOLERANCE)
        assert span.ranks.tolist() == ((told > own).sum(-1) + 1).tolist()
        best = told.topk(wanted.top) if wanted.top else None
        assert span.top_ids.tolist() == (best.indices.tolist() if best else [[]] * span.tokens)
        np.testing.assert_allclose(span.top_logprobs, best.values if best else np.empty((span.tokens, 0)), atol=1e-3)
        np.testing.assert_allclose(span.asked, told[:, list(wanted.token_ids)], atol=TOLERANCE)
        position += span.tokens
    assert position == len(PROMPT)


@pytest.mark.parametrize("lengths", [[90], [30, 60], [1, 1, 87, 1], [89, 1]], ids=str)
@pytest.mark.parametrize(
    "wanted", [PromptLogprobs(), PromptLogprobs(0, 5, (7, 3)), PromptLogprobs(37, 2), PromptLogprobs(88, 1)], ids=str
)
def test_prompt_logprobs_equal_those_of_transformers_for_any_chunks(
    engine: ModelEngine, expected: torch.Tensor, lengths: list[int], wanted: PromptLogprobs
) -> None:
    check(spans_of(results_of(engine, plans(wanted, lengths))), expected, wanted)


def test_prompt_logprobs_after_a_cached_prefix(engine: ModelEngine, expected: torch.Tensor) -> None:
    results_of(engine, plans(PromptLogprobs(), [90]))
    wanted = PromptLogprobs(40, 3)
    again = replace(open_row(0, PROMPT, range(8), computed=32, total=100), prompt_logprobs=wanted)
    plan = StepPlan(StepId(200), closes=(RowSlot(1),), opens=(again,), prefills=(chunk(0, 32, 58),))
    check(spans_of(results_of(engine, [plan]), row=0), expected, wanted)


def test_prompt_logprobs_of_a_row_do_not_change_the_tokens_of_others(engine: ModelEngine) -> None:
    alone = [result.token_ids.tolist() for result in results_of(engine, plans(PromptLogprobs(), [30, 60])[:1])]
    engine.reset()
    beside = results_of(engine, plans(PromptLogprobs(0, 4), [30, 60]))
    assert [result.token_ids.tolist() for result in beside if not result.partial][:1] == alone


def test_logits_are_made_in_slices(
    engine: ModelEngine, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_scores, "SLICE_BYTES", 7 * 4 * VOCABULARY)
    wanted = PromptLogprobs(0, 3)
    check(spans_of(results_of(engine, plans(wanted, [60, 30]))), expected, wanted)


def test_results_with_prompt_logprobs_are_bounded_and_precede_the_result_of_their_pass(engine: ModelEngine) -> None:
    results = results_of(engine, plans(PromptLogprobs(0, 90, tuple(range(96)) * 10), [90]))[1:]
    *partial, last = results
    assert len(partial) > 1
    assert all(result.partial and not result.last and not result.rows.size for result in partial)
    assert all(sum(span.values for _, span in result.prompt_logprobs) <= 2 * MAX_PART_VALUES for result in partial)
    assert last.last
    assert not last.partial
    assert not last.prompt_logprobs


def test_a_row_without_prompt_logprobs_gets_none_in_a_reused_slot(engine: ModelEngine) -> None:
    results_of(engine, plans(PromptLogprobs(), [90]))
    plan = StepPlan(
        StepId(200),
        closes=(RowSlot(1),),
        opens=(open_row(1, PROMPT, range(8), total=100),),
        prefills=(chunk(1, 0, 90),),
    )
    assert not spans_of(results_of(engine, [plan]))


def test_positions_that_are_not_computed_cannot_be_asked_for(engine: ModelEngine) -> None:
    with pytest.raises(InvalidPlanError, match="log probabilities from 31 on"):
        results_of(engine, plans(PromptLogprobs(31), [58], computed=32))


def run_rank(rank: int, world_size: int, rendezvous: str, model: Path, wanted: PromptLogprobs) -> list[Any]:
    torch.set_num_threads(1)
    engine = load(model, rank, world_size, rendezvous)
    spans = spans_of(results_of(engine, plans(wanted, [30, 60])))
    engine.close()
    return spans


def test_two_ranks_give_the_prompt_logprobs_of_transformers(model: Path, expected: torch.Tensor, ranks: Ranks) -> None:
    wanted = PromptLogprobs(5, 4, (1,))
    first, second = ranks.run(run_rank, 2, model, wanted)
    check(first, expected, wanted)
    assert not second

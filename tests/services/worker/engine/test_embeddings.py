"""Embeddings of a decoder's prompts, against hidden states that `transformers` computes in fp32."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from common.steps import EngineSpec, StepPlan
from common.types import FinishReason, Pooling, RowSlot, StepId
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.interface import InvalidPlanError
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.loader import load_decoder
from tests.services.worker.engine.driving import random_ids
from tests.services.worker.engine.families import VOCABULARY, save_family
from tests.services.worker.engine.scenario import chunk, open_row

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from common.steps import StepResult
    from services.worker.engine.execution.engine import ModelEngine
    from tests.services.worker.engine.parallel.ranks import Ranks

PAGES = 8
PROMPTS = [random_ids(length, VOCABULARY, seed=length) for length in (37, 1, 16, 90)]
BOTH = pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("embeddings"), "qwen3")


def reference(model: Path, prompt: list[int], pooling: Pooling) -> NDArray[np.float32]:
    import transformers

    decoder = transformers.AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = decoder(torch.tensor([prompt])).last_hidden_state[0]
    pooled = hidden[-1] if pooling is Pooling.LAST else hidden.mean(dim=0)
    vector: NDArray[np.float32] = pooled.numpy()
    return vector


def engine(model: Path, **changes: object) -> ModelEngine:
    fields: dict[str, object] = {"max_rows": 8, "device_pages": 64, "dtype": "float32", **changes}
    spec = EngineSpec(str(model), **fields)  # type: ignore[arg-type]  # whatever a test wants to change
    made = torch_engine(lambda spec, report: load_decoder(spec, report, RunnerOptions(threads=1)))
    made.configure(spec, lambda _fraction, _stage: None)
    return made


def opened(row: int, prompt: list[int], pooling: Pooling) -> StepPlan:
    pages = range(row * PAGES, (row + 1) * PAGES)
    return StepPlan(StepId(1), opens=(replace(open_row(row, prompt, pages, total=len(prompt)), pooling=pooling),))


def run(engine: ModelEngine, *plans: StepPlan) -> list[StepResult]:
    results: list[StepResult] = []
    for step, plan in enumerate(plans, start=1):
        engine.execute(replace(plan, step_id=StepId(step)), results.append)
    return results


def embed(engine: ModelEngine, prompt: list[int], pooling: Pooling, borders: tuple[int, ...] = ()) -> StepResult:
    """Compute one prompt, in chunks that end at `borders`, and return what came last."""
    cuts = [0, *borders, len(prompt)]
    plans = [StepPlan(StepId(1), prefills=(chunk(0, start, end - start),)) for start, end in pairwise(cuts)]
    plans[0] = replace(plans[0], opens=opened(0, prompt, pooling).opens)
    results = run(engine, *plans)
    assert not any(result.embeddings or result.stops for result in results[:-1])
    engine.reset()
    return results[-1]


def vector_of(result: StepResult) -> NDArray[np.float32]:
    ((_, embedding),) = result.embeddings
    return np.frombuffer(embedding, "<f4")


@BOTH
@pytest.mark.parametrize("borders", [(), (16,), (1, 2, 30), (36,)])
def test_a_prompt_in_any_chunks_has_the_embedding_of_transformers(
    model: Path, pooling: Pooling, borders: tuple[int, ...]
) -> None:
    result = embed(engine(model), PROMPTS[0], pooling, borders)
    np.testing.assert_allclose(vector_of(result), reference(model, PROMPTS[0], pooling), atol=2e-5)
    assert [(stop.row, stop.reason) for stop in result.stops] == [(0, FinishReason.STOP)]
    assert result.rows.size == result.token_ids.size == 0


def test_rows_are_embedded_together_and_while_other_rows_generate(model: Path) -> None:
    made = engine(model)
    text = random_ids(20, VOCABULARY, seed=99)
    generating = open_row(7, text, range(56, 64), total=40)
    alone = run(made, StepPlan(StepId(1), opens=(generating,), prefills=(chunk(7, 0, 20),), steps=3))
    made.reset()
    run(made, StepPlan(StepId(1), opens=(generating,), prefills=(chunk(7, 0, 20),)))
    kinds = [Pooling.LAST, Pooling.MEAN, Pooling.MEAN, Pooling.MEAN]
    opens = tuple(opened(row, prompt, kinds[row]).opens[0] for row, prompt in enumerate(PROMPTS))
    whole = tuple(chunk(row, 0, len(prompt)) for row, prompt in enumerate(PROMPTS[:3]))
    first, second = run(
        made,
        StepPlan(StepId(1), opens=opens, prefills=(*whole, chunk(3, 0, 50))),
        StepPlan(StepId(1), prefills=(chunk(3, 50, 40),)),
    )
    got = {row: np.frombuffer(vector, "<f4") for row, vector in (*first.embeddings, *second.embeddings)}
    assert [row for row, _ in first.embeddings] == [0, 1, 2]
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(got[RowSlot(row)], reference(model, prompt, kinds[row]), atol=2e-5)
    assert [result.rows.tolist() for result in (first, second)] == [[7], [7]]
    assert [int(result.token_ids[0]) for result in (first, second)] == [int(r.token_ids[0]) for r in alone[1:]]


def test_a_prompt_may_fill_the_context(model: Path) -> None:
    prompt = random_ids(96, VOCABULARY, seed=5)
    result = embed(engine(model, max_context=96), prompt, Pooling.MEAN)
    np.testing.assert_allclose(vector_of(result), reference(model, prompt, Pooling.MEAN), atol=2e-5)


def test_last_pooling_gives_the_same_vector_after_a_cached_prefix(model: Path) -> None:
    made = engine(model)
    prompt = PROMPTS[0]
    run(made, replace(opened(0, prompt, Pooling.LAST), prefills=(chunk(0, 0, 37),)))
    hit = replace(open_row(1, prompt, range(PAGES), computed=32, total=37), pooling=Pooling.LAST)
    plan = StepPlan(StepId(1), closes=(RowSlot(0),), opens=(hit,), prefills=(chunk(1, 32, 5),))
    (result,) = run(made, plan)
    np.testing.assert_allclose(vector_of(result), reference(model, prompt, Pooling.LAST), atol=2e-5)


def test_mean_pooling_after_a_cached_prefix_is_an_invalid_plan(model: Path) -> None:
    hit = replace(open_row(1, PROMPTS[0], range(PAGES), computed=32, total=37), pooling=Pooling.MEAN)
    with pytest.raises(InvalidPlanError, match="hidden states are lost"):
        run(engine(model), StepPlan(StepId(1), opens=(hit,), prefills=(chunk(1, 32, 5),)))


def test_a_slot_closed_in_the_middle_of_a_prompt_starts_clean(model: Path) -> None:
    made = engine(model)
    first, second = PROMPTS[0], PROMPTS[2]
    result = run(
        made,
        replace(opened(0, first, Pooling.MEAN), prefills=(chunk(0, 0, 20),)),
        replace(opened(0, second, Pooling.MEAN), closes=(RowSlot(0),), prefills=(chunk(0, 0, 16),)),
    )[-1]
    np.testing.assert_allclose(vector_of(result), reference(model, second, Pooling.MEAN), atol=2e-5)


def embed_as_rank(rank: int, world_size: int, rendezvous: str, model: Path) -> list[bytes]:
    made = engine(model, rank=rank, world_size=world_size, rendezvous=rendezvous)
    results = [embed(made, PROMPTS[0], pooling, (20,)) for pooling in (Pooling.LAST, Pooling.MEAN)]
    made.close()
    return [embedding for result in results for _, embedding in result.embeddings]


def test_two_ranks_embed_as_one_does_and_only_the_first_reports(model: Path, ranks: Ranks) -> None:
    first, second = ranks.run(embed_as_rank, 2, model)
    assert second == []
    for embedding, pooling in zip(first, (Pooling.LAST, Pooling.MEAN), strict=True):
        np.testing.assert_allclose(np.frombuffer(embedding, "<f4"), reference(model, PROMPTS[0], pooling), atol=2e-5)

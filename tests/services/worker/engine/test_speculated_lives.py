"""Speculative decoding never changes an answer: random lives of requests with drafts and without."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from common.steps import EngineSpec
from common.types import SamplingParams
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.loader import load_decoder
from tests.services.scheduler.core.harness import Harness, make_request, with_options
from tests.services.worker.engine.speculated_lives import SLOW_US, EngineWorker, Tally, compare_world
from tests.services.worker.engine.tiny_llama import save_tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

    from common.steps import StepPlan, StepResult
    from services.worker.engine.execution.engine import ModelEngine
    from tests.services.worker.engine.parallel.ranks import Ranks

# Choices that live through the test of `make soak`.
SOAKED_LIVES = 100_000


def check(tally: Tally) -> None:
    """Assert that the lives so far had what the comparison is about."""
    assert tally.counts["accepted"] > tally.counts["tokens"] // 20
    # Wrong drafts, too.
    assert tally.counts["drafted"] > tally.counts["accepted"] * 1.1
    assert all(tally.counts[name] > tally.lives // 10 for name in ("jumped", "logprobs"))
    assert all(tally.counts[name] > tally.lives // 100 for name in ("preempted", "retracted"))


def test_drafts_change_neither_tokens_nor_log_probabilities_nor_finishes() -> None:
    tally = Tally()
    for seed in range(20):
        compare_world(seed, tally)
    assert tally.lives > 350
    check(tally)


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
def test_a_hundred_thousand_lives() -> None:
    tally, seed = Tally(), 1000
    while tally.lives < SOAKED_LIVES:
        compare_world(seed, tally)
        seed += 1
    check(tally)


def spec_of(model: Path, dtype: str, **changes: object) -> EngineSpec:
    fields: dict[str, object] = {
        "dtype": dtype, "max_rows": 4, "max_context": 128, "page_size": 16, "device_pages": 200, **changes
    }  # fmt: skip
    return EngineSpec(str(model), **fields)  # type: ignore[arg-type]  # whatever a test wants to change


def loaded(spec: EngineSpec, device: str = "cpu") -> ModelEngine:
    options = RunnerOptions(device=device, device_index=spec.rank if device == "cuda" else 0, threads=1)
    engine = torch_engine(lambda its, report: load_decoder(its, report, options))
    assert engine.configure(spec, lambda *_: None).verifies_drafts
    return engine


def outputs_of(worker: EngineWorker, draft: int) -> list[list[int]]:
    """Answer prompts, each twice, with a real engine; drafts must have been right if there are any."""
    harness = Harness(
        pages=200, page_size=16, max_rows=4, max_context=128, max_step_tokens=64, cache="shared", draft_tokens=draft
    )
    harness.worker = worker
    prompts = [[3 + (7 * salt + 5 * i) % 90 for i in range(20 + salt)] for salt in range(6)]
    for time in range(2):
        for number, prompt in enumerate(prompts):
            request = make_request(f"r{time}{number}", prompt, max_tokens=60)
            sampling = SamplingParams(temperature=[0.0, 0.9][number % 2], seed=number)
            harness.core.submit(with_options(request, sampling=sampling), 0.0)
        harness.run()
    assert (harness.core.speculation.accepted_tokens > 100) == (draft > 0)
    return [harness.outputs[f"r{time}{number}", 0] for time in range(2) for number in range(len(prompts))]


def compare(model: Path, device: str, dtype: str) -> None:
    """Assert that a model on one device gives the same with drafts as without."""
    engine = loaded(spec_of(model, dtype), device)
    without = outputs_of(EngineWorker(engine, SLOW_US), 0)
    engine.reset()
    assert outputs_of(EngineWorker(engine, SLOW_US), 9) == without
    engine.close()


def test_a_real_model_gives_the_same_tokens(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    compare(tmp_path, "cpu", "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_real_model_on_a_gpu_gives_the_same_tokens(dtype: str, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, hidden_size=256)
    compare(tmp_path, "cuda", dtype)


class TellingWorker(EngineWorker):
    """Rank 0, which sends its plans to the other ranks."""

    def run(self, plan: StepPlan) -> list[StepResult]:
        torch.distributed.broadcast_object_list([plan])
        return super().run(plan)


def answer_as_rank(rank: int, world_size: int, rendezvous: str, model: Path, draft: int) -> list[list[int]]:
    """Return what rank 0 answers; others carry out its plans until there are no more."""
    torch.set_num_threads(1)
    engine = loaded(spec_of(model, "float32", rank=rank, world_size=world_size, rendezvous=rendezvous))
    outputs: list[list[int]] = []
    if rank == 0:
        outputs = outputs_of(TellingWorker(engine, SLOW_US), draft)
        torch.distributed.broadcast_object_list([None])
    else:
        told: list[StepPlan | None] = [None]
        while torch.distributed.broadcast_object_list(told) or told[0] is not None:
            assert told[0] is not None
            engine.execute(told[0], lambda _result: None)
    engine.close()
    return outputs


@pytest.mark.extended
def test_two_ranks_give_the_same_tokens(ranks: Ranks, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    drafted, nothing = ranks.run(answer_as_rank, 2, tmp_path, 9)
    assert nothing == []
    assert drafted == ranks.run(answer_as_rank, 2, tmp_path, 0)[0]

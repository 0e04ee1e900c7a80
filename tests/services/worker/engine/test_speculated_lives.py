"""Speculative decoding never changes an answer: random lives of requests with drafts and without."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.steps import EngineSpec
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.loader import load_decoder
from tests.services.scheduler.core.harness import Harness, make_request
from tests.services.worker.engine.speculated_lives import SLOW_US, EngineWorker, Tally, compare_world
from tests.services.worker.engine.tiny_llama import save_tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

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


def outputs_of(model: Path, device: str, dtype: str, draft: int) -> list[list[int]]:
    """Answer prompts, each twice, with a real engine; drafts must have been right if there are any."""
    engine = torch_engine(lambda spec, report: load_decoder(spec, report, RunnerOptions(device=device, threads=1)))
    spec = EngineSpec(str(model), dtype=dtype, max_rows=4, max_context=128, page_size=16, device_pages=200)
    assert engine.configure(spec, lambda *_: None).verifies_drafts
    harness = Harness(
        pages=200, page_size=16, max_rows=4, max_context=128, max_step_tokens=64, cache="shared", draft_tokens=draft
    )
    harness.worker = EngineWorker(engine, SLOW_US)
    prompts = [[3 + (7 * salt + 5 * i) % 90 for i in range(20 + salt)] for salt in range(6)]
    for time in range(2):
        for number, prompt in enumerate(prompts):
            harness.core.submit(make_request(f"r{time}{number}", prompt, max_tokens=60), 0.0)
        harness.run()
    engine.close()
    assert (harness.core.speculation.accepted_tokens > 100) == (draft > 0)
    return [harness.outputs[f"r{time}{number}", 0] for time in range(2) for number in range(len(prompts))]


def test_a_real_model_gives_the_same_tokens(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    assert outputs_of(tmp_path, "cpu", "float32", 9) == outputs_of(tmp_path, "cpu", "float32", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_real_model_on_a_gpu_gives_the_same_tokens(dtype: str, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, hidden_size=256)
    assert outputs_of(tmp_path, "cuda", dtype, 9) == outputs_of(tmp_path, "cuda", dtype, 0)

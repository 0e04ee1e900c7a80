"""Stages of a pipeline, in processes of their own: the same numbers as on one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.families import VOCABULARY, reference_logits, save_family

if TYPE_CHECKING:
    from pathlib import Path

    from tests.services.worker.engine.parallel.ranks import Ranks

PROMPT = random_ids(40, VOCABULARY)


def compute(
    rank: int, world_size: int, rendezvous: str, model: str, stages: int, backend: str
) -> tuple[torch.Tensor, int]:
    """Prefill in two chunks, then decode four given tokens; return all logits and the pages that ranks agreed on."""
    runner = load(
        model, backend=backend, rank=rank, world_size=world_size, rendezvous=rendezvous, stages=stages,
        device_pages=40 + 5 * rank,
    )  # fmt: skip
    driver = Driver(runner)
    row = driver.open(44)
    parts = [PROMPT[:23], PROMPT[23:36], *([token] for token in PROMPT[36:])]
    logits = torch.cat([driver.run([(row, part)], all_tokens=True) for part in parts])
    # A rank that leaves takes with it what the next stage has not received yet.
    assert runner.agree(True)
    runner.close()
    return logits, runner.capacity.device_pages


@pytest.mark.parametrize(
    ("family", "ranks_per_stage", "stages", "backend"),
    [
        ("llama tied", 1, 2, "compiled"),
        ("qwen3 moe partly dense", 1, 3, "torch"),
    ],
)
def test_stages_compute_the_same_as_one_rank(
    ranks: Ranks, family: str, ranks_per_stage: int, stages: int, backend: str, tmp_path: Path
) -> None:
    expected = reference_logits(save_family(tmp_path, family), PROMPT)
    world_size = ranks_per_stage * stages
    results = ranks.run(compute, world_size, str(tmp_path), stages, backend)
    sampler = world_size - ranks_per_stage
    torch.testing.assert_close(results[sampler][0], expected, atol=3e-4, rtol=1e-4)
    others = [logits for rank, (logits, _) in enumerate(results) if rank != sampler]
    assert [tuple(logits.shape) for logits in others] == [(0, VOCABULARY)] * (world_size - 1)
    assert [pages for _, pages in results] == [40] * world_size

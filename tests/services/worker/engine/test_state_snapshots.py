"""Recurrent layers: the scheduler's snapshots over the real engine give what `transformers` gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request
from tests.services.worker.engine.driving import random_ids
from tests.services.worker.engine.families import VOCABULARY, reference_logits, save_family
from tests.services.worker.engine.test_window_pool import EngineWorker, load

if TYPE_CHECKING:
    from pathlib import Path

    from common.steps import StepPlan
    from tests.services.worker.engine.parallel.ranks import Ranks

PAGES, ROWS, SNAPSHOTS = 200, 3, 24
NEW_TOKENS = 20
FIRST, SECOND = random_ids(50, VOCABULARY, seed=1), random_ids(70, VOCABULARY, seed=2)
PROMPTS = [FIRST, SECOND, SECOND[:33], FIRST[:40] + SECOND[:7], [5], FIRST, SECOND[:50]]


def serve(harness: Harness) -> None:
    """Serve all prompts, then a second turn of the first one."""
    for number, prompt in enumerate(PROMPTS):
        harness.core.submit(make_request(f"r{number}", prompt, max_tokens=NEW_TOKENS), 0.0)
        harness.plan()
        harness.result()
    harness.run()
    harness.core.submit(make_request("turn", second_turn(harness), max_tokens=NEW_TOKENS), 0.0)
    harness.run()
    harness.audit()


def second_turn(harness: Harness) -> list[int]:
    return [*FIRST, *harness.outputs["r0", 0], *SECOND[60:65]]


@pytest.mark.parametrize(
    ("family", "backend", "page_size"), [("qwen3 next", "compiled", 16), ("qwen3.5", "torch", 4)], ids=str
)
def test_rows_that_continue_from_snapshots_give_the_tokens_of_cold_ones(
    family: str, backend: str, page_size: int, tmp_path: Path
) -> None:
    save_family(tmp_path, family)
    engine, capacity = load(tmp_path, backend, page_size, device_pages=PAGES, snapshots=SNAPSHOTS)
    assert capacity.recurrent_states is not None
    assert capacity.recurrent_states.snapshots == SNAPSHOTS
    harness = Harness(
        pages=PAGES, page_size=page_size, max_rows=ROWS, max_context=128, cache="shared", target_plan_s=0.004,
        snapshots=SNAPSHOTS, interval=capacity.pages_per_snapshot,
    )  # fmt: skip
    harness.worker = EngineWorker(engine)
    serve(harness)
    assert harness.cached["r5", 0] >= 48, "the same prompt"
    assert harness.cached["turn", 0] >= 48, "the second turn"
    prompts = {**{f"r{number}": prompt for number, prompt in enumerate(PROMPTS)}, "turn": second_turn(harness)}
    for name, prompt in prompts.items():
        tokens = harness.outputs[name, 0]
        expected = reference_logits(tmp_path, prompt + tokens[:-1])[len(prompt) - 1 :].argmax(dim=-1).tolist()
        assert tokens == expected
        assert len(tokens) == NEW_TOKENS or tokens[-1] == STOP_ID


def run_rank(
    rank: int, world_size: int, rendezvous: str, model: Path, plans: list[StepPlan]
) -> tuple[int, list[tuple[int, int]]]:
    """Carry out plans that were made for one rank; return the number of snapshots, and the rows' tokens in order."""
    engine, capacity = load(
        model,
        "torch",
        4,
        rank=rank,
        world_size=world_size,
        rendezvous=rendezvous,
        device_pages=PAGES,
        snapshots=SNAPSHOTS,
    )
    worker = EngineWorker(engine)
    for plan in plans:
        worker.run(plan)
    assert capacity.recurrent_states is not None
    engine.close()
    return capacity.recurrent_states.row_bytes, worker.told


def test_two_ranks_save_and_load_the_same_states(ranks: Ranks, tmp_path: Path) -> None:
    save_family(tmp_path, "qwen3.5 moe")
    engine, capacity = load(tmp_path, "torch", 4, device_pages=PAGES, snapshots=SNAPSHOTS)
    harness = Harness(
        pages=PAGES, page_size=4, max_rows=ROWS, max_context=128, cache="shared", snapshots=SNAPSHOTS,
        interval=capacity.pages_per_snapshot,
    )  # fmt: skip
    worker = harness.worker = EngineWorker(engine)
    serve(harness)
    assert any(opened.snapshot is not None for plan in harness.plans for opened in plan.opens)
    assert any(plan.saves for plan in harness.plans)
    (row_bytes, first), (_, second) = ranks.run(run_rank, 2, tmp_path, harness.plans)
    assert capacity.recurrent_states is not None
    assert row_bytes == capacity.recurrent_states.row_bytes // 2
    assert first == worker.told
    assert not second, "only the first rank reports tokens"

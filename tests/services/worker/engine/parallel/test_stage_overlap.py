"""While a stage computes one micro-batch, the stage before it computes the next one: by the order of events."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from common.steps import EngineSpec, MicroBatch, StepPlan
from common.types import StepId
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.loader import load_decoder
from tests.services.scheduler.core.harness import Harness, make_request
from tests.services.worker.engine.families import save_family
from tests.services.worker.engine.parallel.staged_plans import PAGE_SIZE, PAGES
from tests.services.worker.engine.scenario import chunk, open_row
from tests.services.worker.engine.speculated_lives import Library

if TYPE_CHECKING:
    from pathlib import Path

    from common.steps import StepResult
    from services.worker.engine.execution.engine import ModelEngine
    from tests.services.worker.engine.parallel.ranks import Ranks

STAGES = 2
PROMPT = 5
# Plans by which prompts are computed, and those by which both micro-batches decode in turn after them.
PREFILLS, STEPS = 2, 8
# Ends a stage that waits for the other one in vain.
PATIENCE = timedelta(seconds=60)


def plans() -> list[StepPlan]:
    """Return the plans of two rows, one in each micro-batch."""
    parts = [MicroBatch(row, STAGES) for row in range(STAGES)]
    total = PROMPT + 1 + STEPS
    made = [
        StepPlan(
            StepId(1 + row), opens=(open_row(row, [10 + row] * PROMPT, [row], total=total),),
            prefills=(chunk(row, 0, PROMPT),), micro_batch=parts[row],
        )
        for row in range(STAGES)
    ]  # fmt: skip
    return made + [StepPlan(StepId(1 + step), micro_batch=parts[step % STAGES]) for step in range(PREFILLS, STEPS)]


def compute(rank: int, world_size: int, rendezvous: str, model: str, mailbox: str) -> list[str]:
    """Carry the plans out as a stage; return its events in their order.

    The last stage begins a plan only once the first one has launched the plan after it, whose micro-batch is another.
    """
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(mailbox, world_size)  # type: ignore[attr-defined]  # not in its stubs
    spec = EngineSpec(
        model, dtype="float32", max_rows=STAGES, max_context=32, page_size=PAGE_SIZE, max_step_tokens=32,
        device_pages=PAGES, rank=rank, world_size=world_size, rendezvous=rendezvous, stages=STAGES,
    )  # fmt: skip
    options = RunnerOptions(device="cpu", threads=1)
    engine: ModelEngine = torch_engine(lambda its, report: load_decoder(its, report, options), Library())  # type: ignore[arg-type]  # a fake
    engine.configure(spec, lambda *_: None)
    events: list[str] = []

    def emit(result: StepResult) -> None:
        assert result.error is None, result.error
        events.append(f"result {result.step_id}")

    made, waits = plans(), spec.samples
    for plan, after in zip(made, [*made[1:], None], strict=True):
        if waits and after is not None:
            try:
                store.wait([f"launched {after.step_id}"], PATIENCE)
            except RuntimeError:
                waits = False
                events.append(f"{after.step_id} was not launched before {plan.step_id} was computed")
        engine.execute(plan, emit)
        events.append(f"launched {plan.step_id}")
        store.set(f"launched {plan.step_id}", "yes")
    engine.settle(lambda: False)
    engine.close()
    return events


def test_a_stage_launches_the_next_micro_batch_before_the_one_before_it_has_its_tokens(
    ranks: Ranks, tmp_path: Path
) -> None:
    save_family(tmp_path, "llama")
    first, last = ranks.run(compute, STAGES, str(tmp_path), str(tmp_path / "mail"))
    computed = [event for event in last if event.startswith("result")]
    assert computed == [f"result {step}" for step in range(1, STEPS + 1)]
    assert [event for event in last if "not" in event] == []
    # The first stage had no tokens of a plan when it launched the one after it.
    for step in range(1, STEPS):
        assert first.index(f"launched {step + 1}") < first.index(f"result {step}"), step


def test_the_scheduler_plans_for_each_micro_batch_before_it_has_tokens_of_the_first() -> None:
    harness = Harness(micro_batches=STAGES, max_rows=2 * STAGES, depth=STAGES + 1)
    assert harness.core.config.plans_in_flight == STAGES + 1, "so that one waits at the first stage"
    for row in range(2 * STAGES):
        harness.core.submit(make_request(f"{row}", [10 + row] * PROMPT, max_tokens=30), 0.0)
    for _ in range(10):
        harness.plan()
        assert harness.result()
    harness.plan()
    assert harness.core.in_flight == STAGES + 1
    in_flight = [plan.micro_batch.index for plan in harness.plans[-STAGES - 1 :]]
    assert in_flight in ([0, 1, 0], [1, 0, 1])

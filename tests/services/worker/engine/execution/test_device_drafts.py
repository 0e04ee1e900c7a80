"""Rows with drafts on a device: what they sample is what the same device samples without drafts.

Where there is a GPU, passes are captured.
"""

from __future__ import annotations

from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.steps import Draft, EngineSpec
from common.types import RowSlot
from services.worker.engine.execution.overlapped_runner import OverlappedRunner
from services.worker.engine.plans.plan import PlanLimits
from services.worker.engine.plans.rows import RowStates
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, make_request
from tests.services.worker.engine.execution.asked import EveryThird
from tests.services.worker.engine.execution.markov import PAGE_SIZE, PAGES, VOCABULARY, MarkovRunner
from tests.services.worker.engine.execution.test_drafts import CONTEXT, ROW_PAGES, ROWS, Rows, random_rows
from tests.services.worker.engine.execution.test_overlapped_runner import lives
from tests.services.worker.engine.overlapped_worker import OverlappedHarness
from tests.services.worker.engine.scenario import open_row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.worker.engine.model.batch import ForwardBatch

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from services.worker.engine.execution.overlapped_executor import OverlappedExecutor
from tests.services.worker.engine.execution.test_overlapped_executor import executor


@contextmanager
def overlapped(
    device: torch.device, runner: MarkovRunner | None = None, rank: int = 0, *, captures: bool = True
) -> Iterator[OverlappedRunner]:
    spec = EngineSpec("none", max_rows=ROWS, page_size=PAGE_SIZE, rank=rank, world_size=2 if rank else 1)
    with torch.inference_mode():
        executor = OverlappedExecutor(runner or MarkovRunner(device), spec)
        if captures and device.type != "cpu":
            executor.capture(lambda _share: None)
        executor.use_grammars(EveryThird(VOCABULARY))  # type: ignore[arg-type]  # stands in for `RowMasks`
        limits = PlanLimits(VOCABULARY, PAGES, 256)
        yield OverlappedRunner(RowStates(ROWS, CONTEXT, PAGE_SIZE), limits, executor)


@pytest.mark.parametrize("seed", range(6))
def test_drafts_change_passes_and_nothing_else(seed: int, device: torch.device) -> None:
    random = Random(seed)
    opens = random_rows(random)
    with overlapped(device) as plans:
        alone = Rows(opens, plans).finish()
    with overlapped(device) as plans:
        drafted = Rows(opens, plans).finish(alone, random)
    assert drafted.tokens == alone.tokens
    assert drafted.stops == alone.stops
    assert drafted.logprobs == alone.logprobs
    assert drafted.passes <= alone.passes


def test_right_drafts_save_passes(device: torch.device) -> None:
    opens = [open_row(0, [1, 2, 3], range(ROW_PAGES), total=44)]
    with overlapped(device) as plans:
        alone = Rows(opens, plans).finish()
    with overlapped(device) as plans:
        rows = Rows(opens, plans)
        rows.start()
        rows.run(drafts=(Draft(RowSlot(0), np.array(alone.tokens[0][1:40], np.int32)),))
    assert rows.heard.tokens == alone.tokens
    assert rows.heard.passes == 2


@pytest.mark.parametrize("seed", range(4))
def test_another_rank_appends_what_the_first_has_verified(seed: int, device: torch.device) -> None:
    random = Random(seed)
    opens = random_rows(random)
    if device.type != "cpu":
        pytest.skip("what ranks exchange is written down on a CPU only")
    with overlapped(device) as plans:
        expected = Rows(opens, plans).finish()
    first = MarkovRunner(device)
    with overlapped(device, first) as plans:
        one = Rows(opens, plans)
        one.finish(expected, random)
    with overlapped(device, MarkovRunner(device, told=first.tells), rank=1) as plans:
        other = Rows(opens, plans)
        for plan in one.plans:
            other.repeat(plan)
    assert not first.tells, "both exchange as much"
    for row in range(len(opens)):
        length = int(one.states.lengths[row])
        assert other.states.lengths[row] == length
        assert other.states.token_ids[row, :length].tolist() == one.states.token_ids[row, :length].tolist()


def test_drafts_that_do_not_fit_into_memory_are_dropped(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    opens = [open_row(0, [1, 2, 3], range(ROW_PAGES), total=44)]
    with overlapped(device) as plans:
        alone = Rows(opens, plans).finish()
    runner = MarkovRunner(device)
    compute = runner.compute

    def short_of_memory(batch: ForwardBatch) -> torch.Tensor:
        if batch.sample_indices.shape[0] > ROWS:
            raise torch.OutOfMemoryError("made up")
        return compute(batch)

    # A pass that was captured takes no memory.
    with overlapped(device, runner, captures=False) as plans:
        monkeypatch.setattr(runner, "compute", short_of_memory)
        rows = Rows(opens, plans)
        rows.start()
        rows.run(drafts=(Draft(RowSlot(0), np.array(alone.tokens[0][1:20], np.int32)),))
        assert rows.heard.tokens[0] == alone.tokens[0][:2]
        while not rows.heard.stops:
            rows.run()
    assert rows.heard.tokens == alone.tokens


@pytest.mark.skipif(torch.cuda.is_available(), reason="the runner that checks everything is on the CPU")
@settings(max_examples=4, deadline=None)
@given(st.data(), st.integers(14, 40), st.integers(1, 3), st.sampled_from([1, 4, 9]))
def test_the_schedulers_drafts_are_verified(data: st.DataObject, pages: int, depth: int, draft: int) -> None:
    harness = OverlappedHarness(
        executor, pages=pages, depth=depth, cache="shared", draft_tokens=draft, compute_us=20_000, max_step_tokens=48
    )
    lives(harness, data)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the runner that checks everything is on the CPU")
def test_repeated_requests_are_drafted() -> None:
    harness = OverlappedHarness(
        executor, pages=64, cache="shared", draft_tokens=9, compute_us=20_000, max_step_tokens=48
    )
    prompt = [11, 22, 33, 44, 55]
    for name in ("r0", "r1"):
        harness.core.submit(make_request(name, prompt, max_tokens=40), 0.0)
        harness.run()
        assert harness.outputs[name, 0] == expected_output(prompt, len(prompt) + 40, (STOP_ID,))
    assert harness.core.speculation.accepted_tokens > 10

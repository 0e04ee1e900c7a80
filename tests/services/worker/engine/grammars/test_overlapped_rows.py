"""Bound rows where the runner is a pass ahead of what it has told, as it is on GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from common.steps import StepPlan
from common.types import FinishReason, StepId
from services.worker.engine.execution.overlapped_runner import OverlappedRunner
from services.worker.engine.execution.pass_output import PassOutput
from services.worker.engine.grammars.row_masks import RowMasks
from services.worker.engine.plans.plan import PlanLimits
from services.worker.engine.plans.rows import RowStates
from services.worker.engine.sampling.sampler import sample
from services.worker.engine.sampling.table import Needs, SamplingTable
from tests.services.worker.engine.grammars.corpus import CORPUS
from tests.services.worker.engine.grammars.outputs import (
    EOS,
    PROMPT,
    VOCABULARY_SIZE,
    bound_row,
    finished,
    library,
    logits_of,
    schema_grammar,
)
from tests.services.worker.engine.scenario import chunk, ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.steps import StepResult
    from services.worker.engine.plans.passes import ForwardPass
    from services.worker.engine.plans.rows import RowIndices

PAGES = 20


@dataclass
class Ready:
    tokens: PassOutput

    @property
    def failed(self) -> RowIndices:
        return self.tokens.failed

    def is_ready(self) -> bool:
        return True

    def wait(self) -> PassOutput:
        return self.tokens


class HostSampling:
    """Samples bound rows on the host, when all that they have sampled before is known, as the stepper for GPUs does."""

    def __init__(self, max_rows: int) -> None:
        self.table = SamplingTable(max_rows, VOCABULARY_SIZE, RowMasks(library(), VOCABULARY_SIZE))

    def mirror(self, plan: StepPlan, rows: RowStates) -> None:
        for opened in plan.opens:
            self.table.open(opened)

    def launch(
        self, rows: RowStates, forward: ForwardPass, catch_up: Callable[[], None], report_ready: Callable[[], None]
    ) -> Ready:
        del report_ready
        slots = forward.sampled_rows
        if slots.size and self.table.needs_of(slots) & Needs.GRAMMAR:
            catch_up()
        logits = [logits_of(int(self.table.seeds[slot]), int(rows.lengths[slot])) for slot in slots]
        made = sample(torch.from_numpy(np.stack(logits)), slots, rows, self.table)
        return Ready(PassOutput(made.token_ids.numpy().astype(np.int32)))


def test_a_lease_follows_the_grammar_at_every_step_and_ends_with_it() -> None:
    grammar = schema_grammar(CORPUS["enum of texts"])
    opens = [bound_row(0, grammar, seed=3, length=300), bound_row(2, grammar, seed=4, length=300)]
    expected = finished(opens)
    rows = RowStates(4, 512, page_size=16)
    runner = OverlappedRunner(rows, PlanLimits(VOCABULARY_SIZE, 4 * PAGES, 256), HostSampling(4))
    granted = [
        replace(opened, pages=ids(range(index * PAGES, (index + 1) * PAGES))) for index, opened in enumerate(opens)
    ]
    prefills = tuple(chunk(opened.row, 0, len(PROMPT)) for opened in opens)
    results: list[StepResult] = []
    plan = StepPlan(StepId(1), opens=tuple(granted), prefills=prefills, steps=60)
    runner.run(plan, results.append)
    runner.settle(lambda: False)
    for opened, wanted in zip(opens, expected, strict=True):
        told = [
            int(token)
            for result in results
            for row, token in zip(result.rows, result.token_ids, strict=True)
            if row == opened.row
        ]
        assert told == [*wanted, EOS]
    stops = {stop.row: stop.reason for result in results for stop in result.stops}
    assert stops == {0: FinishReason.STOP, 2: FinishReason.STOP}

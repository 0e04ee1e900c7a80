"""A few passes of every kind before the first request, which then waits for no kernel to be compiled or loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.steps import PrefillChunk, RowOpen, StepPlan
from common.types import RequestId, RowSlot, SamplingParams, StepId
from services.worker.engine.plans.lagged_plan_runner import LaggedPlanRunner, LaggedStepper
from services.worker.engine.plans.plan import PlanLimits
from services.worker.engine.plans.rows import RowTable

if TYPE_CHECKING:
    from common.steps import EngineCapacity, EngineSpec

_PROMPT = 8
# A plain row, one with filters, and one whose sampler looks at its history.
_SAMPLING = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=5),
    SamplingParams(temperature=0.0, frequency_penalty=0.5),
)


def warm_up(stepper: LaggedStepper, capacity: EngineCapacity, spec: EngineSpec) -> None:
    """Run prompts, prompts beside decoding rows, and decoding rows, as far as the rows and pages there are allow.

    What this leaves in the first pages was never anybody's, and is written over before it is read.
    """
    total = _PROMPT + 2 * len(_SAMPLING) + 2
    pages = -(-total // capacity.page_size)
    count = min(len(_SAMPLING), spec.max_rows, capacity.device_pages // pages)
    if total > capacity.max_context or spec.max_step_tokens < _PROMPT + count:
        return
    rows = RowTable(spec.max_rows, capacity.max_context, capacity.page_size)
    limits = PlanLimits(capacity.vocabulary_size, capacity.device_pages, spec.max_step_tokens)
    runner = LaggedPlanRunner(rows, limits, stepper)
    for row, sampling in enumerate(_SAMPLING[:count]):
        opened = RowOpen(
            row=RowSlot(row),
            request_id=RequestId(f"warm-up-{row}"),
            token_ids=np.arange(_PROMPT, dtype=np.int32),
            prompt_tokens=_PROMPT,
            computed_tokens=0,
            pages=np.arange(row * pages, (row + 1) * pages, dtype=np.int32),
            sampling=sampling,
            max_total_tokens=total,
        )
        chunk = PrefillChunk(RowSlot(row), 0, _PROMPT)
        runner.run(StepPlan(StepId(row + 1), opens=(opened,), prefills=(chunk,), steps=2), lambda _result: None)
    runner.settle(lambda: False)

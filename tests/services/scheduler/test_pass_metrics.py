"""The histogram of passes counts those that ran."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from common.settings import SchedulerSettings
from common.steps import StepResult
from common.types import StepId
from services.scheduler import metrics
from services.scheduler.loop import SchedulerLoop


def observed() -> float:
    (family,) = metrics.STEP_COMPUTE_SECONDS.collect()
    return next(sample.value for sample in family.samples if sample.name.endswith("_count"))


@pytest.mark.parametrize("was_left_out", [False, True])
async def test_only_passes_that_ran_are_observed(*, was_left_out: bool) -> None:
    loop = SchedulerLoop(SchedulerSettings())
    loop.core = MagicMock()
    loop.core.take_output.return_value = None
    before = observed()
    loop.on_result(StepResult(StepId(1), 0, last=True, abandoned=was_left_out))
    assert observed() - before == (0 if was_left_out else 1)

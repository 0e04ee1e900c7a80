"""The histograms of passes, and the count of passes in a rank's status, are of those that ran."""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from common.steps import StepResult
from common.types import StepId
from services.worker import metrics
from services.worker.rank import Rank


def observed() -> float:
    (family,) = metrics.PASS_COMPUTE_SECONDS.collect()
    return next(sample.value for sample in family.samples if sample.name.endswith("_count"))


@pytest.mark.parametrize("was_left_out", [False, True])
def test_only_passes_that_ran_are_counted(*, was_left_out: bool) -> None:
    rank = MagicMock(_finished_passes=3)
    rank._engine.open_rows = 1
    before = observed()
    Rank._count(cast("Any", rank), StepResult(StepId(1), 0, last=True, abandoned=was_left_out))
    passes = 0 if was_left_out else 1
    assert observed() - before == passes
    assert rank._finished_passes == 3 + passes
    assert rank.profiles.note_pass.call_count == passes

"""The state of rows on the device: of what the host changes twice before it is sent, the last counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from common.steps import StepPlan
from common.types import StepId
from services.worker.engine.execution.device_batch import DeviceBatch
from services.worker.engine.plans.rows import RowStates
from tests.services.worker.engine.scenario import open_row

if TYPE_CHECKING:
    import torch

SLOTS, CONTEXT, PAGE_SIZE = 4, 64, 16


def test_of_changes_of_one_cell_the_last_is_sent(device: torch.device) -> None:
    rows, batch = RowStates(SLOTS, CONTEXT, PAGE_SIZE), DeviceBatch(SLOTS, 4, 99, 1000, device)
    needs = np.zeros(SLOTS, np.uint16)
    for number, prompt in enumerate(([1, 2, 3], [4, 5, 6, 7, 8]), 1):
        plan = StepPlan(StepId(number), opens=(open_row(1, prompt, [number, 9], total=20),))
        rows.open(plan.opens[0])
        batch.mirror(plan, rows, needs)
    batch.set_tokens(np.array([1]), rows)
    places = np.concatenate(batch._places)
    assert np.unique(places).size < places.size, "cells have changed twice"
    batch.upload()
    sent = batch.cells[1].tolist()
    assert sent[:2] == [5, 8]
    assert batch.page_table[1, :2].tolist() == [2, 9]

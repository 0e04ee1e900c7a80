"""The queueing model of one GPU: what requests wait for, by when passes are planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deploy.evaluation.bench.results import read_results
from deploy.evaluation.experiments.h200_costs import CostModel
from deploy.evaluation.experiments.queueing_model import ModelledGpu, PlannedWhen, main

if TYPE_CHECKING:
    from pathlib import Path

COSTS = CostModel()
# Two passes for a prompt of 1,000 tokens.
STEP = 800


def served(planned: PlannedWhen, arrivals: list[float], step_tokens: int = 4096, output: int = 3) -> ModelledGpu:
    gpu = ModelledGpu(COSTS, planned, step_tokens, prompt=1000, output=output)
    gpu.run(arrivals)
    return gpu


@pytest.mark.parametrize("planned", PlannedWhen)
def test_a_request_alone_waits_for_its_own_passes(planned: PlannedWhen) -> None:
    gpu = served(planned, [5.0])
    assert gpu.ttft == pytest.approx([COSTS.pass_s(1000, 0.0, 0, 0)])
    assert gpu.itl == pytest.approx([COSTS.pass_s(0, 0.0, 1, 1001), COSTS.pass_s(0, 0.0, 1, 1002)])
    assert served(planned, [5.0], STEP).ttft == pytest.approx(
        [COSTS.pass_s(800, 0.0, 0, 0) + COSTS.pass_s(200, 0.0, 0, 0)]
    )


def test_who_arrives_during_a_pass_is_in_the_next_one_or_in_the_one_after_it() -> None:
    first_s = COSTS.pass_s(4096, 0.0, 0, 0)
    found = {}
    for planned in PlannedWhen:
        gpu = ModelledGpu(COSTS, planned, 4096, prompt=4096, output=3)
        gpu.run([0.0, first_s / 2])
        found[planned] = gpu.ttft[1]
    # One token less than the prompt fits beside the row that decodes.
    missing = COSTS.pass_s(4095, 0.0, 1, 4097) + COSTS.pass_s(1, 0.0, 1, 4098)
    assert found[PlannedWhen.AT_START] == pytest.approx(first_s / 2 + missing)
    assert found[PlannedWhen.LATE] == pytest.approx(found[PlannedWhen.AT_START])
    # The pass between them decodes only.
    between_s = COSTS.pass_s(0, 0.0, 1, 4097)
    assert found[PlannedWhen.AHEAD] == pytest.approx(found[PlannedWhen.AT_START] + between_s, rel=0.01)


def test_every_token_of_every_request_is_counted() -> None:
    for planned in PlannedWhen:
        gpu = served(planned, [0.01 * number for number in range(50)], STEP, output=20)
        assert len(gpu.ttft) == 50
        assert len(gpu.itl) == 50 * 19
        assert min(gpu.ttft) > 0


def test_figures_are_kept_with_their_labels(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    assert main(["--rates", "2", "--json", str(path)]) == 0
    results = read_results(path)
    assert {result.label for result in results} == {f"2 requests/s, planned {planned}" for planned in PlannedWhen}
    assert {result.metric for result in results} == {"ttft_p50", "ttft_p99", "itl_p50", "itl_p99"}

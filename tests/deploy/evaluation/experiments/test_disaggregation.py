from __future__ import annotations

import pytest

from deploy.evaluation.experiments.disaggregation import CostModel, FleetLayout, FleetSimulation, fixed

COSTS = CostModel()


def test_a_lone_request_waits_for_its_passes_and_its_pages_only() -> None:
    computed = COSTS.pass_s(2000, 2000 * 1000, 0, 0)
    both = FleetSimulation(FleetLayout(2, 0, 4096), COSTS).run(fixed(2000, 20), 0.1, seconds=200)
    assert both.ttft.percentile(50) == pytest.approx(computed, rel=0.02)
    roles = FleetSimulation(FleetLayout(2, 1, 4096), COSTS).run(fixed(2000, 20), 0.1, seconds=200)
    expected = computed + COSTS.transfer_s(2000) + COSTS.pass_s(1, 0, 0, 0)
    assert roles.ttft.percentile(50) == pytest.approx(expected, rel=0.02)
    assert roles.moved_prompts == pytest.approx(roles.requests, abs=1)


@pytest.mark.parametrize("prefill", [0, 2])
def test_every_request_gets_all_of_its_tokens(prefill: int) -> None:
    figures = FleetSimulation(FleetLayout(4, prefill, 512), COSTS).run(fixed(800, 30), 1.0, seconds=60)
    assert figures.unanswered == 0
    assert figures.tokens == pytest.approx(30 * figures.requests, rel=0.02)


def test_too_many_requests_break_the_limits() -> None:
    layout = FleetLayout(2, 0, 1024)
    assert FleetSimulation(layout, COSTS).run(fixed(8192, 64), 1.0).keeps_limits
    assert not FleetSimulation(layout, COSTS).run(fixed(8192, 64), 6.0).keeps_limits

from __future__ import annotations

from dataclasses import replace

import pytest

from common.types import GroupRole
from deploy.evaluation.bench.results import read_results
from deploy.evaluation.experiments import disaggregation
from deploy.evaluation.experiments.disaggregation import (
    PREFILL_STEP,
    RESULTS,
    FleetFigures,
    FleetLayout,
    FleetSimulation,
    PromptInWork,
    SimulatedGpu,
    SimulatedRequest,
    check_model,
    compare,
    control_plane,
    fixed,
    most_within_limits,
)
from deploy.evaluation.experiments.h200_costs import CostModel

COSTS = CostModel()


def test_a_lone_request_waits_for_the_services_its_passes_and_its_pages_only() -> None:
    computed = COSTS.pass_s(2000, 2000 * 1000, 0, 0) + COSTS.service_s
    both = FleetSimulation(FleetLayout(2, 0, 4096), COSTS).run(fixed(2000, 20), 0.1, seconds=200)
    assert both.ttft.percentile(50) == pytest.approx(computed, rel=0.02)
    roles = FleetSimulation(FleetLayout(2, 1, 4096), COSTS).run(fixed(2000, 20), 0.1, seconds=200)
    expected = computed + COSTS.transfer_s(2000, PREFILL_STEP) + COSTS.pass_s(1, 0, 0, 0) + COSTS.start_s
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


def test_a_prompt_that_comes_during_a_pass_is_in_the_pass_after_the_next() -> None:
    gpu = SimulatedGpu(0, GroupRole.BOTH, 1024)
    gpu.queue.append(PromptInWork(SimulatedRequest(0, 0, 100, 9), 0.0, 0, 0.0))
    gpu.begin_pass(COSTS, 0.0)
    gpu.end_pass()
    # The row's first pass is under way when another prompt comes.
    gpu.begin_pass(COSTS, 1.0)
    gpu.queue.append(PromptInWork(SimulatedRequest(0, 0, 100, 9), 1.5, 0, 1.5))
    gpu.end_pass()
    gpu.begin_pass(COSTS, 2.0)
    assert not gpu.end_pass()
    gpu.begin_pass(COSTS, 3.0)
    assert len(gpu.end_pass()) == 1


def test_pages_wait_for_those_of_the_last_chunk_unless_the_link_is_slower_than_the_computation() -> None:
    chunk_s = 2048 * COSTS.kv_token_bytes / COSTS.transfer_bytes_per_s
    assert COSTS.transfer_s(8192, 2048) == pytest.approx(COSTS.transfer_wait_s + chunk_s)
    slow = replace(COSTS, transfer_bytes_per_s=1e9)
    hidden_s = (8192 - 2048) / COSTS.tokens_per_s
    expected = 8192 * COSTS.kv_token_bytes / 1e9 - hidden_s
    assert slow.transfer_s(8192, 2048) == pytest.approx(COSTS.transfer_wait_s + expected)


def test_the_simulation_says_of_two_gpus_nearly_what_was_measured() -> None:
    said = {figure.metric: figure.value for figure in check_model(COSTS) if figure.label == "2 GPUs"}
    roles, gaps = [], []
    for result in read_results(RESULTS / "group_roles.json"):
        metric = result.metric.replace("_", " ").replace("ttft", "TTFT").replace("itl", "ITL")
        if result.commit == "4834e6b6" and f"{result.label}: {metric}" in said:
            error = said[f"{result.label}: {metric}"] / result.value - 1
            if "prefill" in str(result.label) and "TTFT" in metric:
                roles.append(error)
            if metric == "ITL p99":
                gaps.append(error)
    assert (len(roles), len(gaps)) == (10, 11)
    assert max(map(abs, roles)) < 0.1
    assert max(map(abs, gaps)) < 0.36


def test_the_search_finds_the_highest_rate_from_any_beginning() -> None:
    layout = FleetLayout(2, 0, 1024)
    found = [most_within_limits(layout, fixed(8192, 64), COSTS, expected) for expected in (0.3, 1.0, 20.0)]
    assert min(found) > 0.5
    assert max(found) <= 1.13 * min(found)


def test_each_fleet_gets_a_ratio_that_keeps_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disaggregation, "SEARCHED_GPUS", 8)
    figures = list(compare("8,192 in, 256 out", [16], COSTS))
    for size in (8, 16):
        of_size = [figure for figure in figures if figure.label == f"{size} GPUs"]
        kept = [figure.value for figure in of_size if "within limits" in figure.metric]
        assert kept == [1.0, 1.0]
        ratios = [figure for figure in of_size if "prefill: most" in figure.metric]
        assert len(ratios) == (7 if size == 8 else 5)
        assert max(figure.value for figure in ratios) > 1


def test_gateways_carry_tokens_over_http() -> None:
    figures = FleetFigures(1.0, tokens=16_000_000, requests=16_000)
    cores = {figure.metric: figure.value for figure in control_plane("64 GPUs", "load", 64, figures)}
    assert cores["load: output"] == pytest.approx(1e6)
    assert cores["load: gateways"] == pytest.approx(50, rel=0.02)
    assert cores["load: tokenizers"] == pytest.approx(1.9, rel=0.03)

from __future__ import annotations

import argparse

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from rich.console import Console

from deploy.evaluation.bench.control_plane.command import PARTS, add_control_plane_arguments, figure_table, plan_parts
from deploy.evaluation.bench.control_plane.measurements import COUNTS, Figure, is_idle, slope
from deploy.evaluation.bench.control_plane.observed_pipeline import PipelineStateError, StepTotals, parse_step_totals
from protos.gen.pando.v1 import scheduler_pb2


def test_a_figure_keeps_its_target_by_its_median() -> None:
    assert Figure.of("m", "name", [1.0, 2.0, 300.0], "ms", 2.0).is_met is True
    assert Figure.of("m", "name", [1.0, 3.0, 3.0], "ms", 2.0).is_met is False
    assert Figure.of("m", "name", [1.0], "ms").is_met is None


def test_the_table_shows_spread_unit_and_target() -> None:
    console = Console(width=120)
    with console.capture() as shown:
        console.print(figure_table([Figure.of("m", "abort", [3.0, 1.0, 2.0], "ms", 100.0)], "control plane"))
    text = shown.get()
    assert "2.0 (1.0-3.0)" in text
    assert "≤ 100" in text


def test_step_totals_are_read_from_the_metrics() -> None:
    registry = CollectorRegistry()
    handling = Histogram("pando_scheduler_step_cpu_seconds", "…", registry=registry)
    compute = Histogram("pando_scheduler_step_compute_seconds", "…", registry=registry)
    handling.observe(0.25)
    for _ in range(3):
        compute.observe(2.0)
    assert parse_step_totals(generate_latest(registry).decode()) == StepTotals(0.25, 3.0, 6.0)


def test_a_scheduler_without_the_metrics_is_explained() -> None:
    with pytest.raises(PipelineStateError, match="pando_scheduler_step"):
        parse_step_totals("")


def test_memory_per_request_is_the_slope_of_memory_over_requests() -> None:
    assert slope([5_000_000 + 4096 * count for count in COUNTS]) == pytest.approx(4096)


def test_idle_means_no_row_no_queue_and_no_page() -> None:
    def state(rows: int = 0, waiting: int = 0, held: int = 0) -> scheduler_pb2.GetStateResponse:
        tier = scheduler_pb2.TierAccounting(tier="device", capacity_pages=9, evictable_pages=5, protected_pages=held)
        return scheduler_pb2.GetStateResponse(running_rows=rows, waiting_requests=waiting, tiers=[tier])

    assert is_idle(state())
    assert not is_idle(state(rows=1))
    assert not is_idle(state(waiting=1))
    assert not is_idle(state(held=1))


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_control_plane_arguments(parser)
    return parser.parse_args(argv)


def test_parts_share_a_deployment_only_where_one_does_not_disturb_the_other() -> None:
    assert [len(measures) for _, measures in plan_parts(parse())] == [1, 1, 2, 1]
    assert sum(len(measures) for _, measures in plan_parts(parse())) == len(PARTS)
    assert [len(measures) for _, measures in plan_parts(parse("--only", "abort", "memory"))] == [1, 1]

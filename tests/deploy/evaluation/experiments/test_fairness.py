"""The simulation behind `results/fairness.json`, shorter: what is claimed of it holds, and it is deterministic."""

from __future__ import annotations

import pytest

from deploy.evaluation.experiments.fairness import VARIANTS, measure, measure_shares
from deploy.evaluation.experiments.shares_simulation import Workload, jain

pytestmark = pytest.mark.extended


@pytest.mark.slow
def test_fair_shares_shorten_the_wait_of_modest_users_and_keep_the_hit_rate() -> None:
    fcfs, lpm, fair = (measure(variant, Workload(duration_s=20.0)) for variant in VARIANTS[:3])
    assert fair["modest_ttft_p95"] < 0.5 * min(fcfs["modest_ttft_p95"], lpm["modest_ttft_p95"])
    assert fair["jain_index_of_speed"] > max(fcfs["jain_index_of_speed"], lpm["jain_index_of_speed"]) + 0.05
    assert fair["hit_rate"] > 0.98 * lpm["hit_rate"]


@pytest.mark.slow
def test_a_named_user_keeps_its_share_in_a_flood_and_tenants_share_by_weight() -> None:
    fcfs, fair = (measure_shares(variant, 10.0) for variant in (VARIANTS[0], VARIANTS[2]))
    assert fair["named_share_beside_flood"] >= 0.95
    assert max(fair["tenant_share_error"], fair["subject_share_error"]) <= 5
    # What arrival order gives: a share by the number of requests.
    assert fcfs["named_share_beside_flood"] < 0.3
    assert fcfs["tenant_share_error"] > 50


def test_the_simulation_gives_the_same_figures_each_time() -> None:
    first, second = (measure(VARIANTS[2], Workload(duration_s=1.5)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(("values", "index"), [([1.0, 1.0, 1.0], 1.0), ([3.0, 0.0, 0.0], 1 / 3), ([2.0, 1.0], 0.9)])
def test_jain_s_index_is_one_for_equals_and_one_nth_where_one_has_all(values: list[float], index: float) -> None:
    assert jain(values) == pytest.approx(index)

from __future__ import annotations

import pytest

from services.scheduler.core.costs import FIRST_LATENCY_S, LoadCosts


def test_loading_is_tried_while_costs_are_unknown() -> None:
    assert LoadCosts(100).pays(1)
    assert LoadCosts(100, prefill_tokens_per_s=1e9).pays(1)
    assert LoadCosts(100).estimate().break_even_tokens is None


def test_short_runs_are_computed_and_long_ones_loaded() -> None:
    # 1 ms per token of prefill, 0.1 ms of copying, and 5 ms until anything is seen.
    costs = LoadCosts(1000, prefill_tokens_per_s=1000, load_bytes_per_s=1e7)
    edge = costs.estimate().break_even_tokens
    assert edge == int(FIRST_LATENCY_S / 0.0009) + 1 == 6
    assert not costs.pays(edge - 1)
    assert costs.pays(edge)
    # Behind 1,000 tokens on their way already, it takes 100 ms more.
    assert not costs.pays(100, queued_tokens=1000)
    assert costs.pays(200, queued_tokens=1000)


def test_loading_over_a_slow_bus_never_pays_off() -> None:
    costs = LoadCosts(1000, prefill_tokens_per_s=1e6, load_bytes_per_s=1e7)
    assert not costs.pays(10**9)
    assert costs.estimate().break_even_tokens is None


def test_observations_outweigh_the_calibration() -> None:
    costs = LoadCosts(1000, prefill_tokens_per_s=1000, load_bytes_per_s=1e7)
    for _ in range(60):
        costs.saw_prefill(512, 512 / 50_000)
        costs.saw_load(100, 0.1, waited_s=0.12)
    known = costs.estimate()
    assert known.prefill_tokens_per_s == pytest.approx(50_000, rel=0.02)
    assert known.load_bytes_per_s == pytest.approx(1e6, rel=0.02)
    assert known.load_latency_s == pytest.approx(0.02, rel=0.02)
    assert not costs.pays(10_000)


def test_small_chunks_do_not_change_the_prefill_estimate() -> None:
    costs = LoadCosts(1000, prefill_tokens_per_s=1000, load_bytes_per_s=1e7)
    costs.saw_prefill(1, 1.0)
    costs.saw_prefill(512, 0.0)
    assert costs.estimate().prefill_tokens_per_s == 1000

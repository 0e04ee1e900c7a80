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
    assert not costs.pays(100, copied_tokens=1100)
    assert costs.pays(200, copied_tokens=1200)


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


def test_storage_is_read_while_its_rate_is_unknown() -> None:
    costs = LoadCosts(100, prefill_tokens_per_s=1e9, load_bytes_per_s=1e9)
    assert costs.storage_pays(1000, reads=3)
    # A single page shows the round trip.
    costs.saw_storage_read(16, pages=1, seconds=10.0, waited_s=10.0)
    assert costs.storage_pays(1000, reads=3)
    assert costs.estimate().storage_break_even_tokens is None


@pytest.mark.parametrize(("bytes_per_s", "pays"), [(1.25e9, False), (12.5e9, True)])
def test_an_8b_model_on_an_h200_reads_from_100_gbe_and_computes_beside_10_gbe(bytes_per_s: float, pays: bool) -> None:
    # 43,000 tokens/s of prefill, 128 KiB a token.
    costs = LoadCosts(131_072, prefill_tokens_per_s=43_000, load_bytes_per_s=50e9)
    costs.saw_storage_read(1024, pages=64, seconds=1024 * 131_072 / bytes_per_s, waited_s=1024 * 131_072 / bytes_per_s)
    assert costs.storage_pays(8192, reads=4) is pays
    assert (costs.estimate().storage_break_even_tokens is not None) is pays
    assert costs.estimate().storage_bytes_per_s == pytest.approx(bytes_per_s)


def test_reading_from_storage_includes_loading_from_the_host_and_every_round_trip() -> None:
    # 1 ms per token of prefill, 0.4 ms of reading and 0.4 ms of loading.
    costs = LoadCosts(1000, prefill_tokens_per_s=1000, load_bytes_per_s=2.5e6)
    costs.saw_storage_read(500, pages=8, seconds=0.2, waited_s=0.2 + FIRST_LATENCY_S)
    edge = costs.estimate().storage_break_even_tokens
    assert edge is not None
    assert costs.storage_pays(edge + 1, reads=1)
    assert not costs.storage_pays(edge - 1, reads=1)
    assert not costs.storage_pays(edge + 1, reads=2)
    assert LoadCosts(1000, prefill_tokens_per_s=1000, load_bytes_per_s=1.5e6).storage_pays(10**6, reads=1)
    slower = LoadCosts(1000, prefill_tokens_per_s=1000, load_bytes_per_s=1.5e6)
    slower.saw_storage_read(500, pages=8, seconds=0.2, waited_s=0.2)
    assert not slower.storage_pays(10**6, reads=1)


def test_misses_do_not_change_the_rate_of_storage() -> None:
    costs = LoadCosts(1000, prefill_tokens_per_s=1000)
    costs.saw_storage_read(500, pages=8, seconds=0.01, waited_s=0.01)
    known = costs.estimate().storage_bytes_per_s
    for _ in range(100):
        costs.saw_storage_read(0, pages=8, seconds=0.001, waited_s=0.001)
    assert costs.estimate().storage_bytes_per_s == known

from __future__ import annotations

from prometheus_client import REGISTRY

from services.scheduler.cache_meter import TierMeter
from services.scheduler.wire.state import traffic_to_wire
from tests.services.scheduler.core.test_host_tier import OTHER, PROMPT, make_harness, serve


def sample(name: str, direction: str) -> float:
    return REGISTRY.get_sample_value(f"pando_scheduler_{name}", {"direction": direction}) or 0.0


def test_tier_traffic_is_reported_and_exported_once() -> None:
    harness = make_harness()
    serve(harness, "cold", PROMPT)
    serve(harness, "flood", OTHER)
    serve(harness, "warm", PROMPT)
    loads = harness.core.memory.loads
    assert loads is not None
    moved = {traffic.direction: traffic for traffic in traffic_to_wire(loads).traffic}
    assert moved["host_to_device"].pages == loads.host.loaded_pages > 0
    assert moved["device_to_host"].pages == loads.host.backed_up_pages > 0
    before = sample("transfer_bytes_total", "host_to_device")
    meter = TierMeter(bytes_per_page=10)
    meter.export(loads)
    meter.export(loads)
    assert sample("transfer_bytes_total", "host_to_device") - before == 10 * loads.host.loaded_pages


def test_the_load_cost_model_is_reported() -> None:
    harness = make_harness(prefill_tokens_per_s=1e3, load_bytes_per_s=1e6)
    assert harness.core.memory.loads is not None
    cost = traffic_to_wire(harness.core.memory.loads).load_cost
    assert (cost.prefill_tokens_per_s, cost.load_bytes_per_s, cost.bytes_per_token) == (1e3, 1e6, 1)
    assert cost.break_even_tokens == 6

"""What a dashboard made for vLLM reads."""

from __future__ import annotations

import importlib

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from common.metric_names import NAMES, WithVllmNames, exposed
from common.settings import MetricsSettings, ModelSettings, Settings
from gateway.metrics import GatewayMetrics


@pytest.fixture(name="registry")
def filled() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("pando_scheduler_waiting_requests", "Waiting.", registry=registry).set(3)
    Gauge("pando_scheduler_kv_usage_percent", "Used.", registry=registry).set(25)
    Gauge("pando_scheduler_retractions", "Retracted.", registry=registry).set(7)
    Counter("pando_scheduler_prompt_tokens_total", "Tokens.", registry=registry).inc(100)
    Gauge("pando_scheduler_cache_info", "Cache.", ["page_size", "device_pages"], registry=registry).labels(16, 99).set(
        1
    )
    first = Histogram("pando_gateway_time_to_first_token_seconds", "First.", ["model"], buckets=[1], registry=registry)
    first.labels("large").observe(0.5)
    Gauge("pando_other", "Another.", registry=registry).set(1)
    return registry


def read(registry: CollectorRegistry) -> dict[str, object]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {sample.name: (family.type, sample.labels, sample.value) for family in families for sample in family.samples}


def test_values_have_the_names_types_units_and_labels_of_vllm(registry: CollectorRegistry) -> None:
    found = read(WithVllmNames(registry, "small"))
    small = {"model_name": "small", "engine": "0"}
    assert found["vllm:num_requests_waiting"] == ("gauge", small, 3.0)
    assert found["vllm:kv_cache_usage_perc"] == ("gauge", small, 0.25)
    assert found["vllm:num_preemptions_total"] == ("counter", small, 7.0)
    assert found["vllm:prompt_tokens_total"] == ("counter", small, 100.0)
    assert found["vllm:cache_config_info"] == ("gauge", {**small, "block_size": "16", "num_gpu_blocks": "99"}, 1.0)
    large = {"model_name": "large", "engine": "0"}
    assert found["vllm:time_to_first_token_seconds_count"] == ("histogram", large, 1.0)
    assert found["vllm:time_to_first_token_seconds_sum"] == ("histogram", large, 0.5)
    assert found["vllm:time_to_first_token_seconds_bucket"] == ("histogram", {**large, "le": "+Inf"}, 1.0)


def test_our_own_names_stay_beside_them(registry: CollectorRegistry) -> None:
    both = read(WithVllmNames(registry, "small"))
    assert {name: found for name, found in both.items() if name.startswith("pando_")} == read(registry)


def test_a_reader_can_still_ask_for_single_metrics(registry: CollectorRegistry) -> None:
    restricted = WithVllmNames(registry, "small").restricted_registry(["pando_other"])
    assert [metric.name for metric in restricted.collect()] == ["pando_other"]


def test_every_name_belongs_to_a_metric_that_a_service_has() -> None:
    gateway = CollectorRegistry()
    GatewayMetrics(gateway)
    importlib.import_module("services.scheduler.metrics")
    names = {metric.name for registry in (REGISTRY, gateway) for metric in registry.collect()}
    assert names >= NAMES.keys()


def test_they_are_exposed_only_if_the_settings_ask_for_them(registry: CollectorRegistry) -> None:
    assert exposed(registry, Settings()) is registry
    settings = Settings(metrics=MetricsSettings(vllm_names=True), model=ModelSettings(served_name="small"))
    metrics = GatewayMetrics(CollectorRegistry(), exposed(registry, settings))
    assert b'vllm:num_requests_waiting{engine="0",model_name="small"} 3.0' in metrics.exposition()[0]

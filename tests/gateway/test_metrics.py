"""The times of tokens, beside a histogram of the Prometheus client that is given the same values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from common.requests import GenerateRequest
from common.types import RequestId, RequestOptions, StopConditions, Subject, View
from gateway.metrics import TOKEN_BUCKETS_S, GatewayMetrics, Pace

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME = "pando_gateway_inter_token_latency_seconds"


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Return the values of the histogram's samples by name and bucket."""
    return {
        (sample.name, sample.labels.get("le", "")): sample.value
        for metric in registry.collect()
        if metric.name == NAME
        for sample in metric.samples
        if not sample.name.endswith("_created")
    }


@given(st.lists(st.sampled_from(TOKEN_BUCKETS_S) | st.floats(0, 10), min_size=1, max_size=30))
def test_times_between_tokens_are_counted_as_in_a_histogram_of_prometheus(times: Sequence[float]) -> None:
    expected = CollectorRegistry()
    histogram = Histogram(NAME, "", ["model"], buckets=TOKEN_BUCKETS_S, registry=expected).labels("tiny")
    registry = CollectorRegistry()
    options = RequestOptions(stop=StopConditions(max_tokens=1))
    request = GenerateRequest(RequestId("a"), View(Subject("tenant", "ann")), "tiny", "text", options)
    instants = [0.0, 0.0]
    pace = Pace(GatewayMetrics(registry), request, lambda: instants[-1])
    pace.note(0, 1)
    for seconds in times:
        instants.append(instants[-1] + seconds)
        pace.note(0, 2)
        histogram.observe(instants[-1] - instants[-2])
    assert samples(registry) == samples(expected)
    assert len(samples(registry)) == len(TOKEN_BUCKETS_S) + 3
    assert registry.get_sample_value("pando_gateway_completion_tokens_total", {"model": "tiny"}) == 1 + 2 * len(times)
    assert registry.get_sample_value("pando_gateway_time_to_first_token_seconds_count", {"model": "tiny"}) == 1

"""Latency histograms name a trace for a reader that asks for OpenMetrics, while traces are exported."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from common.tracing import use_sink
from tests.gateway.support import gateway_saying

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.spans import TraceSpan
    from tests.gateway.support import FakedGateway

TRACE = "0af7651916cd43dd8448eb211c80319c"
SAMPLED, UNSAMPLED = (f"00-{TRACE}-b7ad6b7169203331-{flags}" for flags in ("01", "00"))
OPEN_METRICS = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
LATENCIES = {
    "pando_gateway_time_to_first_token_seconds",
    "pando_gateway_inter_token_latency_seconds",
    "pando_gateway_request_seconds",
}


class Nowhere:
    def add(self, span: TraceSpan) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def _exported() -> Iterator[None]:
    use_sink(Nowhere(), 0.0)
    yield
    use_sink(None)


async def ask(gateway: FakedGateway, traceparent: str) -> None:
    body = {"model": "tiny", "prompt": "Hello", "stream": True}
    response = await gateway.post("/v1/completions", body, {"traceparent": traceparent})
    assert response.status_code == 200


async def exemplars(gateway: FakedGateway) -> dict[str, set[str]]:
    """Return the traces that each metric names."""
    response = await gateway.get("/metrics", OPEN_METRICS)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(response.text):  # type: ignore[no-untyped-call]  # has no types
        for sample in family.samples:
            if sample.exemplar is not None:
                assert sample.name.endswith("_bucket")
                assert 0 <= sample.exemplar.value <= float(sample.labels["le"])
                found.setdefault(family.name, set()).add(sample.exemplar.labels["trace_id"])
    return found


async def test_latencies_name_the_trace_of_a_sampled_request() -> None:
    gateway = gateway_saying("a", "b", "c")
    await ask(gateway, UNSAMPLED)
    assert await exemplars(gateway) == {}
    await ask(gateway, SAMPLED)
    assert await exemplars(gateway) == {name: {TRACE} for name in LATENCIES}


async def test_the_plain_format_has_no_exemplars() -> None:
    gateway = gateway_saying("a", "b", "c")
    await ask(gateway, SAMPLED)
    response = await gateway.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert "pando_gateway_time_to_first_token_seconds_count" in response.text
    assert TRACE not in response.text


async def test_without_an_export_there_are_no_exemplars() -> None:
    use_sink(None)
    gateway = gateway_saying("a", "b", "c")
    await ask(gateway, SAMPLED)
    assert await exemplars(gateway) == {}

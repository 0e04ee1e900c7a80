"""One trace through all five services, as a collector receives it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from common.settings import GatewaySettings, ModelSettings, SchedulerSettings, Settings, TracingSettings
from deploy.supervisor.layout import free_port
from tests.e2e.conftest import serve
from tests.fakes.collector import CollectedSpan, Collector
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
# Of another test.
OTHER_TRACE = "7d" * 16
SECRET = "xylophone"
SPANS = {
    ("pando-tokenizer", "tokenize"),
    ("pando-scheduler", "queue"),
    ("pando-scheduler", "prefill"),
    ("pando-scheduler", "decode"),
    ("pando-worker", "execute"),
    ("pando-detokenizer", "detokenize"),
    ("pando-gateway", "deliver"),
}


@pytest.fixture(name="collector", scope="module")
def listening() -> Iterator[Collector]:
    collector = Collector()
    collector.start()
    yield collector
    collector.stop()


@pytest.fixture(name="served", scope="module")
def traced(run_root: Path, collector: Collector) -> Iterator[Served]:
    settings = Settings(
        model=ModelSettings(load_format="fake"),
        gateway=GatewaySettings(port=0, metrics_port=free_port("127.0.0.1")),
        scheduler=SchedulerSettings(metrics_port=free_port("127.0.0.1")),
        tracing=TracingSettings(endpoint=collector.endpoint, sample_ratio=0.0),
    )
    yield from serve(settings, run_root)


def ask(served: Served, flags: str, trace: str = TRACE) -> None:
    body = {
        "model": served.model,
        "messages": [{"role": "user", "content": f"Say {SECRET}."}],
        "max_tokens": 5,
        "user": "Ann Onymous",
    }
    headers = {"traceparent": f"00-{trace}-{PARENT}-{flags}"}
    with served.http() as http:
        http.post("/v1/chat/completions", json=body, headers=headers).raise_for_status()


def test_one_trace_goes_through_all_services(served: Served, collector: Collector) -> None:
    ask(served, "00", trace="f" * 32)
    ask(served, "01")

    def own() -> list[CollectedSpan]:
        return [span for span in collector.spans if span.trace_id == TRACE]

    root_name = f"chat {served.model}"
    wait_until(lambda: {(span.service, span.name) for span in own()} >= {*SPANS, ("pando-gateway", root_name)})
    [root] = [span for span in own() if span.name == root_name]
    assert root.parent_id == PARENT
    parts = [span for span in own() if span is not root]
    assert {(span.service, span.name) for span in parts} == SPANS
    assert {span.parent_id for span in parts} == {root.span_id}
    assert all(root.start_ns <= span.start_ns <= span.end_ns for span in parts)
    assert root.attributes["gen_ai.usage.output_tokens"] == 5
    assert root.attributes["gen_ai.operation.name"] == "chat"
    [execute] = [span for span in parts if span.name == "execute"]
    assert execute.attributes["pando.row.passes"] >= 5
    assert execute.events["prefill_chunk"]["tokens"] > 0
    # Neither text nor a user's name, and nothing of requests that are not sampled.
    assert SECRET not in str(collector.spans)
    assert "Onymous" not in str(collector.spans)
    assert {span.trace_id for span in collector.spans} <= {TRACE, OTHER_TRACE}


def test_latencies_of_gateway_and_scheduler_name_the_trace(served: Served) -> None:
    ask(served, "01", OTHER_TRACE)
    settings = served.deployment.layout.find("gateway").settings
    ports = {
        "pando_gateway_time_to_first_token_seconds": settings.gateway.metrics_port,
        "pando_scheduler_queue_seconds": settings.scheduler.metrics_port,
    }
    for name, port in ports.items():
        accept = {"accept": "application/openmetrics-text;version=1.0.0"}
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", headers=accept, timeout=30, trust_env=False).text
        families = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]  # has no types
        [family] = [family for family in families if family.name == name]
        traces = {sample.exemplar.labels["trace_id"] for sample in family.samples if sample.exemplar}
        assert OTHER_TRACE in traces, name

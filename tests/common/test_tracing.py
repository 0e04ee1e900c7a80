"""Spans on their way to a collector."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.settings import TracingSettings
from common.spans import SpanEvent, TraceSpan
from common.tracing import (
    close_tracing,
    configure_tracing,
    is_recorded,
    is_sampled,
    record,
    record_span,
    samples_new_trace,
    use_sink,
)
from common.types import TraceContext
from tests.fakes.collector import Collector
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

TRACE = "0af7651916cd43dd8448eb211c80319c"
OWN, PARENT = "b7ad6b7169203331", "00f067aa0ba902b7"
SAMPLED = TraceContext(f"00-{TRACE}-{OWN}-01", "vendor=1", PARENT)
UNSAMPLED = TraceContext(f"00-{TRACE}-{OWN}-00")


@pytest.fixture(name="collector")
def listening() -> Iterator[Collector]:
    collector = Collector()
    collector.start()
    yield collector
    use_sink(None)
    collector.stop()


def test_a_request_and_its_parts_are_one_trace(collector: Collector) -> None:
    configure_tracing("gateway", TracingSettings(endpoint=collector.endpoint))
    record("tokenize", SAMPLED, 10.0, 10.5, {"tokens": 7})
    event = SpanEvent("first", 10.7, {"n": 1})
    record_span(
        TraceSpan("chat tiny", SAMPLED, 10.0, 11.0, {"ok": True}, [event], "timeout", is_root=True, parent_id=PARENT)
    )
    record("unsampled", UNSAMPLED, 10.0, 11.0, {})
    record("untraced", None, 10.0, 11.0, {})
    close_tracing()
    wait_until(lambda: len(collector.spans) == 2)
    part, whole = collector.spans
    assert {part.service, whole.service} == {"pando-gateway"}
    assert (part.trace_id, part.parent_id, part.name) == (TRACE, OWN, "tokenize")
    assert (part.start_ns, part.end_ns) == (10_000_000_000, 10_500_000_000)
    assert part.attributes == {"tokens": 7}
    assert (whole.trace_id, whole.span_id, whole.parent_id) == (TRACE, OWN, PARENT)
    assert whole.attributes == {"ok": True, "error.type": "timeout"}
    assert whole.events == {"first": {"n": 1}}


def test_a_request_without_a_parent_begins_its_trace(collector: Collector) -> None:
    configure_tracing("gateway", TracingSettings(endpoint=collector.endpoint))
    record_span(TraceSpan("chat tiny", SAMPLED, 10.0, 11.0, {}, is_root=True))
    close_tracing()
    wait_until(lambda: len(collector.spans) == 1)
    [whole] = collector.spans
    assert (whole.trace_id, whole.span_id, whole.parent_id) == (TRACE, OWN, "")


@pytest.mark.parametrize("text", ["", "00", "01-x-y-01", f"00-{TRACE}-{OWN}-", f"00-{TRACE.upper()}-{OWN}-01"])
def test_a_malformed_context_is_not_sampled(text: str) -> None:
    assert not is_sampled(TraceContext(text))


def test_without_an_endpoint_nothing_is_sampled_or_recorded() -> None:
    configure_tracing("gateway", TracingSettings())
    assert not samples_new_trace()
    assert not is_recorded(SAMPLED)
    record("tokenize", SAMPLED, 10.0, 10.5, {})
    close_tracing()


@pytest.mark.parametrize(("ratio", "expected"), [(0.0, {False}), (1.0, {True}), (0.5, {False, True})])
def test_new_traces_are_sampled_by_the_ratio(ratio: float, expected: set[bool]) -> None:
    class Nowhere:
        def add(self, span: TraceSpan) -> None: ...

        def close(self) -> None: ...

    use_sink(Nowhere(), ratio)
    assert {samples_new_trace() for _ in range(200)} == expected
    use_sink(None)


def test_an_absent_collector_delays_nobody() -> None:
    configure_tracing("gateway", TracingSettings(endpoint="http://127.0.0.1:9"))
    for _ in range(10_000):
        record("tokenize", SAMPLED, 10.0, 10.5, {})
    use_sink(None)

"""Exports spans over OTLP with OpenTelemetry's SDK; needs the packages of the extra `tracing`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, StatusCode, TraceFlags, set_span_in_context
from opentelemetry.trace.span import TraceState

if TYPE_CHECKING:
    from common.spans import TraceSpan

FLUSH_MS = 3_000
# Spans are sent when as many wait, or after this time.
EXPORT_MS = 1_000
NS = 1_000_000_000


class OtlpSink:
    """Sends spans in batches from a thread of its own; while the collector is away, the oldest are dropped."""

    def __init__(self, service: str, version: str, endpoint: str) -> None:
        """`endpoint`: http://host:port, or https:// with the system's authorities."""
        resource = Resource.create({"service.name": f"pando-{service}", "service.version": version})
        self._ids = _PresetIds()
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=5)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_MS))
        self._tracer = self._provider.get_tracer("pando", version)

    def add(self, span: TraceSpan) -> None:
        """Queue a span."""
        _, trace_id, span_id, flags = span.trace.traceparent.split("-")
        parent_id = span.parent_id if span.is_root else span_id
        self._ids.span_id = int(span_id, 16) if span.is_root else None
        self._ids.trace_id = int(trace_id, 16)
        context = None
        if parent_id is not None:
            state = TraceState.from_header([span.trace.tracestate]) if span.trace.tracestate else None
            own = SpanContext(int(trace_id, 16), int(parent_id, 16), True, TraceFlags(int(flags, 16)), state)
            context = set_span_in_context(NonRecordingSpan(own))
        made = self._tracer.start_span(
            span.name,
            context,
            SpanKind.SERVER if span.is_root else SpanKind.INTERNAL,
            dict(span.attributes),
            start_time=int(span.start * NS),
        )
        for event in span.events:
            made.add_event(event.name, dict(event.attributes or {}), int(event.at * NS))
        if span.error is not None:
            made.set_attribute("error.type", span.error)
            made.set_status(StatusCode.ERROR)
        made.end(int(span.end * NS))

    def close(self) -> None:
        """Send what is pending, for a few seconds at most."""
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()


class _PresetIds(RandomIdGenerator):
    """Gives the next span the ids that were chosen when the request arrived."""

    span_id: int | None = None
    trace_id: int | None = None

    def generate_span_id(self) -> int:
        preset, self.span_id = self.span_id, None
        return super().generate_span_id() if preset is None else preset

    def generate_trace_id(self) -> int:
        return super().generate_trace_id() if self.trace_id is None else self.trace_id

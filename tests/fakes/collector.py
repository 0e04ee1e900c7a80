"""A collector of OpenTelemetry spans that keeps them in memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class CollectedSpan:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: dict[str, dict[str, Any]]


@dataclass
class Collector:
    """Listens on a free port of the loopback interface between `start` and `stop`."""

    spans: list[CollectedSpan] = field(default_factory=list)
    port: int = 0

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def Export(self, request: Any, context: Any) -> Any:
        for group in request.resource_spans:
            resource = _values(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += [_collected(resource["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


def _collected(service: str, span: Any) -> CollectedSpan:
    return CollectedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        events={event.name: _values(event.attributes) for event in span.events},
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}

"""OpenTelemetry spans, made when what they describe has ended.

Each service reports its part of sampled requests with `record`; without an endpoint in the settings this does nothing.
Spans carry sizes, times and reasons, but no text, no names of users, and nothing about other requests.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Protocol

from common.errors import ConfigurationError
from common.spans import TraceSpan
from common.version import version

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.settings import TracingSettings
    from common.spans import SpanEvent, Value
    from common.types import TraceContext

# As the gateway writes it, with the flag for sampling set.
SAMPLED = re.compile("00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f][13579bdf]")


class SpanSink(Protocol):
    """Takes finished spans; must not block."""

    def add(self, span: TraceSpan) -> None:
        """Export a span."""

    def close(self) -> None:
        """Send what is pending, for a few seconds at most."""


class _Tracing:
    sink: SpanSink | None = None
    sample_ratio = 0.0


_tracing = _Tracing()


def configure_tracing(service: str, settings: TracingSettings) -> None:
    """Export the spans of this process as the settings say.

    Raises:
        ConfigurationError: the packages of the extra `tracing` are missing.
    """
    if settings.endpoint is None:
        return
    try:
        from common.otlp import OtlpSink
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"tracing.endpoint requires the extra tracing; {error.name} is missing") from error
    use_sink(OtlpSink(service, version(), settings.endpoint), settings.sample_ratio)


def use_sink(sink: SpanSink | None, sample_ratio: float = 1.0) -> None:
    """Send spans to `sink`; None: to nowhere."""
    _tracing.sink, _tracing.sample_ratio = sink, sample_ratio if sink is not None else 0.0


def close_tracing() -> None:
    """Send what is pending, and stop."""
    sink, _tracing.sink = _tracing.sink, None
    if sink is not None:
        sink.close()


def samples_new_trace() -> bool:
    """Whether a request without a trace of its own is to be sampled."""
    return _tracing.sink is not None and random.random() < _tracing.sample_ratio


def is_sampled(trace: TraceContext | None) -> bool:
    """Whether spans of this trace are wanted."""
    return trace is not None and SAMPLED.fullmatch(trace.traceparent) is not None


def is_recorded(trace: TraceContext | None) -> bool:
    """Whether `record` would do something for this trace."""
    return _tracing.sink is not None and is_sampled(trace)


def exemplar_of(trace: TraceContext | None) -> dict[str, str] | None:
    """Return the labels that link a histogram's sample to the trace; None if its spans are not exported."""
    if trace is None or not is_recorded(trace):
        return None
    return {"trace_id": trace.traceparent.split("-")[1]}


def record(
    name: str,
    trace: TraceContext | None,
    start: float,
    end: float,
    attributes: Mapping[str, Value],
    events: Sequence[SpanEvent] = (),
) -> None:
    """Report a part of a request's way as a child of the request's span, if its trace is sampled."""
    if trace is not None and is_recorded(trace):
        record_span(TraceSpan(name, trace, start, max(start, end), attributes, events))


def record_span(span: TraceSpan) -> None:
    """Report a span."""
    if _tracing.sink is not None and is_sampled(span.trace):
        _tracing.sink.add(span)

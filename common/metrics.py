"""Prometheus plumbing that all services share. Metric names carry units; each service declares its own metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram, start_http_server

from common.errors import ConfigurationError

RPC_SECONDS = Histogram(
    "pando_rpc_seconds", "Duration of unary calls and of streams, as the server saw it.", ["method", "status"]
)
RPC_TOTAL = Counter("pando_rpc_total", "Calls and streams that ended, as the server saw it.", ["method", "status"])
RPC_REFUSED = Counter(
    "pando_rpc_refused_total",
    "Calls refused because the role of the caller's certificate may not call the method.",
    ["method", "role"],
)
MODEL_INFO = Gauge(
    "pando_model_info",
    "1 for the model that this process serves; join it with its other metrics.",
    ["model"],
)


def start_metrics_server(port: int, host: str) -> int:
    """Serve /metrics at `port` of the interface `host`, from a thread of its own; 0 takes a free port. Return the port.

    Raises:
        ConfigurationError: the address is in use or cannot be bound.
    """
    try:
        server, _ = start_http_server(port, host)
    except OSError as error:
        raise ConfigurationError(f"metrics_port: cannot listen on {host}:{port}: {error}") from error
    return server.server_port

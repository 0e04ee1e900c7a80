"""Prometheus metrics that all services share, and the metrics server. Each service declares its own metrics."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from common.errors import ConfigurationError

RPC_SECONDS = Histogram(
    "pando_rpc_seconds", "Duration of unary calls and streams, measured by the server.", ["method", "status"]
)
RPC_TOTAL = Counter("pando_rpc_total", "Calls and streams that ended, counted by the server.", ["method", "status"])
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
BUILD_INFO = Gauge(
    "pando_build_info",
    "1 for the version of this process and the protocol that it speaks with other services.",
    ["version", "protocol"],
)


def start_metrics_server(port: int, host: str, registry: CollectorRegistry = REGISTRY) -> int:
    """Serve /metrics on `host`:`port` from a separate thread and return the port; port 0 selects a free one.

    Raises:
        ConfigurationError: the address is in use or cannot be bound.
    """
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigurationError(f"metrics_port: cannot listen on {host}:{port}: {error}") from error
    return server.server_port

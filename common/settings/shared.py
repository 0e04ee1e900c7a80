"""Sections of the configuration that several services read."""

from __future__ import annotations

from pathlib import Path

from common.section import Section


class MetricsSettings(Section):
    """The services' Prometheus endpoints; `metrics_port` of a service enables its own."""

    host: str = "127.0.0.1"
    """Interface of the endpoints. For a scraper on another host, use one that only the scraper can reach."""


class LimitsSettings(Section):
    """Limits of tenants and subjects, which gateways and schedulers enforce."""

    file: Path | None = None
    """TOML file with limits of tenants and subjects, for gateways and schedulers; reloaded when it changes. Absent: no
    limits, and equal weights, quotas and floors."""

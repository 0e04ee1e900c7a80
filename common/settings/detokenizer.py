"""The detokenizer's section of the configuration."""

from __future__ import annotations

from pydantic import Field

from common.section import Section


class DetokenizerSettings(Section):
    """The conversion of token ids to text."""

    address: str = "127.0.0.1:50054"
    """gRPC address to listen on: host:port or unix:path."""
    drain_s: float = Field(default=15.0, ge=0)
    """Seconds that open choices have to finish after the signal to stop."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint, in plaintext and without credentials; absent: none."""
    metrics_host: str = "127.0.0.1"
    """Interface of the Prometheus endpoint. For a scraper on another host, use one that only the scraper can reach."""

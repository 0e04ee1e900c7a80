"""The detokenizer's section of the configuration."""

from __future__ import annotations

from pydantic import Field

from common.section import Section


class DetokenizerSettings(Section):
    """The conversion of token ids to text."""

    address: str = "127.0.0.1:50054"
    """gRPC address to listen on: host:port or unix:path."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint, in plaintext and without credentials; absent: none."""

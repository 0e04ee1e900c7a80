"""The tokenizer's and the detokenizer's sections of the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from common.section import Addresses, Section


class RoutingSettings(Section):
    """Choice among several scheduler groups."""

    policy: Literal["prefix_aware", "least_loaded", "round_robin"] = "prefix_aware"
    """Choice of a request's scheduler group. prefix_aware: the same group for one user's prompts with equal beginnings.
    least_loaded: the group with the fewest open requests. round_robin: each group in turn."""


class TokenizerSettings(Section):
    """The conversion of text to token ids."""

    address: str = "127.0.0.1:50051"
    """gRPC address to listen on: host:port or unix:path."""
    schedulers: Addresses = Field(default=("127.0.0.1:50052",), min_length=1)
    """Addresses of the scheduler groups, usually a single one; dns:host:port stands for all addresses that the host
    name resolves to, which are looked up periodically."""
    threads: int = Field(default=2, ge=1)
    """Threads that tokenize. With two or more, one is kept free of texts of more than 65,536 characters."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint, in plaintext and without credentials; absent: none."""
    routing: RoutingSettings = RoutingSettings()


class DetokenizerSettings(Section):
    """The conversion of token ids to text."""

    address: str = "127.0.0.1:50054"
    """gRPC address to listen on: host:port or unix:path."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint, in plaintext and without credentials; absent: none."""

"""The tokenizer's section of the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from common.section import Section


class RoutingSettings(Section):
    """Choice among several scheduler groups."""

    policy: Literal["prefix_aware", "least_loaded", "round_robin"] = "prefix_aware"
    """Choice of a request's scheduler group. prefix_aware: the same group for one user's prompts with equal beginnings.
    least_loaded: the group with the fewest open requests. round_robin: each group in turn."""
    prefix_tokens: int = Field(default=64, ge=0)
    """With policy prefix_aware: leading tokens that are compared; 0: all prompts of a user count as equal."""


class TokenizerSettings(Section):
    """The conversion of text to token ids."""

    address: str = "127.0.0.1:50051"
    """gRPC address to listen on: host:port or unix:path."""
    scheduler: str = "127.0.0.1:50052"
    """Address of the scheduler."""
    schedulers: tuple[str, ...] = ()
    """Addresses of several scheduler groups, instead of `scheduler`; dns:host:port stands for all addresses that the
    host name resolves to, which are looked up periodically."""
    threads: int = Field(default=2, ge=1)
    """Threads that tokenize. With two or more, one is kept free of texts of more than 65,536 characters."""
    max_pending_requests: int = Field(default=4096, ge=1)
    """Requests that are being tokenized or wait for the scheduler's answer; further ones are refused with a hint when
    to retry. One tenant gets at most three quarters of the places, one subject 60 %."""
    drain_s: float = Field(default=5.0, ge=0)
    """Seconds that pending requests have to be submitted after the signal to stop."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint, in plaintext and without credentials; absent: none."""
    metrics_host: str = "127.0.0.1"
    """Interface of the Prometheus endpoint. For a scraper on another host, use one that only the scraper can reach."""
    routing: RoutingSettings = RoutingSettings()

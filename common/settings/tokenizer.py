"""The tokenizer's section of the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from common.section import Section


class TokenizerSettings(Section):
    """Text to ids."""

    address: str = "127.0.0.1:50051"
    """gRPC address to listen on: host:port or unix:path."""
    scheduler: str = "127.0.0.1:50052"
    """Address of the scheduler."""
    schedulers: tuple[str, ...] = ()
    """Addresses of several scheduler groups, in the place of `scheduler`; dns:host:port stands for all addresses behind
    the host, which is looked up again and again."""
    routing: Literal["prefix_aware", "least_loaded", "round_robin"] = "prefix_aware"
    """Which group gets a request: always the same for one user's prompts that begin alike; the one with the fewest open
    requests; or one after the other."""
    routing_prefix_tokens: int = Field(default=64, ge=0)
    """With routing prefix_aware: prompts of one user begin alike if so many tokens are the same; 0: all of them do."""
    routing_load_factor: float = Field(default=1.25, gt=1)
    """With routing prefix_aware: no group gets more than so many times its share of the open requests."""
    threads: int = Field(default=2, ge=1)
    """Threads that encode. With two or more, one is kept free of texts of more than 65,536 characters."""
    max_pending_requests: int = Field(default=4096, ge=1)
    """Requests that are encoded or wait for the scheduler's answer; more are refused with a hint when to retry. One
    tenant gets at most three quarters of the places, one subject 60 %."""
    drain_s: float = Field(default=5.0, ge=0)
    """How long requests that are being submitted may still be answered after the signal to stop."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint, in plaintext and without credentials; absent: none."""
    metrics_host: str = "127.0.0.1"
    """Interface of the Prometheus endpoint. For a scraper on another host, name one that only it can reach."""

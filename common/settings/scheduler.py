"""The scheduler's section of the configuration."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr

from common.settings.queues import QueueSettings


class SchedulerSettings(QueueSettings):
    """Rows, steps, KV pages and timeouts of the scheduler."""

    address: str = "127.0.0.1:50052"
    """gRPC address to listen on: host:port or unix:path."""
    workers: tuple[str, ...] = ("127.0.0.1:50053",)
    """Addresses of the tensor-parallel ranks, rank 0 first."""
    rendezvous: str = "127.0.0.1:29555"
    """host:port at which the ranks connect to each other; used with two or more ranks."""
    detokenizer: str = "127.0.0.1:50054"
    """Address of the detokenizer."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint, in plaintext and without credentials; absent: none."""
    metrics_host: str = "127.0.0.1"
    """Interface of the Prometheus endpoint. For a scraper on another host, use one that only the scraper can reach."""
    page_size: int = Field(default=16, ge=1, le=256)
    """Tokens per KV page: the unit of matching, sharing and transfer."""
    max_rows: int = Field(default=64, ge=1, le=4096)
    """Sequences that run at the same time; `pando up` sets 256 on GPUs if it is not set."""
    max_step_tokens: int = Field(default=512, ge=16)
    """Tokens of one step, decode and prefill together: small steps keep decode latency even, large ones prefill faster.
    `pando up` sets 4,096 on GPUs if it is not set."""
    mixed_step_tokens: int | None = Field(default=None, ge=16)
    """Prompt tokens in a step that also decodes, to keep decode latency even. If more than twice as many wait, a step
    takes half of those waiting, up to max_step_tokens, so that the queue does not grow. Absent: always as many as
    fit."""
    device_pages: int | None = Field(default=None, ge=1)
    """KV pages on the device; absent: the worker derives the number from free memory."""
    memory_fraction: float = Field(default=0.85, gt=0, le=1)
    """Share of free memory that the worker may use for weights and KV."""
    window_ratio: float = Field(default=0.25, ge=0, le=1)
    """For models with sliding-window layers (Gemma 3): pages of these layers per page of the other layers; more if the
    windows of all rows need it and memory suffices. 0: all layers keep all tokens, in one pool, as they always do with
    a host tier or cache_decision_log."""
    queue_depth: int = Field(default=2, ge=1, le=16)
    """Plans in flight; with 2, a plan is sent while the previous one runs, which hides the network's latency."""
    lease_ms: float = Field(default=8.0, ge=0)
    """Target duration of a plan in milliseconds while no request waits; it determines the steps of a plan (multi-step
    decode)."""
    max_lease_steps: int = Field(default=16, ge=1, le=256)
    """Upper bound on the steps of one plan."""
    jump_tokens: int = Field(default=16, ge=0, le=256)
    """Jump-forward: when a grammar determines the next tokens, up to this many are appended at once and computed in one
    pass; pages for them are granted in advance. 0: one token per pass. The output is the same."""
    waiting_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds after which a request that has not started fails with a timeout."""
    running_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds after its start at which an unfinished request fails with a timeout."""
    worker_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds without any result, while plans are in flight, after which the worker group counts as dead."""
    drain_s: float = Field(default=10.0, ge=0)
    """Seconds that open requests have to finish after SIGTERM."""
    admin_token: SecretStr | None = None
    """Callers that send `authorization: Bearer TOKEN` see owners and token ids in state dumps, and may forget users and
    pin prompts; absent: no caller may. When it is set, flush, pause and resume require it, too."""
    admin_token_file: Path | None = None
    """File with the admin token, instead of the token itself."""

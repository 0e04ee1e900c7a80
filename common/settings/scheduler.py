"""The scheduler's section of the configuration."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr

from common.settings.queues import QueueSettings


class SchedulerSettings(QueueSettings):
    """Queues, cache, step plans."""

    address: str = "127.0.0.1:50052"
    """gRPC address to listen on: host:port or unix:path."""
    workers: tuple[str, ...] = ("127.0.0.1:50053",)
    """Addresses of the tensor-parallel ranks, rank 0 first."""
    rendezvous: str = "127.0.0.1:29555"
    """host:port at which the ranks find each other; used with two or more."""
    detokenizer: str = "127.0.0.1:50054"
    """Address of the detokenizer."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint, in plaintext and without credentials; absent: none."""
    metrics_host: str = "127.0.0.1"
    """Interface of the Prometheus endpoint. For a scraper on another host, name one that only it can reach."""
    page_size: int = Field(default=16, ge=1, le=256)
    """Tokens per KV page: the unit of matching, sharing and transfer."""
    max_rows: int = Field(default=64, ge=1, le=4096)
    """Requests that run at the same time; `pando up` takes 256 on GPUs, unless told."""
    max_step_tokens: int = Field(default=512, ge=16)
    """Tokens of one step, decode and prefill together; small steps keep decoding smooth, large ones prefill fast.
    `pando up` takes 4,096 on GPUs, unless told."""
    mixed_step_tokens: int | None = Field(default=None, ge=16)
    """Prompt tokens of a step in which rows decode, while few wait: then decoding is smooth. Of more, a step takes
    half, up to max_step_tokens, so that the queue does not grow. Absent: always as many as fit."""
    device_pages: int | None = Field(default=None, ge=1)
    """KV pages on the device; absent: sized by the worker from free memory."""
    memory_fraction: float = Field(default=0.85, gt=0, le=1)
    """Share of free memory that the worker may take for weights and KV."""
    window_ratio: float = Field(default=0.25, ge=0, le=1)
    """For models of which some layers attend to a window only (Gemma 3): pages of those layers for each page of the
    others, but enough for the windows of all rows if there is room. 0: all layers keep all tokens, in one pool, as they
    do with a host tier or cache_decision_log."""
    queue_depth: int = Field(default=2, ge=1, le=16)
    """Plans in flight: 2 hides the network behind the step before."""
    lease_ms: float = Field(default=8.0, ge=0)
    """Aim for a plan's duration when nothing waits: a plan spans so many steps that it lasts about this long."""
    max_lease_steps: int = Field(default=16, ge=1, le=256)
    """Upper bound on the steps of one plan."""
    jump_tokens: int = Field(default=16, ge=0, le=256)
    """Where a grammar leaves a row no choice, it gets up to so many tokens at once, and computes them together; pages
    for them are granted in advance. 0: one token a pass. What is written is the same."""
    waiting_timeout_s: float = Field(default=300.0, gt=0)
    """A request that has not started by then fails with a timeout."""
    running_timeout_s: float = Field(default=3600.0, gt=0)
    """A request that has not finished so long after its start fails with a timeout."""
    worker_timeout_s: float = Field(default=120.0, gt=0)
    """Without any result for so long while plans are in flight, the worker group is taken for dead."""
    drain_s: float = Field(default=10.0, ge=0)
    """After SIGTERM, open requests get this long to finish."""
    admin_token: SecretStr | None = None
    """Callers that send `authorization: Bearer TOKEN` see owners and token ids in state dumps, and may forget users and
    pin prompts; absent: nobody does. When it is set, flush, pause and resume need it, too."""
    admin_token_file: Path | None = None
    """File that holds the admin token instead."""

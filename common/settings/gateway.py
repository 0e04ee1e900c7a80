"""The gateway's section of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from common.settings.backend import BackendSettings
from common.settings.identity import IdentitySettings


class GatewaySettings(IdentitySettings):
    """HTTP front end."""

    host: str = "127.0.0.1"
    """Interface to listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """TCP port; 0 picks a free one."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint, in plaintext and without credentials. Absent: none; administrators find /metrics
    at the API's port."""
    metrics_host: str = "127.0.0.1"
    """Interface of the Prometheus endpoint. For a scraper on another host, name one that only it can reach."""
    certificate: Path | None = None
    """Certificate with its chain (PEM) to serve HTTPS with; read anew when the file changes. Absent: HTTP."""
    key: Path | None = None
    """The private key that belongs to it (PEM)."""
    client_authority: Path | None = None
    """Authorities (PEM) of clients' certificates: who shows none of theirs is refused. Absent: clients need none.
    Health and readiness are then answered at rpc.probe_port, too, in plaintext, for those who cannot show one."""
    cors_origins: tuple[str, ...] = ()
    """Pages of these origins (https://chat.example) may call the API from their visitors' browsers; "*": all pages.
    Without keys, whatever such a page asks counts as asked by whoever runs the browser."""
    tokenizer: str = "127.0.0.1:50051"
    """Address of the tokenizer."""
    detokenizer: str = "127.0.0.1:50054"
    """Address of the detokenizer."""
    scheduler: str | None = None
    """Address of the scheduler, for administration only; absent: such endpoints answer 503."""
    schedulers: tuple[str, ...] = ()
    """Addresses of several scheduler groups, in the place of `scheduler`: what tokenizer.schedulers says."""
    models: dict[str, BackendSettings] = Field(default_factory=dict)
    """Several models by the names that their tokenizers serve, in the place of the addresses above; in flags and
    environment as JSON: {"small": {"tokenizer": "host:port", "detokenizer": "host:port"}}."""
    default_model: str | None = None
    """What requests mean that name no model; absent: they are refused, except where clients never name one and there is
    only one."""
    scheduler_admin_token: SecretStr | None = None
    """The schedulers' admin token, if they have one: they flush caches for nobody else."""
    scheduler_admin_token_file: Path | None = None
    """File that holds it instead."""
    state: SecretStr | None = None
    """Where limits are counted and responses stored. memory, or absent: in this process, for a single gateway. For
    several gateways: the URL of a Redis or Valkey server that all of them use (redis://, rediss:// or unix://), which
    must keep others out: it has what clients have said. It should not evict keys (maxmemory-policy noeviction)."""
    state_file: Path | None = None
    """File that holds the URL instead."""
    state_secret: SecretStr | None = None
    """At least 32 characters that cannot be guessed, the same for all gateways and unknown to others who can write to
    the server. Gateways sign with it what they ask of each other. Without it, administrators end others' requests only
    at the gateway that they ask, and anyone who can write to the server can end a request whose id and subject they
    know."""
    state_secret_file: Path | None = None
    """File that holds it instead."""
    state_prefix: str = Field(default="pando", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """How keys and channels at the server begin; deployments that share a server need different ones."""
    state_failure: Literal["open", "closed"] = "open"
    """While the server is away: each gateway holds clients to the limits by itself, so that N gateways allow N times
    as much (open), or requests that have limits are answered with 503 (closed)."""
    state_timeout_s: float = Field(default=1.0, gt=0, le=60)
    """The server counts as away when an answer takes longer; then nothing waits for it until it answers again."""
    responses_file: Path | None = None
    """SQLite database of stored responses of a single gateway; absent: one in memory, as long as the gateway lives."""
    responses_lifetime_days: float = Field(default=30.0, gt=0)
    """How long responses are stored."""
    responses_max_bytes: int = Field(default=256 * 1024 * 1024, ge=1024 * 1024)
    """Room for stored responses, of all gateways together. Beyond that, the tenant that uses most, and in it the
    subject that uses most, loses its oldest."""
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024)
    """Largest request body; more is answered with 413."""
    max_open_requests: int = Field(default=8192, ge=1)
    """Prompts that may be open at the same time; more are answered with 429."""
    stream_buffer_bytes: int = Field(default=1024 * 1024, ge=1024)
    """How much of a stream may wait for a slow client before its request is aborted."""
    keep_alive_s: float = Field(default=15.0, gt=0)
    """A stream on which nothing has been sent for so long gets a comment, so that nobody on the way closes it."""
    request_timeout_s: float | None = Field(default=None, gt=0)
    """Limit of a request from arrival to finish; absent: only the scheduler's own limits."""
    resume_attempts: int = Field(default=5, ge=0)
    """How often a choice is continued after a service that worked on it went away."""
    resume_deadline_s: float = Field(default=60.0, ge=0)
    """How long an interrupted choice may wait for its next token."""
    admission_deadline_s: float = Field(default=10.0, ge=0)
    """How long a new request may wait for a ring that is away, before 503."""
    silence_timeout_s: float = Field(default=600.0, gt=0)
    """A request of which the ring said nothing for so long is taken for lost; above the scheduler's waiting timeout."""
    drain_s: float = Field(default=30.0, ge=0)
    """How long open requests may go on after SIGTERM."""

"""Sections of the configuration that several services read: metrics, limits, fleet, logs, trust between services."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from common.rpc.roles import Role
from common.section import AtLeast, Section


class MetricsSettings(Section):
    """The services' Prometheus endpoints; `metrics_port` of a service enables its own."""

    host: str = "127.0.0.1"
    """Interface of the endpoints. For a scraper on another host, use one that only the scraper can reach."""
    vllm_names: bool = False
    """Also expose metrics under the names that vLLM gives them (vllm:num_requests_waiting), for dashboards, autoscalers
    and routers made for vLLM."""


class TracingSettings(Section):
    """OpenTelemetry spans of all services, by OTLP over gRPC; requires the extra tracing. They contain no text."""

    endpoint: str | None = Field(default=None, pattern=r"^https?://")
    """Address of a collector, for example http://127.0.0.1:4317; its credential, if it needs one, is in the variable
    OTEL_EXPORTER_OTLP_HEADERS. Absent: no spans."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of the requests without a `traceparent` header that are traced; requests with one are traced if it says
    so."""


class LimitsSettings(Section):
    """Limits of tenants and subjects, which gateways and schedulers enforce."""

    file: Path | None = None
    """TOML file with limits of tenants and subjects, for gateways and schedulers; reloaded when it changes. Absent: no
    limits, and equal weights, quotas and floors."""


class AuditSettings(Section):
    """The audit log of gateways and schedulers: who changed what, in records that are chained by hashes."""

    directory: Path | None = None
    """Directory below which each gateway and each scheduler appends its records to files of its own; readable by their
    owner only. It may be the same for several processes. Acts of administrators are refused with 503 while they cannot
    be recorded. Absent: no audit log."""
    max_file_bytes: int = Field(default=16 * 1024 * 1024, ge=4096)
    """Size in bytes from which a new file is begun. Earlier files are kept; they may be moved to an archive."""


class FleetSettings(Section):
    """State that all scheduler groups and tokenizers of one model share, so that they share prefixes as one cache."""

    state: SecretStr | None = None
    """URL of a Redis 7 or Valkey server (redis://, rediss://, unix://), or file:PATH of a file that contains it. In it,
    scheduler groups count the evidence for sharing prefixes together, and share demotions, quarantines and pins;
    tokenizers send prompts with a shared prefix to groups that have it. The server receives keyed names and encrypted
    facts, no text. Absent: each group decides alone."""
    secret: Annotated[SecretStr | None, AtLeast(32)] = None
    """Secret from which the names are derived, the same for all groups and tokenizers: at least 32 characters that
    cannot be guessed, or file:PATH. Required with fleet.state."""

    @model_validator(mode="after")
    def _check_secret(self) -> FleetSettings:
        if (self.state is None) != (self.secret is None):
            raise ValueError("fleet.state and fleet.secret must be set together")
        return self


class LogSettings(Section):
    """The services' logs, written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    format: Literal["auto", "console", "json"] = "auto"
    """auto: console on a terminal, JSON lines otherwise."""


class RpcSettings(Section):
    """Security of connections between services over TCP; unix sockets are always plaintext."""

    plaintext: bool = False
    """Use TCP without TLS: only over loopback or in a network that is closed to others."""
    certificate: Path | None = None
    """Certificate and chain (PEM) of this service, as server and as client; reloaded when the file changes."""
    key: Path | None = None
    """Private key of the certificate (PEM)."""
    authority: Path | None = None
    """Certificates of the authorities that sign peers' certificates (PEM); other peers are refused."""
    token: Annotated[SecretStr | None, AtLeast(16)] = None
    """Secret that all services share: TLS peers that do not send it are refused. Absent: a certificate suffices."""
    trust_domain: str = Field(default="pando.internal", pattern=r"^[a-z0-9._-]{1,255}$")
    """Trust domain of certificates: one with the URI spiffe://<trust domain>/pando/<role> has that role, which
    determines the methods that it may call. Roles: gateway, tokenizer, scheduler, worker, detokenizer, operator."""
    peer_names: dict[Role, tuple[str, ...]] = Field(default_factory=dict)
    """Other certificate names for roles, instead of the URI: {"operator": ["ops.example.com"]}. DNS names and URIs,
    compared as a whole."""
    probe_port: int | None = Field(default=None, ge=0, le=65535)
    """Port that serves only health checks, in plaintext, for probes that do not support TLS. Absent: none."""

    def names_of_roles(self) -> dict[Role, tuple[str, ...]]:
        """Return the accepted certificate names of each role."""
        return {role: self.peer_names.get(role, (f"spiffe://{self.trust_domain}/pando/{role}",)) for role in Role}

    @field_validator("peer_names")
    @classmethod
    def _check_names(cls, names: dict[Role, tuple[str, ...]]) -> dict[Role, tuple[str, ...]]:
        for role, of_role in names.items():
            if not of_role:
                raise ValueError(f"{role} has no names: omit it to use its URI in the trust domain")
            for name in of_role:
                if not name or "*" in name or name != name.strip():
                    raise ValueError(f"{name!r} of {role} is not a complete DNS name or URI")
        return names

    @model_validator(mode="after")
    def _check_files(self) -> RpcSettings:
        files = (self.certificate, self.key, self.authority)
        if any(files) and not all(files):
            raise ValueError("rpc.certificate, rpc.key and rpc.authority must be set together")
        if all(files) and self.plaintext:
            raise ValueError("rpc.plaintext and rpc.certificate are mutually exclusive")
        if self.token is not None and not all(files):
            raise ValueError("rpc.token requires TLS: in plaintext it could be read on the network")
        return self

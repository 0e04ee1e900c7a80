"""The section of the configuration that says how services trust each other."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr, field_validator, model_validator

from common.rpc.roles import Role
from common.section import Section


class RpcSettings(Section):
    """How services talk over TCP; over unix sockets they always talk plaintext."""

    plaintext: bool = False
    """Talk plaintext over TCP, too: in a network that nobody else reaches, or on the loopback."""
    certificate: Path | None = None
    """This service's certificate with its chain (PEM), as server and as client; read anew when the file changes."""
    key: Path | None = None
    """The private key that belongs to it (PEM)."""
    authority: Path | None = None
    """Certificates of the authorities that sign peers' certificates (PEM); who shows none of theirs is refused."""
    token: SecretStr | None = Field(default=None, min_length=16)
    """A secret of all services: TLS peers that do not send it are refused. Absent: a certificate is enough."""
    trust_domain: str = Field(default="pando.internal", pattern=r"^[a-z0-9._-]{1,255}$")
    """A certificate with the URI spiffe://<trust domain>/pando/<role> has that role, which says what it may call.
    Roles: gateway, tokenizer, scheduler, worker, detokenizer, operator."""
    peer_names: dict[Role, tuple[str, ...]] = Field(default_factory=dict)
    """Other certificate names for roles, in place of the URI: {"operator": ["ops.example.com"]}. DNS names and URIs,
    compared whole."""
    probe_port: int | None = Field(default=None, ge=0, le=65535)
    """Port at which only health is answered, in plaintext: for probes that cannot speak TLS. Absent: none."""

    def names_of_roles(self) -> dict[Role, tuple[str, ...]]:
        """Return the names that certificates of each role have."""
        return {role: self.peer_names.get(role, (f"spiffe://{self.trust_domain}/pando/{role}",)) for role in Role}

    @field_validator("peer_names")
    @classmethod
    def _check_names(cls, names: dict[Role, tuple[str, ...]]) -> dict[Role, tuple[str, ...]]:
        for role, of_role in names.items():
            if not of_role:
                raise ValueError(f"{role} has no names: leave it out for its URI in the trust domain")
            for name in of_role:
                if not name or "*" in name or name != name.strip():
                    raise ValueError(f"{name!r} of {role} is not a whole DNS name or URI")
        return names

    @model_validator(mode="after")
    def _check_files(self) -> RpcSettings:
        files = (self.certificate, self.key, self.authority)
        if any(files) and not all(files):
            raise ValueError("rpc.certificate, rpc.key and rpc.authority belong together")
        if all(files) and self.plaintext:
            raise ValueError("rpc.plaintext contradicts rpc.certificate")
        if self.token is not None and not all(files):
            raise ValueError("rpc.token needs TLS: over plaintext everybody could read it")
        return self

"""The section of the configuration that says how services trust each other."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr, model_validator

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
    probe_port: int | None = Field(default=None, ge=0, le=65535)
    """Port at which only health is answered, in plaintext: for probes that cannot speak TLS. Absent: none."""

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

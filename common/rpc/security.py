"""Credentials of peers over TCP: a certificate that our authority has signed, and the token if there is one.

The names in a client's certificate say which methods it may call (`callers.py`).

Certificates are read again when their files change, so that whoever renews them need not restart a service.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from common.errors import ConfigurationError
from common.rpc.token import send_token

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from common.rpc.roles import Role
    from common.settings import RpcSettings

UNIX = "unix:"


@dataclass(frozen=True, slots=True)
class Pem:
    """Contents of the three files."""

    certificate: bytes
    key: bytes
    authority: bytes


class CertificateFiles:
    """The certificate, key and authority of this process, as they are on disk now."""

    def __init__(self, certificate: Path, key: Path, authority: Path) -> None:
        """Read the files.

        Raises:
            ConfigurationError: one of them cannot be read.
        """
        self._paths = (certificate, key, authority)
        self._stamps: tuple[int, ...] = ()
        try:
            self._stamps, self._pem = self._look(), self._read()
        except OSError as error:
            raise ConfigurationError(f"certificates: {error}") from error

    def load(self) -> Pem:
        """Return the contents, read again if a file has changed; while they are being replaced, the last ones."""
        try:
            stamps = self._look()
            if stamps != self._stamps:
                self._pem, self._stamps = self._read(), stamps
        except OSError:
            pass
        return self._pem

    def _look(self) -> tuple[int, ...]:
        # Secrets of Kubernetes are links that are exchanged: `stat` follows them.
        return tuple(path.stat().st_mtime_ns for path in self._paths)

    def _read(self) -> Pem:
        return Pem(*(path.read_bytes() for path in self._paths))


@dataclass(frozen=True, slots=True)
class Security:
    """What a process shows to its peers over TCP, and asks of them. The default refuses TCP."""

    files: CertificateFiles | None = None
    token: str | None = None
    plaintext: bool = False
    probe_port: int | None = None
    names: Mapping[Role, tuple[str, ...]] = field(default_factory=dict)
    """Names of each role in the certificates of peers."""

    def needs_tls(self, address: str) -> bool:
        """Whether a connection at `address` is encrypted.

        Raises:
            ConfigurationError: it is TCP, there are no certificates, and nobody asked for plaintext.
        """
        if address.startswith(UNIX):
            return False
        if self.files is None and not self.plaintext:
            raise ConfigurationError(
                f"{address} is TCP: set rpc.certificate, rpc.key and rpc.authority for TLS, or rpc.plaintext=true"
            )
        return self.files is not None

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials of a server that asks every client for a certificate."""
        files = self._files()

        def configuration() -> grpc.ServerCertificateConfiguration:
            pem = files.load()
            return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.authority)

        return grpc.dynamic_ssl_server_credentials(configuration(), configuration, require_client_authentication=True)

    def channel_credentials(self, pem: Pem) -> grpc.ChannelCredentials:
        """Return credentials of a client with these certificates, and with the token if there is one."""
        tls = grpc.ssl_channel_credentials(pem.authority, pem.key, pem.certificate)
        if self.token is None:
            return tls
        return grpc.composite_channel_credentials(tls, send_token(self.token))

    def load(self) -> Pem:
        """Return the certificates as they are now."""
        return self._files().load()

    def _files(self) -> CertificateFiles:
        assert self.files is not None, "asked for only where `needs_tls` says so"
        return self.files


UNIX_ONLY = Security()


def read_security(settings: RpcSettings) -> Security:
    """Return what the settings ask for.

    Raises:
        ConfigurationError: a file cannot be read.
    """
    files = None
    if settings.certificate and settings.key and settings.authority:
        files = CertificateFiles(settings.certificate, settings.key, settings.authority)
    token = None if settings.token is None else settings.token.get_secret_value()
    return Security(files, token, settings.plaintext, settings.probe_port, settings.names_of_roles())

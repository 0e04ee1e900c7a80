"""Credentials of peers over TCP: a certificate signed by the deployment's authority, and the token if one is set.

The names in a client's certificate determine the methods that it may call (`interceptors.py`).

Certificates are reloaded when their files change, so that a renewal does not need a restart.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

from common.errors import ConfigurationError
from common.section import read_secret

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path
    from typing import NoReturn

    from common.rpc.roles import Role
    from common.settings import RpcSettings

UNIX = "unix:"
TOKEN_KEY = "x-pando-token"
# Probes have no token; health answers are not confidential.
FREE_PREFIX = "/grpc.health."
MethodHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


@dataclass(frozen=True, slots=True)
class Pem:
    """The contents of the certificate, key and authority files."""

    certificate: bytes
    key: bytes
    authority: bytes


class CertificateFiles:
    """The certificate, key and authority files of this process, reloaded when they change."""

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
        """Return the current contents; while the files are being replaced and cannot be read, the last ones."""
        try:
            stamps = self._look()
            if stamps != self._stamps:
                self._pem, self._stamps = self._read(), stamps
        except OSError:
            pass
        return self._pem

    def _look(self) -> tuple[int, ...]:
        # Kubernetes replaces secrets by switching symbolic links, which `stat` follows.
        return tuple(path.stat().st_mtime_ns for path in self._paths)

    def _read(self) -> Pem:
        return Pem(*(path.read_bytes() for path in self._paths))


@dataclass(frozen=True, slots=True)
class Security:
    """Credentials that a process presents to its peers over TCP and requires of them. The default refuses TCP."""

    files: CertificateFiles | None = None
    token: str | None = None
    plaintext: bool = False
    probe_port: int | None = None
    names: Mapping[Role, tuple[str, ...]] = field(default_factory=dict)
    """Names of each role in the certificates of peers."""

    def needs_tls(self, address: str) -> bool:
        """Whether connections to `address` use TLS.

        Raises:
            ConfigurationError: the address is TCP, there are no certificates, and plaintext is not allowed.
        """
        if address.startswith(UNIX):
            return False
        if self.files is None and not self.plaintext:
            raise ConfigurationError(
                f"{address} is TCP: set rpc.certificate, rpc.key and rpc.authority for TLS, or rpc.plaintext=true"
            )
        return self.files is not None

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials of a server that requires a certificate of every client."""
        files = self._files()

        def configuration() -> grpc.ServerCertificateConfiguration:
            pem = files.load()
            return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.authority)

        return grpc.dynamic_ssl_server_credentials(configuration(), configuration, require_client_authentication=True)

    def channel_credentials(self, pem: Pem) -> grpc.ChannelCredentials:
        """Return credentials of a client with these certificates, and with the token if one is set."""
        tls = grpc.ssl_channel_credentials(pem.authority, pem.key, pem.certificate)
        if self.token is None:
            return tls
        return grpc.composite_channel_credentials(tls, send_token(self.token))

    def load(self) -> Pem:
        """Return the current certificates."""
        return self._files().load()

    def _files(self) -> CertificateFiles:
        assert self.files is not None, "called only if `needs_tls` returned True"
        return self.files


UNIX_ONLY = Security()


LEAST_TOKEN = 16


def read_security(settings: RpcSettings) -> Security:
    """Return the credentials that the settings name.

    Raises:
        ConfigurationError: a file cannot be read.
    """
    files = None
    if settings.certificate and settings.key and settings.authority:
        files = CertificateFiles(settings.certificate, settings.key, settings.authority)
    token = read_secret("rpc.token", settings.token, LEAST_TOKEN)
    return Security(files, token, settings.plaintext, settings.probe_port, settings.names_of_roles())


def send_token(token: str) -> grpc.CallCredentials:
    """Return credentials that put `token` into the metadata of every call."""

    class Plugin(grpc.AuthMetadataPlugin):
        """Returns without blocking, so that gRPC can call it in its own thread."""

        def __call__(self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback) -> None:
            callback(((TOKEN_KEY, token),), None)

    return grpc.metadata_call_credentials(Plugin())


class TokenGuard(grpc.aio.ServerInterceptor):
    """Refuses calls without the token, except health checks."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MethodHandler | None:
        """Return the method's handler, or a handler that refuses the call."""
        sent = dict(handler_call_details.invocation_metadata or ()).get(TOKEN_KEY, b"")
        if not handler_call_details.method.startswith(FREE_PREFIX) and not hmac.compare_digest(
            sent.encode() if isinstance(sent, str) else sent, self._token
        ):
            return grpc.stream_stream_rpc_method_handler(_refuse)
        return await continuation(handler_call_details)


async def _refuse(_requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"this port requires a token in {TOKEN_KEY}")

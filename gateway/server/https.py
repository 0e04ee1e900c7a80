"""The gateway's TLS certificate, reloaded when its files change, and the authorities of client certificates."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from common.errors import ConfigurationError
from common.logs import get_logger

if TYPE_CHECKING:
    from pathlib import Path

    from common.settings import TlsSettings

WATCH_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True)
class HttpsFiles:
    """Paths of the certificate, its key and, if client certificates are required, the authorities that sign them."""

    certificate: Path
    key: Path
    clients: Path | None = None

    def stamps(self) -> tuple[int, ...]:
        """Return the files' modification times in nanoseconds; symbolic links are followed.

        Raises:
            OSError: a file is missing.
        """
        return tuple(path.stat().st_mtime_ns for path in (self.certificate, self.key, self.clients) if path)

    def load_into(self, context: ssl.SSLContext) -> None:
        """Make `context` use the certificate from the next handshake on, and require client certificates if configured.

        Authorities are added to those that `context` has: a removed one stays valid until the next start.

        Raises:
            OSError: a file cannot be read, or certificate and key do not match (`ssl.SSLError`).
        """
        if self.clients is not None:
            context.load_verify_locations(self.clients)
            context.verify_mode = ssl.CERT_REQUIRED
        # A context that loaded a certificate without its key fails all handshakes: test the pair in another context
        # first.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
        context.load_cert_chain(self.certificate, self.key)


def https_files(settings: TlsSettings) -> HttpsFiles | None:
    """Return the files that the settings name; None for plain HTTP.

    Raises:
        ConfigurationError: only one is named, or they are not a certificate and its key.
    """
    if settings.certificate is None and settings.key is None:
        if settings.client_authority is not None:
            raise ConfigurationError(
                "gateway.tls.client_authority needs gateway.tls.certificate: HTTP has no client certificates"
            )
        return None
    if settings.certificate is None or settings.key is None:
        raise ConfigurationError("gateway.tls.certificate and gateway.tls.key belong together")
    files = HttpsFiles(settings.certificate, settings.key, settings.client_authority)
    try:
        files.load_into(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))
    except OSError as error:
        raise ConfigurationError(f"gateway.tls.certificate {settings.certificate}: {error}") from error
    return files


async def keep_renewing(files: HttpsFiles, context: ssl.SSLContext, interval_s: float = WATCH_INTERVAL_S) -> NoReturn:
    """Reload the files into `context` whenever they change; unusable files are tried again at the next interval."""
    log = get_logger("https")
    loaded = files.stamps()
    while True:
        await asyncio.sleep(interval_s)
        try:
            stamps = files.stamps()
            if stamps != loaded:
                files.load_into(context)
                loaded = stamps
                log.info("https.certificate_renewed", path=str(files.certificate))
        except OSError as error:
            log.warning("https.certificate_unusable", path=str(files.certificate), reason=str(error))

"""The gateway's own certificate, which may be renewed while it serves."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from common.errors import ConfigurationError
from common.logs import get_logger

if TYPE_CHECKING:
    from pathlib import Path

    from common.settings import GatewaySettings

WATCH_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True)
class HttpsFiles:
    """Where certificate and key are."""

    certificate: Path
    key: Path

    def stamps(self) -> tuple[int, int]:
        """Return what changes when a file does; links are followed.

        Raises:
            OSError: a file is away.
        """
        return self.certificate.stat().st_mtime_ns, self.key.stat().st_mtime_ns

    def load_into(self, context: ssl.SSLContext) -> None:
        """Have `context` show the certificate from the next handshake on.

        Raises:
            OSError: a file cannot be read, or the two do not fit (`ssl.SSLError`).
        """
        # A context that was given a certificate without its key can shake no hands any more: try another one first.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
        context.load_cert_chain(self.certificate, self.key)


def https_files(settings: GatewaySettings) -> HttpsFiles | None:
    """Return the files that the settings name, None for HTTP.

    Raises:
        ConfigurationError: only one is named, or they are no certificate and its key.
    """
    if settings.certificate is None and settings.key is None:
        return None
    if settings.certificate is None or settings.key is None:
        raise ConfigurationError("gateway.certificate and gateway.key belong together")
    files = HttpsFiles(settings.certificate, settings.key)
    try:
        files.load_into(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))
    except OSError as error:
        raise ConfigurationError(f"gateway.certificate {settings.certificate}: {error}") from error
    return files


async def keep_renewing(files: HttpsFiles, context: ssl.SSLContext, interval_s: float = WATCH_INTERVAL_S) -> NoReturn:
    """Load the files into `context` again whenever they change; what does not fit is left for the next look."""
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

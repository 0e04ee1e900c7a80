"""Who may see and change what: the operator's token, and what stands for principals where it is not shown."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING

from common.errors import PermissionDeniedError
from common.secret_files import read_secret

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.settings import SchedulerSettings
    from common.types import View

AUTHORIZATION_KEY = "authorization"
FINGERPRINT_DIGITS = 16


class Credentials:
    """Compares what callers show with the admin token, in constant time; without a token nobody is admin."""

    def __init__(self, token: str | None) -> None:
        """Know the token."""
        self._token = token
        # With a token, fingerprints outlive a restart. Nobody without it can compute the one of a guessed name.
        self._key = hashlib.sha256(f"fingerprints:{token}".encode()).digest() if token else secrets.token_bytes(32)

    def is_admin(self, metadata: Mapping[str, str | bytes]) -> bool:
        """Whether a call with such metadata is the operator's."""
        if self._token is None:
            return False
        shown = metadata.get(AUTHORIZATION_KEY, "")
        data = shown if isinstance(shown, bytes) else shown.encode("utf-8", "surrogateescape")
        return hmac.compare_digest(data, f"Bearer {self._token}".encode())

    def require_admin(self, metadata: Mapping[str, str | bytes], what: str) -> None:
        """Let only the operator do `what`.

        Raises:
            PermissionDeniedError: the caller does not show the token, or there is none.
        """
        if self._token is None:
            raise PermissionDeniedError(f"to {what}, the scheduler needs an admin token (scheduler.admin_token)")
        if not self.is_admin(metadata):
            raise PermissionDeniedError(f"to {what}, show the scheduler's admin token")

    def require_admin_if_set(self, metadata: Mapping[str, str | bytes], what: str) -> None:
        """Let anybody who reaches the port do `what` as long as there is no token.

        Raises:
            PermissionDeniedError: there is a token, and the caller does not show it.
        """
        if self._token is not None:
            self.require_admin(metadata, what)

    def fingerprint(self, owner: View | str) -> str:
        """Return what stands for a view, or for a tenant by its name: equal for equal ones; it does not show names."""
        parts = (owner,) if isinstance(owner, str) else (owner.tenant, owner.subject.name, owner.salt)
        text = "".join(f"{len(part)}:{part}" for part in parts).encode("utf-8", "surrogatepass")
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()[:FINGERPRINT_DIGITS]


def read_token(settings: SchedulerSettings) -> str | None:
    """Return the admin token that the settings name, directly or by a file.

    Raises:
        ConfigurationError: both are named, or the file is not readable or empty.
    """
    return read_secret("scheduler.admin_token", settings.admin_token, settings.admin_token_file)

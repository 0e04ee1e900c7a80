"""Access to inspection and administration: the admin token, and fingerprints shown in place of names."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING

from common.errors import PermissionDeniedError
from common.section import read_secret

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.settings import SchedulerSettings
    from common.types import View

AUTHORIZATION_KEY = "authorization"
FINGERPRINT_DIGITS = 16


class Credentials:
    """Compares callers' tokens with the admin token in constant time; without an admin token no caller is admin."""

    def __init__(self, token: str | None) -> None:
        self._token = token
        # With a token, fingerprints survive a restart. Without knowledge of it they cannot be computed from a guessed
        # name.
        self._key = hashlib.sha256(f"fingerprints:{token}".encode()).digest() if token else secrets.token_bytes(32)

    def is_admin(self, metadata: Mapping[str, str | bytes]) -> bool:
        """Whether the call with this metadata carries the admin token."""
        if self._token is None:
            return False
        shown = metadata.get(AUTHORIZATION_KEY, "")
        data = shown if isinstance(shown, bytes) else shown.encode("utf-8", "surrogateescape")
        return hmac.compare_digest(data, f"Bearer {self._token}".encode())

    def require_admin(self, metadata: Mapping[str, str | bytes], what: str) -> None:
        """Check that the caller may do `what`, which only the operator may.

        Raises:
            PermissionDeniedError: the caller does not present the token, or no token is configured.
        """
        if self._token is None:
            raise PermissionDeniedError(f"to {what}, the scheduler needs an admin token (scheduler.admin_token)")
        if not self.is_admin(metadata):
            raise PermissionDeniedError(f"to {what}, show the scheduler's admin token")

    def require_admin_if_set(self, metadata: Mapping[str, str | bytes], what: str) -> None:
        """Like `require_admin`, but allow every caller if no token is configured.

        Raises:
            PermissionDeniedError: a token is configured, and the caller does not present it.
        """
        if self._token is not None:
            self.require_admin(metadata, what)

    def fingerprint(self, owner: View | str) -> str:
        """Return a pseudonym of a view, or of a tenant by its name: equal for equal owners, and not reversible."""
        parts = (owner,) if isinstance(owner, str) else (owner.tenant, owner.subject.name, owner.salt)
        text = "".join(f"{len(part)}:{part}" for part in parts).encode("utf-8", "surrogatepass")
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()[:FINGERPRINT_DIGITS]


def read_token(settings: SchedulerSettings) -> str | None:
    """Return the configured admin token.

    Raises:
        ConfigurationError: its file is unreadable or empty.
    """
    return read_secret("scheduler.admin_token", settings.admin_token)

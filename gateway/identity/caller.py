"""Whose request this is: from what a credential says and what the body names to a principal."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import PermissionDeniedError
from common.names import MAX_NAME_BYTES, check_name
from common.types import CacheMode, Principal

if TYPE_CHECKING:
    from collections.abc import Sequence

ANONYMOUS = "anonymous"
# How users that are no more than a conversation begin.
SESSION_PREFIX = "session:"


@dataclass(frozen=True, slots=True)
class Caller:
    """What the connection and its credential say.

    `user` is whom the credential stands for. With `may_act_for`, requests may speak for any user of the tenant;
    without, the user that a request names is a part of the credential's own principal and of nobody else's.
    """

    tenant: str
    user: str | None = None
    key_id: str | None = None
    may_act_for: bool = False
    is_admin: bool = False
    cache: CacheMode = CacheMode.DEFAULT
    # The highest priority that its requests may ask for; None: what the gateway's settings say.
    max_priority: int | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """Whose limits a request counts against. Names that a client makes up do not multiply its limits."""

    tenant: str
    user: str


@dataclass(frozen=True, slots=True)
class Asker:
    """A caller with the user that its request names."""

    caller: Caller
    principal: Principal
    subject: Subject

    def cache_mode(self, wanted: CacheMode | None) -> CacheMode:
        """Return the stricter one of what the request wants and what its credential allows."""
        return self.caller.cache.at_least(wanted or CacheMode.DEFAULT)

    def priority(self, wanted: int | None, default_limit: int) -> int:
        """Return the priority of a request; who asks for none gets 0, or less where that is the limit.

        Raises:
            PermissionDeniedError: it asks for more than its credential allows.
        """
        limit = default_limit if self.caller.max_priority is None else self.caller.max_priority
        if self.caller.is_admin:
            return wanted or 0
        if wanted is not None and wanted > limit:
            message = f"This credential may ask for priorities up to {limit}, not for {wanted}."
            raise PermissionDeniedError(message, param="priority")
        return min(0, limit) if wanted is None else wanted


def identify(caller: Caller, named: Sequence[tuple[str, str | None]], session: str | None = None) -> Asker:
    """Return who asks, if the fields `named` (field, value) may name a user; the first one set counts.

    Nobody named, and a credential that stands for nobody: a principal of the `session`, so that its next request is
    the same one's; and without a session a fresh principal, equal to no other.

    Raises:
        InvalidRequestError: the name is too long or has control characters.
    """
    name = next((check_name(field, value) for field, value in named if value), None)
    if name is None and session is not None and caller.user is None:
        return _conversation(caller, session)
    if caller.may_act_for:
        user = name or caller.user
        subject = user or ANONYMOUS
    else:
        user = _own_user(caller, name or _nobody()) if name or caller.user is None else _escaped(caller.user)
        subject = caller.user or f"/{caller.key_id}"
    user = user or _nobody()
    return Asker(caller, Principal(caller.tenant, user), Subject(caller.tenant, subject))


def _conversation(caller: Caller, session: str) -> Asker:
    name = _bounded(f"{SESSION_PREFIX}{session}")
    subject = Subject(caller.tenant, ANONYMOUS if caller.may_act_for else f"/{caller.key_id}")
    return Asker(caller, Principal(caller.tenant, name if caller.may_act_for else _own_user(caller, name)), subject)


def owns(caller: Caller, principal: Principal) -> bool:
    """Whether `principal` is one that the caller's requests may have."""
    if caller.tenant != principal.tenant:
        return False
    own = _own_prefix(caller)
    return caller.may_act_for or principal.user == own or principal.user.startswith(f"{own}/")


def _own_user(caller: Caller, name: str) -> str:
    return _bounded(f"{_own_prefix(caller)}/{name}")


def _own_prefix(caller: Caller) -> str:
    """Return how all users that are parts of the credential's own principal begin, before a slash.

    No two credentials can meet here: what stands before the first slash is the escaped user, or nothing before the id
    of a key that stands for nobody.
    """
    return _escaped(caller.user) if caller.user else f"/{_escaped(caller.key_id or '')}"


def _nobody() -> str:
    return f"{ANONYMOUS}-{secrets.token_hex(16)}"


def _escaped(name: str) -> str:
    return name.replace("%", "%25").replace("/", "%2F")


def _bounded(name: str) -> str:
    encoded = name.encode()
    if len(encoded) <= MAX_NAME_BYTES:
        return name
    return f"//{hashlib.sha256(encoded).hexdigest()}"

"""The identity of a request: its view and subject, derived from the credential and the body."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from common.errors import PermissionDeniedError
from common.names import MAX_NAME_BYTES, check_name
from common.types import CacheMode, Subject, View
from common.version_skew import known_fields, known_member

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Subjects that are neither a user nor a key. All others have their kind before a slash: see `person` and `key`.
LOCAL = "local"
ANONYMOUS = "anonymous"
# The tenant of anonymous requests. No credential may name it, so anonymous requests find no tenant's text.
ANONYMOUS_TENANT = "anonymous"
PROXY = "proxy"


def person(name: str) -> str:
    """Return the subject name of a user."""
    return _bounded(f"user/{name}", "user-sha256/")


def key(key_id: str) -> str:
    """Return the subject name of an API key that does not belong to a user."""
    return f"key/{key_id}"


@dataclass(frozen=True, slots=True)
class Caller:
    """The identity and privileges that the connection and its credential grant.

    `subject` is accountable for requests that name no user; see `common.types.Subject`. With `vouches`, the credential
    vouches that a user named in a request is a person; without, such a name only narrows the request's view.
    """

    tenant: str
    subject: str
    vouches: bool = False
    is_admin: bool = False
    cache: CacheMode = CacheMode.DEFAULT
    # The highest priority that its requests may have; None: the gateway's setting.
    max_priority: int | None = None
    # Names or patterns of the adapters that its requests may use; None: those of its tenant's limits.
    adapters: Sequence[str] | None = None
    # Whether its requests are lines of a batch.
    is_batch: bool = False
    # Public name of its API key, for the audit log; None: it has none.
    credential: str | None = field(default=None, compare=False)

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Caller:  # Any: JSON
        """Return the caller that another gateway has written as JSON, perhaps one of another version.

        Unknown fields are left out; an unknown cache mode counts as the strictest one.

        Raises:
            TypeError: a field that every version writes is missing.
        """
        found = known_fields(cls, written)
        if "cache" in found:
            found["cache"] = known_member(found["cache"], CacheMode.NONE)
        return cls(**found)


@dataclass(frozen=True, slots=True)
class Requester:
    """A caller with the view of its request."""

    caller: Caller
    view: View

    @property
    def subject(self) -> Subject:
        """The accountable subject."""
        return self.view.subject

    def cache_mode(self, wanted: CacheMode | None) -> CacheMode:
        """Return the strictest of the request's mode, the credential's, and `private` if the request is anonymous."""
        allowed = self.caller.cache
        if self.subject.name == ANONYMOUS:
            allowed = allowed.at_least(CacheMode.PRIVATE)
        return allowed.at_least(wanted or CacheMode.DEFAULT)

    def priority(self, wanted: int | None, default_limit: int) -> int:
        """Return the priority of a request: 0 if it sets none, or the limit if that is lower.

        Raises:
            PermissionDeniedError: the request's priority is above the credential's limit.
        """
        limit = default_limit if self.caller.max_priority is None else self.caller.max_priority
        if self.caller.is_admin:
            return wanted or 0
        if wanted is not None and wanted > limit:
            message = f"This credential may ask for priorities up to {limit}, not for {wanted}."
            raise PermissionDeniedError(message, param="priority")
        return min(0, limit) if wanted is None else wanted


def identify(caller: Caller, users: Sequence[tuple[str, str | None]] = (), salt: str | None = None) -> Requester:
    """Return the identity of a request.

    Args:
        caller: The identity that the credential grants.
        users: Fields of the body that may name a user (field, value); the first that is set counts.
        salt: `cache_salt` of the body.

    Raises:
        InvalidRequestError: a name is too long or has control characters.
    """
    named = next((check_name(field, value) for field, value in users if value), None)
    narrowing = {"salt": check_name("cache_salt", salt)} if salt else {}
    subject = caller.subject
    if caller.vouches and named:
        subject = person(named)
    elif named:
        narrowing["user"] = named
    tenant = caller.tenant
    if subject == ANONYMOUS:
        # Anonymous requests cannot be distinguished, so each gets a view of its own and finds no text of the others.
        tenant, narrowing = ANONYMOUS_TENANT, {"request": secrets.token_hex(16)}
    text = urlencode(sorted(narrowing.items()))
    return Requester(caller, View(Subject(tenant, subject), _bounded(text, "sha256=")))


def owns(caller: Caller, view: View) -> bool:
    """Whether `view` is one that the caller's requests may have; always False for anonymous requests."""
    if caller.tenant != view.tenant or view.subject.name == ANONYMOUS:
        return False
    return caller.subject == view.subject.name or (caller.vouches and view.subject.name.startswith("user"))


def _bounded(text: str, prefix: str) -> str:
    """Return `text`, or `prefix` and the SHA-256 of `text` if it is longer than MAX_NAME_BYTES."""
    encoded = text.encode()
    return text if len(encoded) <= MAX_NAME_BYTES else prefix + hashlib.sha256(encoded).hexdigest()

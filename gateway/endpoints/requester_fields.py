"""The fields by which a body says for whom it asks, and what its cache may be shared with."""

from __future__ import annotations

from pydantic import Field

from common.names import check_name
from common.types import CacheMode
from gateway.endpoints.schema import Schema


class RequesterFields(Schema):
    """A user that the caller may speak for, and the cache; null always means the default."""

    cache_mode: CacheMode | None = Field(None, strict=False)
    user_id: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None

    @property
    def user_names(self) -> tuple[tuple[str, str | None], ...]:
        """The fields that may name a user, in order of precedence."""
        return (("user_id", self.user_id), ("user", self.user), ("safety_identifier", self.safety_identifier))

    @property
    def routing_key(self) -> str | None:
        """Requests of one view with equal keys go to the same scheduler group.

        Raises:
            InvalidRequestError: it is not a valid name.
        """
        return check_name("prompt_cache_key", self.prompt_cache_key) if self.prompt_cache_key else None


class SessionFields(RequesterFields):
    """The same, with a session."""

    session_id: str | None = None

    @property
    def session(self) -> str | None:
        """The conversation of the request; None if it has none.

        Raises:
            InvalidRequestError: it is not a valid name.
        """
        return check_name("session_id", self.session_id) if self.session_id else None

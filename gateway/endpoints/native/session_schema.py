"""Bodies of /open_session and /close_session, and `session_params`, compatible with SGLang's clients."""

from __future__ import annotations

from pydantic import Field

from common.types import SessionTurn
from gateway.endpoints.generation_fields import INT32_MAX
from gateway.endpoints.schema import Schema


class UserFields(Schema):
    """The model, and the fields that name a user."""

    model: str | None = None
    user_id: str | None = None
    user: str | None = None
    cache_salt: str | None = None

    @property
    def user_names(self) -> tuple[tuple[str, str | None], ...]:
        """The fields that may name a user, in order of precedence."""
        return (("user_id", self.user_id), ("user", self.user))


class OpenSessionBody(UserFields):
    """A session to open; the capacity counts tokens here, of which a text has no more than characters."""

    capacity_of_str_len: int | None = Field(None, ge=1, le=INT32_MAX)
    session_id: str | None = None
    timeout: float | None = Field(None, gt=0, le=INT32_MAX / 1000)


class CloseSessionBody(UserFields):
    """A session to close."""

    session_id: str


class SessionParams(Schema):
    """The object `session_params`: the session of a request, and the earlier turn that it continues."""

    id: str
    rid: str | None = None
    offset: int | None = Field(None, ge=-INT32_MAX, le=INT32_MAX)
    replace: bool | None = None
    drop_previous_output: bool | None = None

    def turn(self, name: str) -> SessionTurn:
        """Return the turn called `name`, which continues the session."""
        return SessionTurn(
            name=name,
            after=self.rid or None,
            offset=self.offset or None,
            drop_previous_output=bool(self.drop_previous_output),
            replace=bool(self.replace),
        )

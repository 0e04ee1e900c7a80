"""Bodies of /open_session and /close_session, and how a request continues a session, as SGLang's clients send them."""

from __future__ import annotations

from pydantic import Field

from common.types import SessionTurn
from gateway.schemas.generation import INT32_MAX
from gateway.schemas.parse import Schema


class UserFields(Schema):
    """Who asks, and of which model."""

    model: str | None = None
    user_id: str | None = None
    user: str | None = None
    cache_salt: str | None = None

    @property
    def user_names(self) -> tuple[tuple[str, str | None], ...]:
        """The fields that may name a user, the first one that is set counts."""
        return (("user_id", self.user_id), ("user", self.user))


class OpenSessionBody(UserFields):
    """A session to open; its capacity is counted in tokens here, of which texts have fewer than characters."""

    capacity_of_str_len: int | None = Field(None, ge=1, le=INT32_MAX)
    session_id: str | None = None
    timeout: float | None = Field(None, gt=0, le=INT32_MAX / 1000)


class CloseSessionBody(UserFields):
    """A session to close."""

    session_id: str


class SessionParams(Schema):
    """`session_params`: the session that a request is a turn of, and the earlier turn that it continues."""

    id: str
    rid: str | None = None
    offset: int | None = Field(None, ge=-INT32_MAX, le=INT32_MAX)
    replace: bool | None = None
    drop_previous_output: bool | None = None

    def turn(self, name: str) -> SessionTurn:
        """Return how the turn called `name` continues the session."""
        return SessionTurn(
            name=name,
            after=self.rid or None,
            offset=self.offset or None,
            drop_previous_output=bool(self.drop_previous_output),
            replace=bool(self.replace),
        )

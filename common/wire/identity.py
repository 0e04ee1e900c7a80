"""Views and subjects, and the sessions that they open and close, from and to protobuf."""

from __future__ import annotations

from common.errors import InvalidRequestError
from common.names import check_name
from common.types import SessionGrant, SessionWish, Subject, View
from protos.gen.pando.v1 import common_pb2, sessions_pb2


def view_to_wire(view: View) -> common_pb2.View:
    """Encode a view."""
    return common_pb2.View(subject=subject_to_wire(view.subject), salt=view.salt)


def view_from_wire(message: common_pb2.View) -> View:
    """Decode a view.

    Raises:
        InvalidRequestError: its subject is missing, or a part is not a valid name.
    """
    return View(subject_from_wire(message.subject), check_name("view.salt", message.salt))


def subject_to_wire(subject: Subject) -> common_pb2.Subject:
    """Encode a subject."""
    return common_pb2.Subject(tenant=subject.tenant, name=subject.name)


def subject_from_wire(message: common_pb2.Subject) -> Subject:
    """Decode a subject.

    Raises:
        InvalidRequestError: a part is missing or not a valid name; there is no default identity.
    """
    if not message.tenant or not message.name:
        raise InvalidRequestError("subject: tenant and name must both be set", param="subject")
    return Subject(check_name("subject.tenant", message.tenant), check_name("subject.name", message.name))


def wish_to_wire(wish: SessionWish) -> sessions_pb2.OpenSessionRequest:
    """Encode a request to open a session; None becomes 0, for the scheduler's default."""
    return sessions_pb2.OpenSessionRequest(
        view=view_to_wire(wish.view),
        session=wish.session,
        capacity_tokens=wish.capacity_tokens or 0,
        timeout_ms=wish.timeout_ms or 0,
    )


def wish_from_wire(message: sessions_pb2.OpenSessionRequest) -> SessionWish:
    """Decode a request to open a session.

    Raises:
        InvalidRequestError: the view or the session's name is missing or invalid.
    """
    view, session = _session_of(message)
    return SessionWish(view, session, message.capacity_tokens or None, message.timeout_ms or None)


def grant_to_wire(grant: SessionGrant) -> sessions_pb2.OpenSessionResponse:
    """Encode the capacity and timeout of an opened session."""
    return sessions_pb2.OpenSessionResponse(capacity_tokens=grant.capacity_tokens, timeout_ms=grant.timeout_ms)


def grant_from_wire(message: sessions_pb2.OpenSessionResponse) -> SessionGrant:
    """Decode the capacity and timeout of an opened session."""
    return SessionGrant(message.capacity_tokens, message.timeout_ms)


def close_to_wire(view: View, session: str) -> sessions_pb2.CloseSessionRequest:
    """Encode a request to close a session."""
    return sessions_pb2.CloseSessionRequest(view=view_to_wire(view), session=session)


def close_from_wire(message: sessions_pb2.CloseSessionRequest) -> tuple[View, str]:
    """Decode a request to close a session.

    Raises:
        InvalidRequestError: the view or the session's name is missing or invalid.
    """
    return _session_of(message)


def find_to_wire(view: View, session: str, after: str | None) -> sessions_pb2.FindSessionRequest:
    """Encode the question whether a session is open, with a turn called `after`."""
    return sessions_pb2.FindSessionRequest(view=view_to_wire(view), session=session, after=after)


def find_from_wire(message: sessions_pb2.FindSessionRequest) -> tuple[View, str, str | None]:
    """Decode the question whether a session is open.

    Raises:
        InvalidRequestError: the view or the session's name is missing or invalid.
    """
    after = check_name("session_params.rid", message.after) if message.HasField("after") else None
    return *_session_of(message), after


def _session_of(
    message: sessions_pb2.OpenSessionRequest | sessions_pb2.CloseSessionRequest | sessions_pb2.FindSessionRequest,
) -> tuple[View, str]:
    if not message.session:
        raise InvalidRequestError("session must be set", param="session_id")
    return view_from_wire(message.view), check_name("session_id", message.session)

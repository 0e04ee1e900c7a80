"""The opening and closing of sessions, from and to protobuf."""

from __future__ import annotations

from common.errors import InvalidRequestError
from common.names import check_name
from common.types import SessionGrant, SessionWish, View
from common.wire.identity import view_from_wire, view_to_wire
from protos.gen.pando.v1 import sessions_pb2


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


def _session_of(message: sessions_pb2.OpenSessionRequest | sessions_pb2.CloseSessionRequest) -> tuple[View, str]:
    if not message.session:
        raise InvalidRequestError("session must be set", param="session_id")
    return view_from_wire(message.view), check_name("session_id", message.session)

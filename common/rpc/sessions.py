"""The gRPC service `Sessions`, served by tokenizer and scheduler, and its client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from common.rpc.status import answered
from common.wire.identity import (
    close_from_wire,
    close_to_wire,
    find_from_wire,
    find_to_wire,
    grant_from_wire,
    grant_to_wire,
    wish_from_wire,
    wish_to_wire,
)
from protos.gen.pando.v1 import sessions_pb2, sessions_pb2_grpc

if TYPE_CHECKING:
    import grpc

    from common.types import SessionGrant, SessionWish, View

# Requests and responses differ by method.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

SESSIONS = sessions_pb2.DESCRIPTOR.services_by_name["Sessions"].full_name
TIMEOUT_S = 10.0
# A request waits for the answer, which needs no work.
FIND_TIMEOUT_S = 2.0


class SessionHost(Protocol):
    """Opens, closes and finds sessions. The methods raise a PandoError if it is refused or a service unreachable."""

    async def open_session(self, wish: SessionWish) -> SessionGrant:
        """Open a session; return its capacity and timeout."""

    async def close_session(self, view: View, session: str) -> bool:
        """End a session; return whether it was open."""

    async def find_session(self, view: View, session: str, after: str | None = None) -> bool:
        """Return whether a session is open, and has the turn `after` if that is not None."""


class SessionsService(sessions_pb2_grpc.SessionsServicer):
    """The servicer: decodes requests, calls the host, encodes responses."""

    def __init__(self, host: SessionHost) -> None:
        self._host = host

    async def OpenSession(  # noqa: N802  (names of rpcs are the contract's)
        self, request: sessions_pb2.OpenSessionRequest, context: Context
    ) -> sessions_pb2.OpenSessionResponse:
        return grant_to_wire(await self._host.open_session(wish_from_wire(request)))

    async def CloseSession(  # noqa: N802
        self, request: sessions_pb2.CloseSessionRequest, context: Context
    ) -> sessions_pb2.CloseSessionResponse:
        was_open = await self._host.close_session(*close_from_wire(request))
        return sessions_pb2.CloseSessionResponse(was_open=was_open)

    async def FindSession(  # noqa: N802
        self, request: sessions_pb2.FindSessionRequest, context: Context
    ) -> sessions_pb2.FindSessionResponse:
        return sessions_pb2.FindSessionResponse(is_open=await self._host.find_session(*find_from_wire(request)))


class SessionsClient:
    """A `SessionHost` that forwards to the `Sessions` service of another process."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = sessions_pb2_grpc.SessionsStub(channel)

    async def open_session(self, wish: SessionWish) -> SessionGrant:
        """Open a session; return its capacity and timeout."""
        return grant_from_wire(await answered(self._stub.OpenSession(wish_to_wire(wish), timeout=TIMEOUT_S)))

    async def close_session(self, view: View, session: str) -> bool:
        """End a session; return whether it was open."""
        call = self._stub.CloseSession(close_to_wire(view, session), timeout=TIMEOUT_S)
        return (await answered(call)).was_open

    async def find_session(self, view: View, session: str, after: str | None = None) -> bool:
        """Return whether a session is open, and has the turn `after` if that is not None."""
        call = self._stub.FindSession(find_to_wire(view, session, after), timeout=FIND_TIMEOUT_S)
        return (await answered(call)).is_open

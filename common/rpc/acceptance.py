"""How a server accepts a stream, and how its client learns of it before the first response."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import grpc

# gRPC delivers initial metadata for a refused stream too, before its status; this entry distinguishes them.
ACCEPTED_KEY = "pando-accepted"


async def accept_stream(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Confirm to the client that its stream is accepted, once everything that it may rely on exists."""
    await context.send_initial_metadata(((ACCEPTED_KEY, "1"),))


async def wait_until_accepted(call: grpc.aio.UnaryStreamCall[Any, Any] | grpc.aio.StreamStreamCall[Any, Any]) -> None:
    """Wait until the peer has accepted a stream with `accept_stream`, or has ended it.

    Raises:
        grpc.aio.AioRpcError: the peer is unreachable or has refused the stream.
    """
    if ACCEPTED_KEY not in dict(await call.initial_metadata()):
        await call.code()
    await call.wait_for_connection()

"""Acceptance of streams, on a real server and channel."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from common.rpc.stream import accept_stream, wait_until_accepted
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Context = grpc.aio.ServicerContext[Any, Any]

METHOD = "/test.Streams/Watch"


@asynccontextmanager
async def streaming(
    handle: Callable[[bytes, Context], Awaitable[None]],
) -> AsyncIterator[grpc.aio.UnaryStreamCall[Any, Any]]:
    """Yield an open call of a stream that `handle` serves."""
    server = grpc.aio.server()
    handler: Any = grpc.unary_stream_rpc_method_handler(handle)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Streams", {"Watch": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stream: Any = channel.unary_stream(METHOD)
            yield stream(b"", timeout=60)
    finally:
        await server.stop(0)


async def test_a_stream_is_accepted_before_its_first_response() -> None:
    async def serve(_request: bytes, context: Context) -> None:
        await accept_stream(context)
        await asyncio.Event().wait()

    async with streaming(serve) as call:
        await wait_until_accepted(call)
        assert not call.done()


async def test_initial_metadata_alone_does_not_accept_a_stream() -> None:
    may_refuse = asyncio.Event()

    async def refuse(_request: bytes, context: Context) -> None:
        await context.send_initial_metadata(())
        await may_refuse.wait()
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")

    async with streaming(refuse) as call:
        waiting = asyncio.create_task(wait_until_accepted(call))
        await call.initial_metadata()
        await asyncio.sleep(0.1)
        assert not waiting.done()
        may_refuse.set()
        with pytest.raises(grpc.aio.AioRpcError, match="not you"):
            await waiting


async def test_a_stream_that_is_refused_at_once_raises_its_status() -> None:
    async def refuse(_request: bytes, context: Context) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "later")

    async with streaming(refuse) as call:
        with pytest.raises(grpc.aio.AioRpcError, match="later"):
            await wait_until_accepted(call)


async def test_a_cancellation_ends_the_wait() -> None:
    reached = asyncio.Event()

    async def hang(_request: bytes, _context: Context) -> None:
        reached.set()
        await asyncio.Event().wait()

    async with streaming(hang) as call:
        waiting = asyncio.create_task(wait_until_accepted(call))
        await until(reached.is_set)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

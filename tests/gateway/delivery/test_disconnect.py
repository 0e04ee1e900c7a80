from __future__ import annotations

import asyncio
import gc
import weakref
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from gateway.delivery.deliveries import ClientWatch
from tests.fakes.pipeline import says
from tests.gateway.listening import listening
from tests.gateway.support import HELLO, FakedGateway, faked, gateway_saying
from tests.waiting import until

if TYPE_CHECKING:
    from starlette.types import Message

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LONG = [f" word{number}" for number in range(10_000)]


async def send_request(port: int, *, stream: bool, **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = orjson.dumps({"model": "tiny", "messages": HELLO, "stream": stream, **fields})
    writer.write(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    return reader, writer


async def until_aborted(gateway: FakedGateway) -> None:
    await until(lambda: gateway.pipeline.aborted)


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_while_its_prompt_is_computed_is_aborted(stream: bool) -> None:
    gateway = faked(None)
    async with listening(gateway) as port:
        _, writer = await send_request(port, stream=stream)
        (request,) = await gateway.pipeline.submissions(1)
        writer.close()
        await until_aborted(gateway)
    assert gateway.pipeline.aborted == [request.request_id]
    assert len(gateway.journal) == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_in_the_middle_of_its_answer_is_aborted(stream: bool) -> None:
    gateway = gateway_saying(*LONG)
    gateway.pipeline.pause_s = 0.002
    async with listening(gateway) as port:
        reader, writer = await send_request(port, stream=stream)
        await gateway.pipeline.submissions(1)
        if stream:
            await reader.readuntil(b"word3")
        writer.transport.abort()
        await until_aborted(gateway)
    assert len(gateway.pipeline.aborted) == 1
    assert len(gateway.journal) == 0
    assert b'pando_gateway_aborts_total{cause="disconnect"} 1.0' in gateway.metrics.exposition()[0]


async def test_only_the_client_that_left_is_aborted() -> None:
    gateway = gateway_saying(*LONG)
    gateway.pipeline.pause_s = 0.002
    async with listening(gateway) as port:
        staying, _ = await send_request(port, stream=True)
        leaving, writer = await send_request(port, stream=True)
        await leaving.readuntil(b"word3")
        writer.transport.abort()
        await until_aborted(gateway)
        gateway.pipeline.pause_s = 0
        rest = b""
        while b"[DONE]" not in rest:
            rest = rest[-100:] + await staying.read(1 << 20)
            assert not staying.at_eof()
    assert gateway.pipeline.aborted == [gateway.pipeline.submitted[1].request_id]


async def test_client_that_does_not_read_is_aborted_and_its_connection_closed() -> None:
    gateway = faked(says(*[" x" * 2000] * 10_000), bounds={"stream_buffer_bytes": 65_536})
    async with listening(gateway) as port:
        reader, writer = await send_request(port, stream=True)
        await until_aborted(gateway)
        received = await reader.read()  # up to the end of the connection
        writer.close()
    assert b"[DONE]" not in received
    assert b'pando_gateway_aborts_total{cause="slow_client"} 1.0' in gateway.metrics.exposition()[0]


async def test_a_client_that_disconnects_during_its_body_does_not_affect_others() -> None:
    gateway = gateway_saying("x")
    async with listening(gateway) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"Content-Length: 99\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()
        left = b'pando_gateway_requests_total{route="/v1/chat/completions",status="499"} 1.0'
        await until(lambda: left in gateway.metrics.exposition()[0])
        assert (await gateway.complete()).status_code == 200


async def test_cancellation_from_elsewhere_is_not_taken_for_a_disconnect() -> None:
    gateway = faked(None)
    body = orjson.dumps({"model": "tiny", "messages": HELLO})
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(_message: Message) -> None:
        return

    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "raw_path": b"", "query_string": b"",
        "headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 1), "server": ("x", 80), "scheme": "http",
        "http_version": "1.1", "root_path": "",
    }  # fmt: skip
    task = asyncio.create_task(gateway.app(scope, receive, send))
    await gateway.pipeline.submissions(1)
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(gateway.pipeline.aborted) == 1
    assert b'pando_gateway_aborts_total{cause="shutdown"} 1.0' in gateway.metrics.exposition()[0]


async def test_what_an_answer_leaves_needs_no_search_for_cycles() -> None:
    """The gateway seldom searches, and what receives from a client holds its connection's state."""

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("the client stays")

    gc.disable()
    try:
        watch = ClientWatch(receive)
        async with watch:
            await asyncio.sleep(0)
        left = weakref.ref(watch)
        del watch
        for _ in range(10):
            await asyncio.sleep(0)
        assert left() is None
    finally:
        gc.enable()

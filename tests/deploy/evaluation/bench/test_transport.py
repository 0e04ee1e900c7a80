from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from deploy.evaluation.bench.transport import HttpClient, Response, TransportError
from tests.fakes.openai_server import free_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\n"


class RawServer:
    """Answers with whatever bytes a test wants; counts connections and keeps requests."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.connections = 0
        self.requests: list[bytes] = []
        self.lost = asyncio.Event()

    async def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.split(b"\r\n") if line.startswith(b"content-length")]
                body = await reader.readexactly(int(length[0].split(b":")[1])) if length else b""
                self.requests.append(head + body)
                await self.answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.lost.set()
        finally:
            writer.close()


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[tuple[RawServer, HttpClient]]:
    raw = RawServer(answer)
    server = await asyncio.start_server(raw.on_connection, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base/", {"x-test": "yes"})
    try:
        yield raw, client
    finally:
        await client.aclose()
        server.close()


async def send(writer: asyncio.StreamWriter, *pieces: bytes) -> None:
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.005)


async def test_a_body_is_read_in_each_framing() -> None:
    framings = iter(
        [
            (OK, b"content-length: 5\r\n\r\n", b"he", b"llo"),
            (OK, b"transfer-encoding: chunked\r\n\r\n", b"2\r\nhe\r\n", b"3\r\nllo\r\n0\r\n\r\n"),
            (b"HTTP/1.1 100 Continue\r\n\r\n", OK, b"content-length: 5\r\n\r\nhello"),
            (OK, b"connection: close\r\n\r\n", b"hello"),
        ]
    )

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pieces = next(framings)
        await send(writer, *pieces)
        if b"close" in pieces[1]:
            writer.close()

    async with serving(answer) as (raw, client):
        for _ in range(4):
            assert await client.request("POST", "/x", b"{}", timeout_s=30) == Response(200, b"hello")
        assert raw.connections == 1
        assert raw.requests[0].startswith(b"POST /base/x HTTP/1.1\r\n")
        assert b"x-test: yes\r\n" in raw.requests[0]
        assert raw.requests[0].endswith(b"\r\n\r\n{}")


async def test_a_sink_receives_the_body_of_a_200_only() -> None:
    statuses = iter([b"200 OK", b"503 Busy"])

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await send(writer, b"HTTP/1.1 " + next(statuses) + b"\r\ncontent-length: 4\r\n\r\n", b"ab", b"cd")

    pieces: list[bytes] = []
    async with serving(answer) as (_, client):
        assert await client.request("GET", "/", sink=pieces.append, timeout_s=30) == Response(200, b"")
        assert pieces == [b"ab", b"cd"]
        assert await client.request("GET", "/", sink=pieces.append, timeout_s=30) == Response(503, b"abcd")
        assert pieces == [b"ab", b"cd"]


async def test_concurrent_requests_have_connections_of_their_own_and_later_ones_reuse_them() -> None:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.05)
        await send(writer, OK + b"content-length: 2\r\n\r\nok")

    async with serving(answer) as (raw, client):
        for _ in range(2):
            await asyncio.gather(*(client.request("GET", "/", timeout_s=30) for _ in range(5)))
        assert raw.connections == 5


async def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await send(writer, OK + b"content-length: 2\r\n\r\nok")
        writer.close()  # without having said so

    async with serving(answer) as (raw, client):
        for _ in range(3):
            assert (await client.request("GET", "/", timeout_s=30)).body == b"ok"
        assert raw.connections == 3


async def test_cancelling_closes_the_connection() -> None:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await send(writer, OK + b"content-length: 200\r\n\r\n", b"first")

    arrived = asyncio.Event()
    async with serving(answer) as (raw, client):
        task = asyncio.create_task(client.request("GET", "/", sink=lambda _: arrived.set(), timeout_s=30))
        await arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(raw.lost.wait(), 30)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"", "disconnect"),
        (OK + b"content-length: 9\r\n\r\nhalf", "disconnect"),
        (b"SSH-2.0-OpenSSH\r\n", "protocol"),
    ],
)
async def test_a_broken_exchange_says_how_it_broke(reply: bytes, kind: str) -> None:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await send(writer, reply)
        writer.close()

    async with serving(answer) as (_, client):
        with pytest.raises(TransportError) as raised:
            await client.request("GET", "/", timeout_s=30)
        assert raised.value.kind == kind


async def test_a_silent_server_times_out() -> None:
    async def answer(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(5)

    async with serving(answer) as (_, client):
        with pytest.raises(TransportError) as raised:
            await client.request("GET", "/", timeout_s=0.05)
        assert raised.value.kind == "timeout"


async def test_a_closed_port_is_a_connect_error() -> None:
    with pytest.raises(TransportError) as raised:
        await HttpClient(free_url()).request("GET", "/", timeout_s=30)
    assert raised.value.kind == "connect"


@pytest.mark.parametrize("url", ["ftp://host", "host:80", "http://"])
def test_a_malformed_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not an http"):
        HttpClient(url)

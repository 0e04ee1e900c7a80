"""Clients that are slow, silent or gone, on real connections."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from gateway.endpoints import routing
from gateway.server import http_server
from gateway.server.http_server import notice_dead_peers
from tests.gateway.listening import listening
from tests.gateway.support import gateway_saying

if TYPE_CHECKING:
    import pytest

BODY = b'{"model": "tiny", "prompt": "x"}'


def request_head(length: int) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % length


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(30):
        return await reader.read()


async def test_headers_that_never_end_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEADER_S", 0.1)
    async with listening(gateway_saying("x")) as port:
        for beginning in (b"", b"POST /v1/comp", request_head(5)[:-4]):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(beginning)
            assert await until_closed(reader) == b""
            writer.close()


async def test_a_request_that_takes_long_is_not_taken_for_headers_that_never_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "HEADER_S", 0.5)
    gateway = gateway_saying("a", "b", "c")
    gateway.pipeline.pause_s = 0.2
    async with listening(gateway) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_head(len(BODY)) + BODY)
        assert b"200 OK" in await reader.readline()
        writer.close()


async def test_headers_without_end_are_not_kept() -> None:
    async with listening(gateway_saying("x")) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nx-long: ")
        try:
            for _ in range(200):
                writer.write(b"x" * 65_536)
                await writer.drain()
        except ConnectionError:
            return
        assert b"200" not in await until_closed(reader)


async def test_a_body_that_stops_is_answered_with_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "PAUSE_S", 0.1)
    async with listening(gateway_saying("x")) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_head(len(BODY)) + BODY[:5])
        answer = await until_closed(reader)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"code":"request_timeout"' in answer


async def test_a_body_that_trickles_is_answered_with_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "BODY_S", 1.0)
    async with listening(gateway_saying("x")) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_head(len(BODY)))
        for octet in BODY[:4]:
            writer.write(bytes([octet]))
            await asyncio.sleep(0.05)
        answer = await until_closed(reader)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408")


async def test_head_gets_the_same_status_as_get_without_a_body() -> None:
    async with listening(gateway_saying("x")) as port:
        for path, status in (("/health", b"200"), ("/v1/models", b"200"), ("/v1/completions", b"405")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"HEAD %s HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n" % path.encode())
            head, _, rest = (await until_closed(reader)).partition(b"\r\n\r\n")
            writer.close()
            assert head.startswith(b"HTTP/1.1 " + status)
            assert b"content-length: 0" not in head
            assert rest == b""


def test_the_process_may_have_more_connections_than_shells_allow() -> None:
    program = (
        "import resource; from gateway.server.http_server import allow_many_connections as allow\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))\n"
        "print(allow(), allow(), hard)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second, hard = map(int, done.stdout.split())
    assert first == second == (min(hard, http_server.MAX_FILES) if hard >= 0 else http_server.MAX_FILES)


def test_accepted_connections_ask_whether_the_other_end_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        notice_dead_peers(listener)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000

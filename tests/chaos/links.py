"""A TCP proxy for each link between services, whose connections can be broken in every way that networks know."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Callable

HOST = "127.0.0.1"
READ_BYTES = 1 << 16
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_PORT = 15_000
# With this linger time of 0 s, a close sends RST instead of FIN.
ABORTIVE = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Weather:
    """The condition of a link; as constructed, it passes everything on.

    `drops_requests` and `drops_answers` lose bytes from and to the side that connects, `is_stalled` keeps them back
    without losing any, `delay_s` is added to each read of either direction, and one random bit is flipped in every
    `flip_bytes` bytes.
    """

    drops_requests: bool = False
    drops_answers: bool = False
    is_stalled: bool = False
    delay_s: float = 0.0
    flip_bytes: int | None = None


CLEAR = Weather()


class PortRange:
    """Ports below the range from which the system takes those of clients, so that no client ever takes one of them."""

    def __init__(self, randomness: random.Random) -> None:
        lowest_ephemeral = int(EPHEMERAL_RANGE.read_text().split()[0]) if EPHEMERAL_RANGE.exists() else 32_768
        self._ports = list(range(LOWEST_PORT, lowest_ephemeral))
        randomness.shuffle(self._ports)

    def take(self) -> int:
        """Return a port at which a server can listen, each only once.

        Raises:
            OSError: none is left.
        """
        while self._ports:
            port = self._ports.pop()
            with socket.socket() as trial, contextlib.suppress(OSError):
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind((HOST, port))
                return port
        raise OSError(errno.EADDRINUSE, "no free port below the ephemeral range")


class Link:
    """Forwards connections to `target`, a `unix:` path or host:port, and applies the current weather to their bytes."""

    def __init__(self, name: str, port: int, target: str, randomness: random.Random) -> None:
        self.name = name
        self.port = port
        self.weather = CLEAR
        # Connections, and bytes from the target, so far.
        self.accepted = 0
        self.answered_bytes = 0
        # Links that take over the connections that come from certain ports.
        self.branches: list[tuple[Callable[[int], bool], Link]] = []
        self._target = target
        self._random = randomness
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}
        self._until_flip = 0

    @property
    def address(self) -> str:
        """Where clients connect instead of to the target."""
        return f"{HOST}:{self.port}"

    async def open(self) -> None:
        """Accept connections."""
        self._server = await asyncio.start_server(self._accept, HOST, self.port, backlog=256)

    async def close(self) -> None:
        """Refuse connections, and reset the open ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        await self.reset()

    async def reset(self) -> None:
        """Reset all open connections, on both sides."""
        connections = list(self._connections)
        for writers in self._connections.values():
            for writer in writers:
                _abort(writer)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    @asynccontextmanager
    async def under(self, weather: Weather) -> AsyncIterator[None]:
        """Apply `weather` to all bytes that arrive within the block."""
        self._set(weather)
        try:
            yield
        finally:
            self._set(CLEAR)

    @asynccontextmanager
    async def refusing(self) -> AsyncIterator[None]:
        """Refuse connections within the block, beginning with a reset of the open ones."""
        await self.close()
        try:
            yield
        finally:
            await self.open()

    def _set(self, weather: Weather) -> None:
        self.weather = weather
        self._until_flip = weather.flip_bytes or 0
        self._changed.set()
        self._changed = asyncio.Event()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = writer.get_extra_info("peername")[1]
        for is_its, link in self.branches:
            if is_its(port):
                link._accept(reader, writer)
                return
        if self._server is None:
            # A branch that refuses connections.
            _abort(writer)
            return
        self.accepted += 1
        writers = [writer]
        task = asyncio.create_task(self._serve(reader, writer, writers))
        self._connections[task] = writers
        task.add_done_callback(self._connections.pop)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, writers: list[asyncio.StreamWriter]
    ) -> None:
        try:
            target_reader, target_writer = await self._connect()
            writers.append(target_writer)
            async with asyncio.TaskGroup() as directions:
                directions.create_task(self._forward(reader, target_writer, is_request=True))
                directions.create_task(self._forward(target_reader, writer, is_request=False))
        except* (OSError, EOFError):
            for each in writers:
                _abort(each)
        finally:
            for each in writers:
                each.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._target.startswith("unix:"):
            return await asyncio.open_unix_connection(self._target.removeprefix("unix:"))
        host, _, port = self._target.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_request: bool) -> None:
        while data := await reader.read(READ_BYTES):
            if self.weather.delay_s:
                await asyncio.sleep(self.weather.delay_s)
            while self.weather.is_stalled:
                await self._changed.wait()
            if self.weather.drops_requests if is_request else self.weather.drops_answers:
                continue
            if not is_request:
                self.answered_bytes += len(data)
            writer.write(self._flipped(data))
            await writer.drain()
        # The other direction has nothing to wait for either: no protocol of these links closes one direction only.
        raise EOFError

    def _flipped(self, data: bytes) -> bytes:
        """Return `data` with one bit in every `flip_bytes` bytes of the link's traffic flipped."""
        every = self.weather.flip_bytes
        if every is None:
            return data
        changed = bytearray(data)
        position = self._until_flip
        while position < len(changed):
            changed[position] ^= 1 << self._random.randrange(8)
            position += self._random.randrange(1, 2 * every)
        self._until_flip = position - len(changed)
        return bytes(changed)


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close a connection at once: a TCP peer gets RST."""
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.family == socket.AF_INET:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORTIVE)
    writer.transport.abort()


def delayed(seconds: float) -> Weather:
    """Return the weather in which each read takes `seconds` longer."""
    return replace(CLEAR, delay_s=seconds)

"""A proxy between two services that can swallow or change the bytes of either direction."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

UP, DOWN = "up", "down"


class LinkProxy:
    """Forwards connections from the socket `path` to the socket `target`; directions in `lossy` lose all bytes."""

    def __init__(self) -> None:
        self.lossy: set[str] = set()
        # Called with the next bytes of a direction, it returns what is forwarded instead.
        self.changes: dict[str, Callable[[bytes], bytes]] = {}
        self._writers: set[asyncio.StreamWriter] = set()

    def reset(self) -> None:
        """Close all connections."""
        for writer in self._writers:
            writer.close()

    @asynccontextmanager
    async def between(self, path: str, target: str) -> AsyncIterator[LinkProxy]:
        """Listen until the end of the block."""

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            their_reader, their_writer = await asyncio.open_unix_connection(target)
            self._writers |= {writer, their_writer}
            with contextlib.suppress(ConnectionError):
                await asyncio.gather(self._forward(reader, their_writer, UP), self._forward(their_reader, writer, DOWN))

        server = await asyncio.start_unix_server(connect, path)
        try:
            yield self
        finally:
            server.close()
            self.reset()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str) -> None:
        try:
            while data := await reader.read(1 << 16):
                if direction not in self.lossy:
                    change = self.changes.pop(direction, None)
                    writer.write(data if change is None else change(data))
                    await writer.drain()
        finally:
            writer.close()

"""Files and batches in Redis or Valkey, shared by all gateways."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from common.lua_scripts import LuaScript

if TYPE_CHECKING:
    from collections.abc import Sequence

    from redis.asyncio import Redis

    from gateway.state.server import StateServer

# Calls at a time: many large documents at once would take so long that the server counts as unavailable, for all
# tenants and limits.
AT_ONCE = 4


class RedisDocuments:
    """Implements `gateway.batches.documents.Documents`: each folder is a hash."""

    def __init__(self, state: StateServer) -> None:
        """Use the server of `state`."""
        self._state = state
        self._script = LuaScript(state.redis, "gateway.batches", "documents.lua")
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def get(self, folder: str, name: str) -> bytes | None:
        """Return a document, None if there is none."""
        return (await self.get_many(folder, [name]))[0]

    async def get_many(self, folder: str, names: Sequence[str]) -> list[bytes | None]:
        """Return several documents of a folder; None for each that does not exist."""
        if not names:
            return []
        key = self._key(folder)

        async def read(redis: Redis) -> list[bytes | None]:
            found = await redis.hmget(key, list(names))
            return [value if isinstance(value, bytes) else None for _, value in zip(names, found, strict=True)]

        async with self._turns:
            return await self._state.call(read)

    async def names(self, folder: str) -> list[str]:
        """Return the names of a folder's documents, sorted."""
        key = self._key(folder)

        async def read(redis: Redis) -> list[str]:
            found: Any = await redis.hkeys(key)  # Any: the library's types are unions
            return sorted(name.decode() for name in found)

        async with self._turns:
            return await self._state.call(read)

    async def put(self, folder: str, name: str, content: bytes) -> None:
        """Write a document."""
        key = self._key(folder)
        async with self._turns:
            await self._state.call(lambda redis: redis.hset(key, name, content))

    async def exchange(self, folder: str, name: str, expected: bytes | None, content: bytes | None) -> bool:
        """Replace a document if its content is `expected`; return whether it was."""
        values = [b"" if value is None else b"=" + value for value in (expected, content)]
        arguments = [name.encode(), *values]
        key = self._key(folder)
        async with self._turns:
            done = await self._state.call(lambda redis: self._script(keys=[key], args=arguments, client=redis))
        return bool(done)

    async def delete(self, folder: str, name: str | None = None) -> None:
        """Delete a document, or a whole folder."""
        key = self._key(folder)
        async with self._turns:
            if name is None:
                await self._state.call(lambda redis: redis.unlink(key))
            else:
                await self._state.call(lambda redis: redis.hdel(key, name))

    async def close(self) -> None:
        """Do nothing: the connection belongs to the gateway's state."""

    def _key(self, folder: str) -> str:
        return f"{self._state.prefix}:batches:{folder}"

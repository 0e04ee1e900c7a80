"""Stored responses in Redis or Valkey, shared by all gateways."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

from common.errors import QueueFullError
from common.logs import get_logger
from common.lua_scripts import LuaScript
from common.room import SharedRoom
from common.types import Subject
from gateway.state.server import RETRY_AFTER_MS, StateAwayError
from gateway.stored_responses.store import decode, size_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from redis.asyncio import Redis

    from gateway.state.server import StateServer
    from gateway.stored_responses.store import ResponseOwner, StoredResponse

# Responses that finish while the server is unavailable wait here, up to this many bytes; more are dropped. Each counts
# with its size, at least LEAST_WAITING_BYTES.
MAX_WAITING_BYTES = 64 * 1024 * 1024
LEAST_WAITING_BYTES = 64 * 1024
# Reads and deletions that may wait, and how many of them, and how many writes, use the server at a time. A response may
# have megabytes: many at once would take so long that the server counts as unavailable, for all tenants and limits.
MAX_PENDING_READS = 64
AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class _Write:
    """A response that is being written: the arguments of the script, its subject and its size in bytes."""

    arguments: tuple[str | bytes | int, ...]
    subject: Subject
    size: int


class RedisResponses:
    """Implements `gateway.stored_responses.store.ResponseStore`.

    A response's key contains its holder and its id, so responses of other holders are never looked up.
    """

    def __init__(self, state: StateServer, lifetime_s: float, max_bytes: int) -> None:
        """Keep responses for `lifetime_s`, in `max_bytes` for all gateways together."""
        self._state = state
        self._lifetime_ms = max(1, round(lifetime_s * 1000))
        self._max_bytes = max_bytes
        self._prefix = f"{state.prefix}:{{responses}}"
        self._script = LuaScript(state.redis, "gateway.stored_responses", "responses.lua")
        self._waiting: deque[_Write] = deque()
        self._room = SharedRoom(MAX_WAITING_BYTES, "waiting for the shared state", RETRY_AFTER_MS)
        self._reads = SharedRoom(MAX_PENDING_READS, "reading stored responses", RETRY_AFTER_MS)
        self._read_turns = asyncio.Semaphore(AT_ONCE)
        self._write_turns = asyncio.Semaphore(AT_ONCE)
        self._writing: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._log = get_logger("responses")

    def check(self) -> None:
        """Check that the server is available.

        Raises:
            StateAwayError: it is not.
        """
        if not self._state.is_up:
            raise StateAwayError(was_sent=False)

    async def put(self, holder: ResponseOwner, subject: Subject, stored: StoredResponse) -> None:
        """Store a response. While the server is unavailable, the response waits in memory, and this returns."""
        texts = stored.encode()
        size = size_of(texts)
        if size > self._max_bytes:
            self._log.error("response.not_stored", reason=f"it has {size} bytes, and there is room for fewer")
            return
        bounds = (self._lifetime_ms, self._max_bytes)
        place = (self._prefix, _digest(holder.tenant, holder.credential), _digest(stored.response["id"]))
        room = (_digest(subject.tenant), _digest(subject.name), size)
        arguments = ("put", *place, *bounds, *room, _user(holder), *texts)
        # The response is stored even if its client disconnects at its last byte.
        task = asyncio.create_task(self._write(_Write(arguments, subject, max(size, LEAST_WAITING_BYTES))))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        await asyncio.shield(task)

    async def find(self, holder: ResponseOwner, response_id: str) -> StoredResponse | None:
        """Return a response of `holder`; of any user of the credential, if `holder` names none.

        Raises:
            StateAwayError: the server is unavailable.
            QueueFullError: too many other reads wait.
        """
        key = f"{self._prefix}:item:{_digest(holder.tenant, holder.credential)}:{_digest(response_id)}"

        async def read(redis: Redis) -> StoredResponse | None:
            found = await redis.hmget(key, ["user", "response", "messages", "input"])
            parts = [part for part in found if isinstance(part, bytes)]
            if len(parts) < len(found):
                return None
            user, response, messages, given = parts
            if holder.user is not None and user != _user(holder).encode():
                return None
            return decode(response, messages, given)

        async with self._turn_to_read(holder):
            return await self._state.call(read)

    async def delete(self, holder: ResponseOwner, response_id: str) -> bool:
        """Delete a response of `holder`; return whether it existed.

        Raises:
            StateAwayError: the server is unavailable.
            QueueFullError: too many other reads wait.
        """
        place = (self._prefix, _digest(holder.tenant, holder.credential), _digest(response_id))
        arguments = ("delete", *place, _user(holder))
        async with self._turn_to_read(holder):
            return bool(await self._state.call(lambda redis: self._script(args=arguments, client=redis)))

    async def run(self) -> None:
        """Write the waiting responses whenever the server is available again, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                await self._state.wait_up()
                with contextlib.suppress(StateAwayError):
                    await self.flush()

    async def flush(self) -> None:
        """Write the waiting responses.

        Raises:
            StateAwayError: the server is unavailable.
        """
        if self._writing:
            await asyncio.wait(self._writing)
        while self._waiting:
            write = self._waiting[0]
            await self._state.call(lambda redis, write=write: self._script(args=write.arguments, client=redis))  # type: ignore[misc]
            self._waiting.popleft()
            self._room.give_back(write.subject, write.size)

    @contextlib.asynccontextmanager
    async def _turn_to_read(self, holder: ResponseOwner) -> AsyncIterator[None]:
        subject = Subject(holder.tenant, holder.credential)
        self._reads.take(subject)
        try:
            async with self._read_turns:
                yield
        finally:
            self._reads.give_back(subject)

    async def _write(self, write: _Write) -> None:
        try:
            async with self._write_turns:
                await self._state.call(lambda redis: self._script(args=write.arguments, client=redis))
        except StateAwayError:
            try:
                self._room.take(write.subject, write.size)
            except QueueFullError as error:
                self._log.error("response.not_stored", reason=str(error))
                return
            self._waiting.append(write)
            self._wake.set()


def _digest(*names: str) -> str:
    """Return a hash of the list of names; joining them as text could make different lists equal."""
    return hashlib.sha256(orjson.dumps(names)).hexdigest()[:32]


def _user(holder: ResponseOwner) -> str:
    """Return a user's name in its stored form, which is empty without a user."""
    return "" if holder.user is None else f"={holder.user}"

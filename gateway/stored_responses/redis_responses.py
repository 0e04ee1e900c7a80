"""Stored responses in Redis or Valkey: every gateway finds those of all."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import deque
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

import orjson

from common.errors import QueueFullError
from common.logs import get_logger
from common.room import SharedRoom
from gateway.state.server import RETRY_AFTER_MS, StateAwayError
from gateway.stored_responses.store import decode, size_of

if TYPE_CHECKING:
    from common.types import Subject
    from gateway.state.server import StateServer
    from gateway.stored_responses.store import Holder, StoredResponse

# Responses that were finished while the server was away wait here for it; beyond this they are not kept. Each counts as
# many bytes as it has, and no fewer than the least.
MAX_WAITING_BYTES = 64 * 1024 * 1024
LEAST_WAITING_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class _Write:
    """A response on its way: arguments of the script."""

    arguments: tuple[str | bytes | int, ...]
    subject: Subject
    size: int


class RedisResponses:
    """Implements `gateway.stored_responses.store.ResponseStore`.

    A response stands under a key that is made of its holder and its id, so one of another holder is not even looked at.
    """

    def __init__(self, state: StateServer, lifetime_s: float, max_bytes: int) -> None:
        """Keep responses for `lifetime_s`, in `max_bytes` for all gateways together."""
        self._state = state
        self._lifetime_ms = max(1, round(lifetime_s * 1000))
        self._max_bytes = max_bytes
        self._prefix = f"{state.prefix}:{{responses}}"
        script = resources.files("gateway.stored_responses").joinpath("responses.lua").read_text()
        self._script = state.redis.register_script(script)
        self._waiting: deque[_Write] = deque()
        self._room = SharedRoom(MAX_WAITING_BYTES, "waiting for the shared state", RETRY_AFTER_MS)
        self._writing: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._log = get_logger("responses")

    def check(self) -> None:
        """Return if the server is there.

        Raises:
            StateAwayError: it is away.
        """
        if not self._state.is_up:
            raise StateAwayError(was_sent=False)

    async def put(self, holder: Holder, subject: Subject, stored: StoredResponse) -> None:
        """Keep a response. If the server is away, it waits here, and this returns."""
        texts = stored.encode()
        size = size_of(texts)
        if size > self._max_bytes:
            self._log.error("response.not_stored", reason=f"it has {size} bytes, and there is room for fewer")
            return
        bounds = (self._lifetime_ms, self._max_bytes)
        place = (self._prefix, _digest(holder.tenant, holder.credential), _digest(stored.response["id"]))
        room = (_digest(subject.tenant), _digest(subject.name), size)
        arguments = ("put", *place, *bounds, *room, _user(holder), *texts)
        # A client that leaves at its last byte does not take the response with it.
        task = asyncio.create_task(self._write(_Write(arguments, subject, max(size, LEAST_WAITING_BYTES))))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        await asyncio.shield(task)

    async def find(self, holder: Holder, response_id: str) -> StoredResponse | None:
        """Return a response of `holder`; of any user of the credential, if `holder` names none.

        Raises:
            StateAwayError: the server is away.
        """
        key = f"{self._prefix}:item:{_digest(holder.tenant, holder.credential)}:{_digest(response_id)}"
        found = await self._state.call(lambda redis: redis.hmget(key, ["user", "response", "messages", "input"]))
        parts = [part for part in found if isinstance(part, bytes)]
        if len(parts) < len(found):
            return None
        user, response, messages, given = parts
        if holder.user is not None and user != _user(holder).encode():
            return None
        return decode(response, messages, given)

    async def delete(self, holder: Holder, response_id: str) -> bool:
        """Forget a response of `holder`; return whether there was one.

        Raises:
            StateAwayError: the server is away.
        """
        place = (self._prefix, _digest(holder.tenant, holder.credential), _digest(response_id))
        arguments = ("delete", *place, _user(holder))
        return bool(await self._state.call(lambda redis: self._script(args=arguments, client=redis)))

    async def run(self) -> None:
        """Write what waits whenever the server is back, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                await self._state.wait_up()
                with contextlib.suppress(StateAwayError):
                    await self.flush()

    async def flush(self) -> None:
        """Write what waits.

        Raises:
            StateAwayError: the server is away.
        """
        if self._writing:
            await asyncio.wait(self._writing)
        while self._waiting:
            write = self._waiting[0]
            await self._state.call(lambda redis, write=write: self._script(args=write.arguments, client=redis))  # type: ignore[misc]
            self._waiting.popleft()
            self._room.give_back(write.subject, write.size)

    async def _write(self, write: _Write) -> None:
        try:
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
    """Return a name that no other names have, whatever characters they have."""
    return hashlib.sha256(orjson.dumps(names)).hexdigest()[:32]


def _user(holder: Holder) -> str:
    """Return a user's name as it is stored; empty for none."""
    return "" if holder.user is None else f"={holder.user}"

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

from common.logs import get_logger
from gateway.state.server import StateAwayError
from gateway.stored_responses.store import HOLDERS_SHARE, StoredResponse

if TYPE_CHECKING:
    from gateway.state.server import StateServer
    from gateway.stored_responses.store import Holder

# Responses that were finished while the server was away wait here for it; beyond these bounds they are not kept.
MAX_WAITING = 1_000
MAX_WAITING_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Write:
    """A response on its way: arguments of the script."""

    arguments: tuple[str | bytes | int, ...]
    size: int


class RedisResponses:
    """Implements `gateway.stored_responses.store.ResponseStore`.

    A response stands under a key that is made of its holder and its id, so one of another holder is not even looked at.
    """

    def __init__(self, state: StateServer, lifetime_s: float, max_bytes: int) -> None:
        """Keep responses for `lifetime_s`; beyond `max_bytes`, for all gateways together, the oldest go."""
        self._state = state
        self._lifetime_ms = max(1, round(lifetime_s * 1000))
        self._max_bytes = max_bytes
        self._prefix = f"{state.prefix}:{{responses}}"
        script = resources.files("gateway.stored_responses").joinpath("responses.lua").read_text()
        self._script = state.redis.register_script(script)
        self._waiting: deque[_Write] = deque()
        self._waiting_bytes = 0
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

    async def put(self, holder: Holder, stored: StoredResponse) -> None:
        """Keep a response. If the server is away, it waits here, and this returns."""
        texts = [orjson.dumps(part) for part in (stored.response, stored.messages, stored.input)]
        bounds = (self._lifetime_ms, self._max_bytes, self._max_bytes // HOLDERS_SHARE)
        place = (self._prefix, _digest(holder), _digest_id(stored.response["id"]))
        write = _Write(("put", *place, *bounds, _user(holder), *texts), sum(map(len, texts)))
        # A client that leaves at its last byte does not take the response with it.
        task = asyncio.create_task(self._write(write))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        await asyncio.shield(task)

    async def find(self, holder: Holder, response_id: str) -> StoredResponse | None:
        """Return a response of `holder`; of any user of the credential, if `holder` names none.

        Raises:
            StateAwayError: the server is away.
        """
        key = f"{self._prefix}:item:{_digest(holder)}:{_digest_id(response_id)}"
        found = await self._state.call(lambda redis: redis.hmget(key, ["user", "response", "messages", "input"]))
        user, *texts = found
        if user is None or (holder.user is not None and user != _user(holder).encode()):
            return None
        return StoredResponse(*(orjson.loads(text or b"null") for text in texts))

    async def delete(self, holder: Holder, response_id: str) -> bool:
        """Forget a response of `holder`; return whether there was one.

        Raises:
            StateAwayError: the server is away.
        """
        arguments = ("delete", self._prefix, _digest(holder), _digest_id(response_id), _user(holder))
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
            self._waiting_bytes -= write.size

    async def _write(self, write: _Write) -> None:
        try:
            await self._state.call(lambda redis: self._script(args=write.arguments, client=redis))
        except StateAwayError:
            if len(self._waiting) >= MAX_WAITING or self._waiting_bytes + write.size > MAX_WAITING_BYTES:
                self._log.error("response.not_stored", reason="too many writes wait for the shared state")
                return
            self._waiting.append(write)
            self._waiting_bytes += write.size
            self._wake.set()


def _digest(holder: Holder) -> str:
    """Return a name of tenant and credential that no other pair has, whatever characters they have."""
    return hashlib.sha256(orjson.dumps([holder.tenant, holder.credential])).hexdigest()[:32]


def _digest_id(response_id: str) -> str:
    return hashlib.sha256(response_id.encode()).hexdigest()[:32]


def _user(holder: Holder) -> str:
    """Return a user's name as it is stored; empty for none."""
    return "" if holder.user is None else f"={holder.user}"

"""Records of answers in Redis or Valkey, shared by all gateways."""

from __future__ import annotations

import asyncio
import hashlib
import re
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from common.errors import QueueFullError
from common.logs import get_logger
from common.lua_scripts import LuaScript
from gateway.answer_records.records import RECORD_BYTES, RecordReading, Writing
from gateway.answer_records.sealing import UnsealedError
from gateway.state.server import RETRY_AFTER_MS, StateAwayError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from redis.asyncio import Redis

    from gateway.answer_records.records import NewRecord
    from gateway.answer_records.sealing import Sealing
    from gateway.state.server import StateServer

T = TypeVar("T")

# Records that one call appends to, so that no call occupies the server for long.
APPENDS_A_CALL = 256
# Of records, as `record_name` returns them.
NAME = re.compile(r"[0-9a-f]{40}")
# As the script names them.
OUTCOMES = {"d": Writing.DONE, "l": Writing.LOST, "g": Writing.GONE}


class _Append(NamedTuple):
    """Chunks that wait for the next call: the arguments of the script, and the outcome."""

    arguments: tuple[str | bytes, ...]
    outcome: asyncio.Future[Writing]


class RedisRecords:
    """Implements `gateway.answer_records.records.AnswerRecords`.

    Chunks of all records that arrive while a call is under way share the next one, so that streams cost one call per
    step of the model instead of one per token.
    """

    def __init__(self, state: StateServer, sealing: Sealing, lifetime_s: float, max_bytes: int) -> None:
        """Keep records for `lifetime_s` after their last change, in `max_bytes` for all gateways together."""
        self.lifetime_s = lifetime_s
        self.gateway_id = state.gateway_id
        self._state = state
        self._sealing = sealing
        self._common = (f"{state.prefix}:{{answers}}", state.probe_key(""), max(1, round(lifetime_s * 1000)), max_bytes)
        self._script = LuaScript(state.redis, "gateway.answer_records", "records.lua")
        self._queue: list[_Append] = []
        self._writing: asyncio.Task[None] | None = None
        self._log = get_logger("answers")

    async def open(self, record: NewRecord) -> str | None:
        request = self._sealing.seal(record.name, "request", record.request)
        room = (_digest(record.subject.tenant), _digest(record.subject.name), RECORD_BYTES + len(request))
        arguments = (record.name, record.claim or "", *room, request, record.owner, int(record.in_background))

        def opened(found: bytes) -> str:
            if found in (b"", b"full"):
                return found.decode()
            if record.claim is None:
                raise ValueError("it names a record without a claim")
            return _name(found)

        found = await self._call("open", *arguments, read=opened)
        if found == "full":
            raise QueueFullError("too many answers are recorded; try again later", retry_after_ms=RETRY_AFTER_MS)
        return found or None

    async def claimed(self, claim: str) -> str | None:
        key = f"{self._common[0]}:claim:{claim}"

        async def name(redis: Redis) -> str | None:
            found = await redis.get(key)
            return None if found is None else _name(found)

        return await self._state.call(name)

    async def request(self, name: str) -> bytes | None:
        def opened(found: bytes | None) -> bytes | None:
            return None if found is None else self._sealing.open(name, "request", found)

        return await self._unseal("request", name, read=opened)

    async def read(self, name: str, first: int = 0) -> RecordReading | None:
        def opened(found: list[Any] | None) -> RecordReading | None:  # Any: as records.lua says
            if found is None:
                return None
            owner, end, charged, is_owned, written, chunks = found
            open_ = self._sealing.open
            return RecordReading(
                [open_(name, str(number), chunk) for number, chunk in enumerate(chunks, first)],
                int(written),
                owner.decode() or None,
                bool(is_owned),
                open_(name, "end", end) if end else None,
                int(charged) if charged else None,
            )

        return await self._unseal("read", name, first, read=opened)

    async def append(self, name: str, owner: str, first: int, chunks: Sequence[bytes]) -> Writing:
        sealed = [self._sealing.seal(name, str(number), chunk) for number, chunk in enumerate(chunks, first)]
        outcome: asyncio.Future[Writing] = asyncio.get_running_loop().create_future()
        self._queue.append(_Append((f"{name} {owner} {first} {len(sealed)}", *sealed), outcome))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        return await outcome

    async def finish(self, name: str, owner: str | None, end: bytes) -> bool:
        return await self._call("finish", name, owner or "", self._sealing.seal(name, "end", end), read=bool)

    async def release(self, name: str, owner: str, charged: int | None) -> bool:
        return await self._call("release", name, owner, "" if charged is None else charged, read=bool)

    async def take(self, name: str, previous: str | None, owner: str, chunks: int) -> bool:
        return await self._call("take", name, previous or "", owner, chunks, read=bool)

    async def keep(self, names: Sequence[str]) -> None:
        for first in range(0, len(names), APPENDS_A_CALL):
            await self._call("keep", *names[first : first + APPENDS_A_CALL], read=bool)

    async def drop(self, name: str) -> None:
        await self._call("drop", name, read=bool)

    async def orphans(self) -> Sequence[str]:
        return await self._call("orphans", read=lambda found: [name.decode() for name in found])

    async def _write(self) -> None:
        """Append what waits, until nothing does."""
        try:
            while self._queue:
                batch, self._queue = self._queue[:APPENDS_A_CALL], self._queue[APPENDS_A_CALL:]
                arguments = (argument for one in batch for argument in one.arguments)
                try:
                    outcomes = await self._call("append", *arguments, read=partial(_outcomes, len(batch)))
                except StateAwayError as error:
                    for one in batch:
                        if not one.outcome.done():
                            one.outcome.set_exception(StateAwayError(was_sent=error.was_sent))
                    continue
                for one, outcome in zip(batch, outcomes, strict=True):
                    if not one.outcome.done():
                        one.outcome.set_result(outcome)
        finally:
            self._writing = None

    async def _unseal(self, operation: str, *arguments: str | int, read: Callable[[Any], T | None]) -> T | None:
        """Return the result of `read` on a reply; None if two replies have no content, or none that can be trusted.

        A bit that flips in the record's name, or on the way back, does not flip again.
        """

        def attempt(reply: Any) -> T | UnsealedError | None:  # Any: as the operation says
            try:
                return read(reply)
            except UnsealedError as error:
                return error

        found = await self._call(operation, *arguments, read=attempt)
        if found is None or isinstance(found, UnsealedError):
            found = await self._call(operation, *arguments, read=attempt)
        if isinstance(found, UnsealedError):
            self._log.error("answer.refused", reason=str(found))
            return None
        return found

    async def _call(self, operation: str, *arguments: str | int | bytes, read: Callable[[Any], T]) -> T:
        """Run an operation of the script and `read` its reply (Any: as the operation says)."""
        everything = (operation, *self._common, *arguments)

        async def run(redis: Redis) -> T:
            return read(await self._script(args=everything, client=redis))

        return await self._state.call(run)


def _outcomes(count: int, letters: bytes) -> list[Writing]:
    """Return the outcomes of `count` appends.

    Raises:
        ValueError: the reply has another number of them.
        KeyError: it has others.
    """
    if len(letters) != count:
        raise ValueError(f"{len(letters)} outcomes of {count} appends")
    return [OUTCOMES[letter] for letter in letters.decode()]


def _name(found: Any) -> str:  # Any: a reply, which may be damaged
    """Return the name of a record in a reply.

    Raises:
        ValueError: it is none.
    """
    name: str = found.decode()
    if NAME.fullmatch(name) is None:
        raise ValueError("it is not the name of a record")
    return name


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]

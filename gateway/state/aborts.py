"""Aborts requests at any gateway.

Aborts are rare, and each gateway has its own list of open requests. So an abort is published to all gateways, and each
reports how many requests it has ended. The alternative, a directory of open requests with a mailbox for each gateway,
would cost two writes for every request, and mailboxes of dead gateways would fill up. Publishing does not reach a
gateway that is disconnected at that moment. The sender can detect this: it receives the number of gateways that got the
message, and the client, which gets 0 for a request that was not found, can repeat the abort.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from redis.exceptions import RedisError

from common.errors import QueueFullError, UnavailableError
from common.logs import get_logger
from common.room import SharedRoom
from common.types import Subject
from gateway.identity.caller import Caller, owns
from gateway.state.server import StateAwayError
from gateway.state.signatures import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from redis.asyncio import Redis

    from common.types import View
    from gateway.generation.generations import Generations
    from gateway.state.server import StateServer
    from gateway.state.signatures import Signatures

# How long an abort waits for the reports of other gateways.
REPORTS_WITHIN_S = 1.0
RECONNECT_S = 0.2
# Limits the concurrent aborts at other gateways: each polls for reports over a connection from the shared pool.
MAX_OPEN_ABORTS = 32
NEEDS_SECRET = (
    "requests were ended at this gateway; the others end what is not the caller's own only if all of them have "
    "gateway.state.secret."
)


class Aborts(Protocol):
    """Aborts requests."""

    async def abort(self, request_id: str | None, caller: Caller) -> int:
        """Abort the requests with exactly the id `request_id` (None: any) that `caller` may abort; return their number.

        Raises:
            UnavailableError: no such request is open here, and the other gateways cannot be reached.
        """


class LocalAborts:
    """Implements `Aborts` for a single gateway."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations

    async def abort(self, request_id: str | None, caller: Caller) -> int:
        return self._generations.abort(request_id, may_end(caller))


class SharedAborts:
    """Implements `Aborts` for several gateways.

    Messages name the caller. Signed ones are trusted, including the claim that the caller is an administrator. Without
    a secret for signatures, a message aborts requests of the named subject only, by exact id, and administrators abort
    requests only at the gateway that they call.
    """

    def __init__(self, state: StateServer, generations: Generations, signatures: Signatures) -> None:
        """`generations` has the requests that are open here; `state` connects to the other gateways."""
        self._state = state
        self._local = LocalAborts(generations)
        self._signatures = signatures
        self._channel = f"{state.prefix}:aborts"
        self._room = SharedRoom(MAX_OPEN_ABORTS, "ending requests at other gateways", 1000)
        self._log = get_logger("aborts")

    async def abort(self, request_id: str | None, caller: Caller) -> int:
        """Abort requests that are open here or at another gateway.

        Raises:
            UnavailableError: the request was not found here and the other gateways cannot be reached, or the caller is
                an administrator and the other gateways would not accept an unsigned message.
            QueueFullError: too many other aborts are open; requests that were open here have been aborted.
        """
        found = await self._local.abort(request_id, caller)
        subject = Subject(caller.tenant, caller.subject)
        try:
            self._room.take(subject)
        except QueueFullError:
            if found and request_id is not None:
                return found
            raise
        try:
            return found + await self._abort_elsewhere(request_id, caller, found)
        finally:
            self._room.give_back(subject)

    async def _abort_elsewhere(self, request_id: str | None, caller: Caller, found: int) -> int:
        """Return the number of requests that other gateways have ended, in addition to those `found` here."""
        if caller.is_admin and not self._signatures.are_made:
            if (found and request_id is not None) or await self._gateways() <= 1:
                return 0
            raise UnavailableError(f"{found} {NEEDS_SECRET}")
        reports = f"{self._reports}{secrets.token_hex(16)}"
        content = {
            "from": self._state.gateway_id,
            "reports": reports,
            "request_id": request_id,
            "caller": _caller_to_json(caller),
        }
        message = self._signatures.seal(content)
        try:
            receivers = await self._state.call(lambda redis: redis.publish(self._channel, message))
            return await self._collect(reports, receivers)
        except StateAwayError:
            if found and request_id is not None:
                return 0
            raise

    async def run(self) -> None:
        """Execute the aborts that other gateways publish, until cancelled."""
        while True:
            await self._state.wait_up()
            with contextlib.suppress(RedisError, OSError, StateAwayError):
                await self._listen()
            await asyncio.sleep(RECONNECT_S)

    async def _listen(self) -> None:
        async with self._state.redis.pubsub(ignore_subscribe_messages=True) as subscription:
            async with asyncio.timeout(self._state.timeout_s):
                await subscription.subscribe(self._channel)
            while self._state.is_up:
                message = await subscription.get_message(timeout=1.0)
                if message is not None:
                    await self._on_message(message["data"])

    async def _on_message(self, data: bytes) -> None:
        try:
            content = self._signatures.open(data)
            caller, request_id, reports = (
                _caller_from_json(content["caller"]),
                content["request_id"],
                content["reports"],
            )
            if not self._signatures.are_made and (caller.is_admin or request_id is None):
                raise RefusedError("administrators' messages need gateway.state.secret")
            if not reports.startswith(self._reports):
                raise RefusedError("it asks for reports elsewhere")
            is_own = content["from"] == self._state.gateway_id
        except RefusedError as error:
            self._log.error("abort.refused", reason=str(error))
            return
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._log.error("abort.refused", reason=f"it is malformed: {error}")
            return
        # The sender has counted its own requests already, but one report per receiver is expected.
        count = 0 if is_own else await self._local.abort(request_id, caller)
        await self._state.call(lambda redis: _report(redis, reports, count))

    @property
    def _reports(self) -> str:
        return f"{self._state.prefix}:abort:"

    async def _gateways(self) -> int:
        """Return the number of subscribed gateways."""
        [(_, count)] = await self._state.call(lambda redis: redis.pubsub_numsub(self._channel))
        return int(count)

    async def _collect(self, reports: str, receivers: int) -> int:
        """Sum up the reports of `receivers` gateways that arrive within REPORTS_WITHIN_S."""
        loop = asyncio.get_running_loop()
        until, found = loop.time() + REPORTS_WITHIN_S, 0
        while receivers > 0 and loop.time() < until:
            received = await self._state.call(partial(_take_reports, reports, receivers))
            found += sum(map(int, received))
            receivers -= len(received)
            if receivers:
                await asyncio.sleep(0.01)
        return found


async def _take_reports(reports: str, count: int, redis: Redis) -> list[bytes]:
    # The stubs also allow a single value, which Redis returns only for calls without a count.
    return cast("list[bytes] | None", await redis.lpop(reports, count)) or []


def may_end(caller: Caller) -> Callable[[View], bool]:
    """Return a predicate for the requests that `caller` may abort: its own, or all if it is an administrator."""
    return lambda owner: caller.is_admin or owns(caller, owner)


async def _report(redis: Redis, reports: str, count: int) -> None:
    async with redis.pipeline(transaction=False) as pipeline:
        pipeline.rpush(reports, count)
        pipeline.pexpire(reports, 10_000)
        await pipeline.execute()


def _caller_to_json(caller: Caller) -> dict[str, Any]:  # Any: JSON
    """Return the fields of `caller` that decide which requests it may abort."""
    return {
        "tenant": caller.tenant,
        "subject": caller.subject,
        "vouches": caller.vouches,
        "is_admin": caller.is_admin,
    }


def _caller_from_json(fields: dict[str, Any]) -> Caller:  # Any: JSON
    return Caller(**fields)

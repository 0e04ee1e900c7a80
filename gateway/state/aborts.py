"""Ending requests on demand, wherever they are open.

Aborts are rare, and each gateway knows its own open requests. So an abort is published to all gateways, and each
reports how many it has ended. The alternative, a directory of open requests with a mailbox for each gateway, would cost
two writes for every request, and mailboxes of dead gateways would fill up. What publishing lacks, delivery to a gateway
that is disconnected at the moment, the sender sees: it is told how many gateways have received the message, and 0 when
the request was not found, so the client can repeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import orjson
from redis.exceptions import RedisError

from common.logs import get_logger
from gateway.identity.caller import Caller, owns
from gateway.state.server import StateAwayError

if TYPE_CHECKING:
    from collections.abc import Callable

    from redis.asyncio import Redis

    from common.types import View
    from gateway.generations import Generations
    from gateway.state.server import StateServer

# How long an abort waits for the reports of other gateways.
REPORTS_WITHIN_S = 1.0
RECONNECT_S = 0.2
MAX_MESSAGE_BYTES = 16_384


class Aborts(Protocol):
    """Ends requests."""

    async def abort(self, request_id: str | None, caller: Caller) -> int:
        """End the request called exactly `request_id`, or all, of those that `caller` may end; return how many.

        Raises:
            UnavailableError: it was not found here, and the other gateways cannot be asked.
        """


class LocalAborts:
    """Implements `Aborts` for a single gateway."""

    def __init__(self, generations: Generations) -> None:
        """End what is open in `generations`."""
        self._generations = generations

    async def abort(self, request_id: str | None, caller: Caller) -> int:
        """End requests that are open here."""
        return self._generations.abort(request_id, may_end(caller))


class SharedAborts:
    """Implements `Aborts` for several gateways."""

    def __init__(self, state: StateServer, generations: Generations) -> None:
        """End what is open in `generations`, and ask the others through `state`."""
        self._state = state
        self._local = LocalAborts(generations)
        self._channel = f"{state.prefix}:aborts"
        self._log = get_logger("aborts")

    async def abort(self, request_id: str | None, caller: Caller) -> int:
        """End requests that are open here or at another gateway."""
        found = await self._local.abort(request_id, caller)
        reports = f"{self._state.prefix}:abort:{secrets.token_hex(16)}"
        message = {
            "from": self._state.gateway_id,
            "reports": reports,
            "request_id": request_id,
            "caller": _caller_to_json(caller),
        }
        try:
            receivers = await self._state.call(lambda redis: redis.publish(self._channel, orjson.dumps(message)))
            return found + await self._collect(reports, receivers)
        except StateAwayError:
            if found and request_id is not None:
                return found
            raise

    async def run(self) -> None:
        """End what other gateways are asked to end, until cancelled."""
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
            message = orjson.loads(data[:MAX_MESSAGE_BYTES])
            caller, reports = _caller_from_json(message["caller"]), message["reports"]
            is_own = message["from"] == self._state.gateway_id
            request_id = message["request_id"]
        except (ValueError, KeyError, TypeError) as error:
            self._log.error("abort.malformed", reason=str(error))
            return
        # The one that asks has looked for itself; its report counts as that of a receiver.
        count = 0 if is_own else await self._local.abort(request_id, caller)
        await self._state.call(lambda redis: _report(redis, reports, count))

    async def _collect(self, reports: str, receivers: int) -> int:
        """Add up the reports of `receivers` gateways, as far as they come in time."""
        loop = asyncio.get_running_loop()
        until, found = loop.time() + REPORTS_WITHIN_S, 0
        while receivers > 0 and loop.time() < until:
            received = await self._state.call(partial(_take_reports, reports, receivers))
            found += sum(map(int, received))
            receivers -= len(received)
            if receivers:
                await asyncio.sleep(0.005)
        return found


async def _take_reports(reports: str, count: int, redis: Redis) -> list[bytes]:
    # The stubs allow a single value, which is what comes without a count.
    return cast("list[bytes] | None", await redis.lpop(reports, count)) or []


def may_end(caller: Caller) -> Callable[[View], bool]:
    """Return whose requests `caller` may end: its own, or everybody's as an administrator."""
    return lambda owner: caller.is_admin or owns(caller, owner)


async def _report(redis: Redis, reports: str, count: int) -> None:
    async with redis.pipeline(transaction=False) as pipeline:
        pipeline.rpush(reports, count)
        pipeline.pexpire(reports, 10_000)
        await pipeline.execute()


def _caller_to_json(caller: Caller) -> dict[str, Any]:  # Any: JSON
    """Return what decides whose requests a caller may end."""
    return {
        "tenant": caller.tenant,
        "subject": caller.subject,
        "vouches": caller.vouches,
        "is_admin": caller.is_admin,
    }


def _caller_from_json(fields: dict[str, Any]) -> Caller:  # Any: JSON
    return Caller(**fields)

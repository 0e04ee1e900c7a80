"""Aborts requests at any gateway.

Aborts are rare, and each gateway has its own list of open requests. So an abort is published to all gateways, and each
reports how many requests it has ended. The alternative, a directory of open requests with a mailbox for each gateway,
would cost two writes for every request, and mailboxes of dead gateways would fill up. Publishing does not reach a
gateway that is disconnected at that moment. The sender can detect this: it receives the number of gateways that got the
message, and the client, which gets 0 for a request that was not found, can repeat the abort.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import orjson

from common.errors import QueueFullError, UnavailableError
from common.logs import get_logger
from common.room import SharedRoom
from common.types import Subject
from gateway.identity.caller import Caller, owns
from gateway.state.server import StateAwayError

if TYPE_CHECKING:
    from collections.abc import Callable

    from redis.asyncio import Redis

    from common.types import View
    from gateway.generation.generations import Generations
    from gateway.state.server import StateServer

# How long an abort waits for the reports of other gateways.
REPORTS_WITHIN_S = 1.0
RECONNECT_S = 0.2
# Limits the concurrent aborts at other gateways: each polls for reports over a connection from the shared pool.
MAX_OPEN_ABORTS = 32
NEEDS_SECRET = (
    "requests were ended at this gateway; the others end what is not the caller's own only if all of them have "
    "gateway.state.secret."
)
# A message is refused when it is older, or when the clocks of sender and receiver differ by more.
VALID_S = 30.0
MAC_BYTES = 32
MAX_MESSAGE_BYTES = 16_384


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
            receivers = await self._state.call(lambda redis: _publish(redis, self._channel, message))
            return await self._collect(reports, receivers)
        except StateAwayError:
            if found and request_id is not None:
                return 0
            raise

    async def run(self) -> None:
        """Execute the aborts that other gateways publish, until cancelled."""
        while True:
            await self._state.wait_up()
            try:
                await self._listen()
            except Exception as error:  # noqa: BLE001  (as `StateServer.call`)
                self._log.info("aborts.unheard", reason=str(error) or type(error).__name__)
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

        async def count(redis: Redis) -> int:
            [(_, receivers)] = await redis.pubsub_numsub(self._channel)
            return int(receivers)

        return await self._state.call(count)

    async def _collect(self, reports: str, receivers: int) -> int:
        """Sum up the reports of `receivers` gateways that arrive within REPORTS_WITHIN_S."""
        loop = asyncio.get_running_loop()
        until, found = loop.time() + REPORTS_WITHIN_S, 0
        while receivers > 0 and loop.time() < until:
            received = await self._state.call(partial(_take_reports, reports, receivers))
            found += sum(received)
            receivers -= len(received)
            if receivers:
                await asyncio.sleep(0.01)
        return found


async def _publish(redis: Redis, channel: str, message: bytes) -> int:
    """Publish a message; return the number of receivers."""
    return int(await redis.publish(channel, message))


async def _take_reports(reports: str, count: int, redis: Redis) -> list[int]:
    # The stubs also allow a single value, which Redis returns only for calls without a count.
    return [int(each) for each in cast("list[bytes] | None", await redis.lpop(reports, count)) or []]


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


class RefusedError(Exception):
    """A message that is not signed with the secret, too old, received before, or malformed."""


class Signatures:
    """Signs messages with a secret that all gateways share (HMAC-SHA256), and accepts each message once.

    Without a secret, messages are not signed, and every client of the server can forge them.
    """

    def __init__(self, secret: str | None, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns Unix time in seconds."""
        self._key = None if secret is None else hashlib.sha256(b"pando.aborts\0" + secret.encode()).digest()
        self._clock = clock
        # Nonces of messages that may still be valid, in order of arrival, each with the time of its expiry.
        self._received: dict[str, float] = {}

    @property
    def are_made(self) -> bool:
        """Whether there is a secret."""
        return self._key is not None

    def seal(self, content: dict[str, Any]) -> bytes:  # Any: JSON
        """Return `content` as a signed message."""
        body = orjson.dumps({**content, "at": self._clock(), "nonce": secrets.token_hex(16)})
        return self._mac(body) + body

    def open(self, message: bytes) -> dict[str, Any]:  # Any: JSON
        """Verify a message and return its content.

        Raises:
            RefusedError: the message is not trusted.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            raise RefusedError("it is too long")
        length = MAC_BYTES if self.are_made else 0
        mac, body = message[:length], message[length:]
        if not hmac.compare_digest(mac, self._mac(body)):
            raise RefusedError("it is not signed with gateway.state.secret of this gateway")
        try:
            content = orjson.loads(body)
            at, nonce = float(content["at"]), str(content["nonce"])
        except (ValueError, KeyError, TypeError) as error:
            raise RefusedError("it is malformed") from error
        now = self._clock()
        if not abs(now - at) <= VALID_S:
            raise RefusedError("it is too old, or the clocks of the gateways differ")
        if self.are_made:
            self._note(nonce, now)
        return dict(content)

    def _note(self, nonce: str, now: float) -> None:
        while self._received and next(iter(self._received.values())) < now:
            del self._received[next(iter(self._received))]
        if nonce in self._received:
            raise RefusedError("it was received before")
        # A sender's clock may be ahead by VALID_S, and its message stays valid for VALID_S after that.
        self._received[nonce] = now + 2 * VALID_S

    def _mac(self, body: bytes) -> bytes:
        return b"" if self._key is None else hmac.digest(self._key, body, "sha256")

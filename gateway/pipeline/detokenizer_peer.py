"""The subscription at one detokenizer."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING, Protocol

import grpc

from common.errors import UnavailableError
from common.logs import get_logger
from common.rpc.channel import renew
from common.rpc.peers import Health
from common.rpc.status import CLOSED_DURING_CALL, answered, is_own_cancellation
from common.rpc.stream import (
    ACCEPT_TIMEOUT_S,
    CLOSED_HERE,
    HEARTBEAT_S,
    MessageNumbers,
    RefusalLog,
    Silence,
    keep_connecting,
    unreadable,
    wait_until_accepted,
)
from common.types import ReplyTo, RequestId, SubscriberId
from gateway.pipeline.wire import delta_from_wire
from protos.gen.pando.v1 import detokenizer_pb2, detokenizer_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.deltas import Delta

    _Subscription = grpc.aio.UnaryStreamCall[detokenizer_pb2.SubscribeRequest, detokenizer_pb2.SubscribeResponse]

DETOKENIZER = "detokenizer"
SERVICE = detokenizer_pb2.DESCRIPTOR.services_by_name["Detokenizer"].full_name
FIND_TIMEOUT_S = 2.0
# Seconds for which other detokenizers are preferred after a scheduler could not take a request with this one.
AVOIDED_S = 1.0


class DetokenizerListener(Protocol):
    """Receives the events of the subscriptions. Called on the event loop; must not block."""

    def on_delta(self, delta: Delta) -> None:
        """A choice has new output."""

    def on_detokenizer_connected(self) -> None:
        """A subscription is open."""

    def on_detokenizer_broken(self, detokenizer: DetokenizerPeer, reason: str) -> None:
        """A subscription has broken."""


class DetokenizerPeer:
    """One detokenizer process, with a subscription under a fresh id each time; `requests` have their output there.

    An id belongs to one subscription only: requests submitted under an earlier one were reported as lost when it broke.
    """

    def __init__(self, channel: grpc.aio.Channel, listener: DetokenizerListener) -> None:
        """Prepare the subscription, which `run` opens on `channel`, and closes with it."""
        self.requests: set[RequestId] = set()
        # The destination of output; None while there is no subscription.
        self.reply_to: ReplyTo | None = None
        self._channel = channel
        self._stub = detokenizer_pb2_grpc.DetokenizerStub(channel)
        self._listener = listener
        self._health = Health(channel, SERVICE)
        self._avoided_until = 0.0
        self._previous = ""
        self._refusals = RefusalLog(DETOKENIZER)
        self._log = get_logger("subscription")

    @property
    def is_connected(self) -> bool:
        """Whether the subscription is open."""
        return self.reply_to is not None

    @property
    def is_preferred(self) -> bool:
        """Whether it takes requests by its latest report, and schedulers have not refused requests with it lately."""
        return self._health.is_serving and time.monotonic() >= self._avoided_until

    @property
    def load(self) -> int:
        """Number of requests of this gateway that have their output there."""
        return len(self.requests)

    def avoid(self) -> None:
        """Prefer others for a while: a scheduler could not take a request, perhaps as it does not reach this one."""
        self._avoided_until = time.monotonic() + AVOIDED_S

    async def find_unknown(self, asked: Iterable[RequestId]) -> Iterable[str]:
        """Return those of the requests that have no open choice there.

        Raises:
            PandoError: the detokenizer cannot answer.
        """
        request = detokenizer_pb2.FindUnknownRequest(request_ids=asked)
        return (await answered(self._stub.FindUnknown(request, timeout=FIND_TIMEOUT_S))).request_ids

    async def run(self) -> None:
        """Subscribe, and again after every failure, until cancelled; then close the channel."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(keep_connecting(self._run_once))
                tasks.create_task(self._health.run())
        finally:
            await self._channel.close()

    async def _run_once(self) -> bool:
        """Subscribe and receive until the stream breaks; return whether it was connected."""
        subscriber_id = SubscriberId(f"gateway-{secrets.token_hex(16)}")
        request = detokenizer_pb2.SubscribeRequest(subscriber_id=subscriber_id, replaces=self._previous)
        call: _Subscription | None = None
        reason = CLOSED_HERE
        try:
            call = self._stub.Subscribe(request)
            async with asyncio.timeout(ACCEPT_TIMEOUT_S):
                acceptance = await wait_until_accepted(call)
            self.reply_to = ReplyTo(subscriber_id, acceptance.process)
            self._previous = subscriber_id
            self._refusals.clear()
            self._log.info("subscription.connected", subscriber_id=subscriber_id, detokenizer=acceptance.process)
            self._listener.on_detokenizer_connected()
            reason = await self._receive(call, Silence(is_numbered=acceptance.is_numbered))
        except TimeoutError:
            renew(self._channel)
        except UnavailableError as error:
            reason = str(error)
            renew(self._channel)
        except grpc.RpcError as error:
            reason = str(error.details() if isinstance(error, grpc.aio.AioRpcError) else error)
            self._refusals.note(error)
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
            # Another user of the channel has closed it.
            reason = CLOSED_DURING_CALL
        finally:
            was_connected, self.reply_to = self.reply_to is not None, None
            if call is not None:
                call.cancel()
            if was_connected:
                log = self._log.info if reason is CLOSED_HERE else self._log.warning
                log("subscription.broken", subscriber_id=subscriber_id, reason=reason)
                self._listener.on_detokenizer_broken(self, reason)
        return was_connected

    async def _receive(self, call: _Subscription, silence: Silence) -> str:
        """Pass on deltas until the stream ends; return the reason.

        Raises:
            UnavailableError: messages were lost or cannot be read, or the detokenizer is silent.
        """
        ends = [asyncio.create_task(self._read(call, silence)), asyncio.create_task(_until_silent(silence))]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in ends:
                task.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    async def _read(self, call: _Subscription, silence: Silence) -> str:
        numbers = MessageNumbers()
        try:
            async for message in call:
                numbers.check(message.sequence)
                silence.note(message.sequence)
                for delta in message.deltas:
                    self._listener.on_delta(delta_from_wire(delta))
        except (UnavailableError, grpc.RpcError):
            raise
        except Exception as error:
            self._log.exception("subscription.unreadable")
            raise UnavailableError(unreadable(error)) from error
        return "closed by the peer"


async def _until_silent(silence: Silence) -> str:
    while not silence.is_too_long:
        await asyncio.sleep(HEARTBEAT_S)
        silence.beat()
    raise UnavailableError(silence.reason)

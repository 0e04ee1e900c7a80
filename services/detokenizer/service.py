"""The gRPC servicer of the detokenizer.

The streams use `context.write` instead of yielding: a generator that is abandoned in a `yield` runs its `finally` only
when it is garbage-collected, but a stream must free its state as soon as it breaks.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

import grpc

from common.errors import InvalidRequestError, UnavailableError
from common.logs import get_logger
from common.rpc.stream import HEARTBEAT_S, MessageNumbers, Silence, accept_stream
from common.types import RequestId, SubscriberId
from protos.gen.pando.v1 import detokenizer_pb2, detokenizer_pb2_grpc
from services.detokenizer import metrics
from services.detokenizer.wire import answers_to_wire, deltas_to_wire, push_from_wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from common.deltas import Delta
    from services.detokenizer.mailbox import Mailbox
    from services.detokenizer.session import Hub, PushSession

# A gateway that has not read for this long counts as stuck and is disconnected, before its deltas fill the memory.
WRITE_TIMEOUT_S = 30.0
# Longer than the patience of a scheduler without others, so that it can reconnect first.
SILENT_BEATS = 20

FindContext: TypeAlias = (
    "grpc.aio.ServicerContext[detokenizer_pb2.FindUnknownRequest, detokenizer_pb2.FindUnknownResponse]"
)
PushContext: TypeAlias = "grpc.aio.ServicerContext[detokenizer_pb2.PushRequest, detokenizer_pb2.PushResponse]"
SubscribeContext: TypeAlias = (
    "grpc.aio.ServicerContext[detokenizer_pb2.SubscribeRequest, detokenizer_pb2.SubscribeResponse]"
)


class DetokenizerService(detokenizer_pb2_grpc.DetokenizerServicer):
    """Decodes messages, calls the hub, encodes its results."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        # Gateways and schedulers, which may reach it at different addresses, recognise it by this name.
        self._process = secrets.token_hex(8)
        self._log = get_logger("detokenizer")

    async def Push(  # type: ignore[override]  # noqa: N802  (writes to its context; the contract names it)
        self, request_iterator: AsyncIterator[detokenizer_pb2.PushRequest], context: PushContext
    ) -> None:
        """Process the results of steps; respond with stop hits and choices without a subscriber."""
        await accept_stream(context, is_numbered=True, process=self._process)
        session = self._hub.open_session()
        silence = Silence(SILENT_BEATS, has_others=lambda: self._hub.has_others(session))
        writer = asyncio.create_task(self._answer(session, context))
        ends = [
            asyncio.create_task(self._receive(request_iterator, session, silence)),
            asyncio.create_task(self._watch(session, silence)),
        ]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            for task in (writer, *ends):
                task.cancel()
            self._hub.close_session(session)
            self._measure()
            await asyncio.gather(writer, *ends, return_exceptions=True)

    async def _receive(
        self, requests: AsyncIterator[detokenizer_pb2.PushRequest], session: PushSession, silence: Silence
    ) -> None:
        numbers = MessageNumbers()
        async for message in requests:
            numbers.check(message.sequence)
            silence.note(message.sequence)
            if message.scheduler_id:
                self._hub.identify(session, message.scheduler_id)
            if message.heartbeat:
                session.confirm()
            if session.is_closed:
                return
            started = time.perf_counter()
            session.apply(push_from_wire(message))
            metrics.PUSH_SECONDS.observe(time.perf_counter() - started)
            metrics.TOKENS_TOTAL.inc(len(message.token_ids))
            if message.opens or message.finishes:
                self._measure()

    async def _watch(self, session: PushSession, silence: Silence) -> None:
        """Wait until the scheduler is silent or has opened another stream.

        Raises:
            UnavailableError: always.
        """
        while not silence.is_too_long and not session.is_closed:
            await asyncio.sleep(HEARTBEAT_S)
            silence.beat()
        reason = "the scheduler has opened another stream" if session.is_closed else silence.reason
        self._log.warning("push.broken", reason=reason)
        raise UnavailableError(reason)

    async def Subscribe(  # type: ignore[override]  # noqa: N802  (writes to its context; the contract names it)
        self, request: detokenizer_pb2.SubscribeRequest, context: SubscribeContext
    ) -> None:
        """Stream the deltas of a gateway's choices until either side disconnects.

        Raises:
            InvalidRequestError: the subscriber id is missing.
            UnavailableError: the gateway is too slow, or has subscribed again.
        """
        if not request.subscriber_id:
            raise InvalidRequestError("subscriber_id must be set", param="subscriber_id")
        if request.replaces:
            self._hub.end_subscription(SubscriberId(request.replaces))
        mailbox = self._hub.subscribe(SubscriberId(request.subscriber_id))
        self._measure()
        try:
            # Only after the mailbox exists: from now on the gateway may submit choices that refer to this subscriber.
            await accept_stream(context, is_numbered=True, process=self._process)
            for sequence in count(1):
                response = deltas_to_wire(await _deltas(mailbox))
                response.sequence = sequence
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await context.write(response)
        except TimeoutError:
            raise UnavailableError(f"subscriber {request.subscriber_id} does not read") from None
        finally:
            self._hub.unsubscribe(mailbox)
            self._measure()

    async def FindUnknown(  # noqa: N802
        self, request: detokenizer_pb2.FindUnknownRequest, context: FindContext
    ) -> detokenizer_pb2.FindUnknownResponse:
        """Return those of the requests that have no open choice."""
        known = self._hub.open_requests()
        unknown = [name for name in request.request_ids if RequestId(name) not in known]
        return detokenizer_pb2.FindUnknownResponse(request_ids=unknown)

    async def _answer(self, session: PushSession, context: PushContext) -> None:
        # An error here means that the stream has broken, which ends its reader as well.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            for sequence in count(1):
                owed = await session.answers()
                metrics.STOP_HITS_TOTAL.inc(len(owed.stop_hits))
                metrics.GONE_TOTAL.inc(len(owed.gone_handles))
                response = answers_to_wire(owed)
                response.sequence = sequence
                await context.write(response)

    def _measure(self) -> None:
        metrics.OPEN_CHOICES.set(self._hub.open_choices)
        metrics.SUBSCRIBERS.set(self._hub.subscribers)


async def _deltas(mailbox: Mailbox) -> Sequence[Delta]:
    """Wait for deltas; after a second without any, return none, which shows the gateway that the stream is alive."""
    try:
        async with asyncio.timeout(HEARTBEAT_S):
            return await mailbox.take()
    except TimeoutError:
        return ()

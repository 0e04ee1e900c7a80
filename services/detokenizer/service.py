"""The gRPC servicer of the detokenizer.

The streams use `context.write` instead of yielding: a generator that is abandoned in a `yield` runs its `finally` only
when it is garbage-collected, but a stream must free its state as soon as it breaks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, TypeAlias

import grpc

from common.errors import InvalidRequestError, UnavailableError
from common.rpc.stream import accept_stream
from common.types import SubscriberId
from protos.gen.pando.v1 import detokenizer_pb2, detokenizer_pb2_grpc
from services.detokenizer import metrics
from services.detokenizer.wire import answers_to_wire, deltas_to_wire, push_from_wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from services.detokenizer.session import Hub, PushSession

# A gateway that has not read for this long counts as stuck and is disconnected, before its deltas fill the memory.
WRITE_TIMEOUT_S = 30.0

PushContext: TypeAlias = "grpc.aio.ServicerContext[detokenizer_pb2.PushRequest, detokenizer_pb2.PushResponse]"
SubscribeContext: TypeAlias = (
    "grpc.aio.ServicerContext[detokenizer_pb2.SubscribeRequest, detokenizer_pb2.SubscribeResponse]"
)


class DetokenizerService(detokenizer_pb2_grpc.DetokenizerServicer):
    """Decodes messages, calls the hub, encodes its results."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def Push(  # type: ignore[override]  # noqa: N802  (writes to its context; the contract names it)
        self, request_iterator: AsyncIterator[detokenizer_pb2.PushRequest], context: PushContext
    ) -> None:
        """Process the results of steps; respond with stop hits and choices without a subscriber."""
        await accept_stream(context)
        session = self._hub.open_session()
        writer = asyncio.create_task(self._answer(session, context))
        try:
            async for message in request_iterator:
                started = time.perf_counter()
                session.apply(push_from_wire(message))
                metrics.PUSH_SECONDS.observe(time.perf_counter() - started)
                metrics.TOKENS_TOTAL.inc(len(message.token_ids))
                if message.opens or message.finishes:
                    self._measure()
        finally:
            writer.cancel()
            self._hub.close_session(session)
            self._measure()

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
        mailbox = self._hub.subscribe(SubscriberId(request.subscriber_id))
        self._measure()
        try:
            # Only after the mailbox exists: from now on the gateway may submit choices that refer to this subscriber.
            await accept_stream(context)
            while True:
                response = deltas_to_wire(await mailbox.take())
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await context.write(response)
        except TimeoutError:
            raise UnavailableError(f"subscriber {request.subscriber_id} does not read") from None
        finally:
            self._hub.unsubscribe(mailbox)
            self._measure()

    async def _answer(self, session: PushSession, context: PushContext) -> None:
        # An error here means that the stream has broken, which ends its reader as well.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while True:
                owed = await session.answers()
                metrics.STOP_HITS_TOTAL.inc(len(owed.stop_hits))
                metrics.GONE_TOTAL.inc(len(owed.gone_handles))
                await context.write(answers_to_wire(owed))

    def _measure(self) -> None:
        metrics.OPEN_CHOICES.set(self._hub.open_choices)
        metrics.SUBSCRIBERS.set(self._hub.subscribers)

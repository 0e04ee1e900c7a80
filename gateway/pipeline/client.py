"""The client of one model's services over gRPC: requests and their output, other calls, and health.

All requests share one stream to the tokenizer and one from the detokenizer.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from common.errors import PandoError, UnavailableError
from common.logs import get_logger
from common.rpc.channel import is_serving
from common.rpc.status import answered
from common.rpc.stream import (
    ACCEPT_TIMEOUT_S,
    CLOSED_HERE,
    HEARTBEAT_S,
    MessageNumbers,
    RefusalLog,
    Silence,
    StreamLink,
    StreamSource,
    keep_connecting,
    unreadable,
    wait_until_accepted,
)
from common.types import ErrorCode, ReplyTo, RequestFailure, RequestId, SubscriberId
from common.wire.answers import admission_from_wire
from common.wire.identity import subject_to_wire
from gateway.pipeline.port import Tokenization
from gateway.pipeline.wire import chat_to_wire, delta_from_wire, generate_to_wire, model_from_wire
from protos.gen.pando.v1 import common_pb2, detokenizer_pb2, tokenizer_pb2

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from common.deltas import Delta
    from common.requests import ChatPrompt, GenerateRequest
    from common.rpc.sessions import SessionHost
    from common.types import SessionGrant, SessionWish, Subject, View
    from gateway.metrics import GatewayMetrics
    from gateway.pipeline.port import Listener, ModelInfo
    from protos.gen.pando.v1 import detokenizer_pb2_grpc, tokenizer_pb2_grpc

TOKENIZER_LINK = "tokenizer"
DETOKENIZER_LINK = "detokenizer"

# A message is sent when it has about this size, well below gRPC's limit on messages.
MAX_BATCH_BYTES = 4 * 1024 * 1024
RETRY_AFTER_MS = 1000
RECONCILE_INTERVAL_S = 1.0
# A request that is silent for more checks than this is asked for; it is lost when its service has denied it this often.
SILENT_CHECKS = 1
DOUBTS = 2
FIND_TIMEOUT_S = 2.0
TOKENIZER_SERVICE = tokenizer_pb2.DESCRIPTOR.services_by_name["Tokenizer"].full_name
TIMEOUT_S = 10.0
CARD_TIMEOUT_S = 2.0


@dataclass(slots=True)
class _Submission:
    """A submitted request; `unfinished` is the number of choices whose end has not arrived."""

    listener: Listener
    unfinished: int
    sent: bool = False
    admitted: bool = False
    # Checks in a row before which no message about it had arrived, and in which the services did not know it.
    silent_checks: int = 0
    doubts: int = 0

    def note_message(self) -> None:
        """A message about the request has arrived."""
        self.admitted = True
        self.silent_checks = self.doubts = 0


class GrpcPipeline:
    """Implements `Pipeline`. Requests queued within one turn of the event loop share one message."""

    def __init__(
        self,
        tokenizer: tokenizer_pb2_grpc.TokenizerAsyncStub,
        detokenizer: detokenizer_pb2_grpc.DetokenizerAsyncStub,
        metrics: GatewayMetrics,
        *,
        on_tokenizer_connected: Callable[[], None] = lambda: None,
        renew: Callable[[str], None] = lambda _link: None,
        model: str = "",
    ) -> None:
        """Prepare the streams, which `run` opens. `model` labels the metrics where there are several pipelines.

        `renew` replaces the connection of TOKENIZER_LINK or DETOKENIZER_LINK, which has failed silently.
        """
        self._connected = {link: metrics.connected.labels(link, model) for link in (TOKENIZER_LINK, DETOKENIZER_LINK)}
        self._on_tokenizer_connected = on_tokenizer_connected
        self._link: StreamLink[tokenizer_pb2.TokenizerSubmitRequest, tokenizer_pb2.TokenizerSubmitResponse]
        self._link = StreamLink(
            TOKENIZER_LINK,
            StreamSource(
                lambda: tokenizer.Submit(),
                lambda: tokenizer_pb2.TokenizerSubmitRequest(heartbeat=True),
                lambda: renew(TOKENIZER_LINK),
            ),
            self._on_response,
            on_connected=self._on_link_connected,
            on_disconnected=self._on_link_broken,
        )
        self._subscription = Subscription(
            detokenizer,
            self._on_delta,
            self._on_subscription_connected,
            self._on_subscription_broken,
            lambda: renew(DETOKENIZER_LINK),
        )
        self._tokenizer, self._detokenizer = tokenizer, detokenizer
        self._submissions: dict[RequestId, _Submission] = {}
        self._outgoing: dict[RequestId, GenerateRequest] = {}
        self._aborts: list[RequestId] = []
        self._flush_handle: asyncio.Handle | None = None
        self._log = get_logger("pipeline")
        for gauge in self._connected.values():
            gauge.set(0)

    @property
    def is_linked(self) -> bool:
        """Whether the stream to the tokenizer is up."""
        return self._link.connected

    @property
    def is_subscribed(self) -> bool:
        """Whether the subscription to the detokenizer is up."""
        return self._subscription.subscriber_id is not None

    async def run(self) -> None:
        """Keep the streams open until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._link.run())
            tasks.create_task(self._subscription.run())
            tasks.create_task(self._reconcile())

    def submit(self, request: GenerateRequest, listener: Listener) -> None:
        """Queue `request` for the next message."""
        self._submissions[request.request_id] = _Submission(listener, request.options.n)
        self._outgoing[request.request_id] = request
        self._schedule_flush()

    def abort(self, request_id: RequestId) -> None:
        """Remove the request; if it was sent, abort it in the services."""
        submission = self._submissions.pop(request_id, None)
        self._outgoing.pop(request_id, None)
        if submission is not None and submission.sent:
            self._queue_abort(request_id)

    # --- sending ------------------------------------------------------------------------------------------------------

    def _schedule_flush(self) -> None:
        if self._flush_handle is None:
            self._flush_handle = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_handle = None
        outgoing, self._outgoing = self._outgoing, {}
        subscriber_id = self._subscription.subscriber_id
        if subscriber_id is None or not self._link.connected:
            away = DETOKENIZER_LINK if subscriber_id is None else TOKENIZER_LINK
            self._lose(outgoing, _away(f"the {away} is not reachable"))
        elif outgoing:
            self._send_requests(outgoing, ReplyTo(subscriber_id))
        if self._aborts and self._link.connected:
            aborts, self._aborts = self._aborts, []
            batch = [common_pb2.Abort(request_id=request_id) for request_id in aborts]
            self._send(tokenizer_pb2.TokenizerSubmitRequest(aborts=batch))

    def _send_requests(self, requests: dict[RequestId, GenerateRequest], reply_to: ReplyTo) -> None:
        batch: list[RequestId] = []
        message = tokenizer_pb2.TokenizerSubmitRequest()
        size = 0
        for request_id, request in requests.items():
            encoded = generate_to_wire(request, reply_to)
            if batch and size + encoded.ByteSize() > MAX_BATCH_BYTES:
                self._send(message, batch)
                batch, message, size = [], tokenizer_pb2.TokenizerSubmitRequest(), 0
            message.generates.append(encoded)
            batch.append(request_id)
            size += encoded.ByteSize()
        self._send(message, batch)

    def _send(self, message: tokenizer_pb2.TokenizerSubmitRequest, batch: Iterable[RequestId] = ()) -> None:
        try:
            self._link.send(message)
        except UnavailableError as error:
            self._lose(batch, error.to_failure())
            return
        for request_id in batch:
            self._submissions[request_id].sent = True

    def _queue_abort(self, request_id: RequestId) -> None:
        self._aborts.append(request_id)
        self._schedule_flush()

    # --- receiving ----------------------------------------------------------------------------------------------------

    def _on_response(self, message: tokenizer_pb2.TokenizerSubmitResponse) -> None:
        for encoded in message.admissions:
            admission = admission_from_wire(encoded)
            submission = self._submissions.get(admission.request_id)
            if submission is None:
                continue
            submission.note_message()
            if admission.rejected is not None:
                del self._submissions[admission.request_id]
            submission.listener.on_admission(admission)

    def _on_delta(self, delta: Delta) -> None:
        submission = self._submissions.get(delta.request_id)
        if submission is None:
            return
        submission.note_message()
        if delta.finish is not None:
            submission.unfinished -= 1
            if submission.unfinished == 0:
                del self._submissions[delta.request_id]
        submission.listener.on_delta(delta)

    # --- reconciliation -----------------------------------------------------------------------------------------------

    async def _reconcile(self) -> None:
        """Report requests as lost that the services do not know, periodically.

        The tokenizer knows a request until its admission, the detokenizer from its admission to its end. A message that
        is under way can make a request unknown for a moment, so that the answer counts if it is the same twice.
        """
        while True:
            await asyncio.sleep(RECONCILE_INTERVAL_S)
            silent: dict[bool, list[RequestId]] = {False: [], True: []}
            for request_id, submission in self._submissions.items():
                submission.silent_checks += submission.sent
                if submission.silent_checks > SILENT_CHECKS:
                    silent[submission.admitted].append(request_id)
            if self._link.connected:
                await self._lose_unknown(TOKENIZER_LINK, silent[False], self._find_unadmitted)
            if self.is_subscribed:
                await self._lose_unknown(DETOKENIZER_LINK, silent[True], self._find_unknown)

    async def _lose_unknown(
        self, service: str, asked: list[RequestId], find: Callable[[list[RequestId]], Awaitable[Iterable[str]]]
    ) -> None:
        if not asked:
            return
        try:
            unknown = await find(asked)
        except PandoError:
            return  # unreachable, which the streams notice, or of a version that cannot answer
        lost = []
        for request_id in map(RequestId, unknown):
            submission = self._submissions.get(request_id)
            if submission is not None and submission.silent_checks:
                submission.doubts += 1
                if submission.doubts >= DOUBTS:
                    lost.append(request_id)
        if lost:
            self._log.warning("requests.lost", service=service, requests=len(lost))
            self._lose(lost, _away(f"the {service} does not know the request"))

    async def _find_unadmitted(self, asked: list[RequestId]) -> Iterable[str]:
        request = tokenizer_pb2.FindUnadmittedRequest(request_ids=asked)
        return (await answered(self._tokenizer.FindUnadmitted(request, timeout=FIND_TIMEOUT_S))).request_ids

    async def _find_unknown(self, asked: list[RequestId]) -> Iterable[str]:
        request = detokenizer_pb2.FindUnknownRequest(request_ids=asked)
        return (await answered(self._detokenizer.FindUnknown(request, timeout=FIND_TIMEOUT_S))).request_ids

    def _on_link_connected(self) -> None:
        self._connected[TOKENIZER_LINK].set(1)
        self._on_tokenizer_connected()
        self._schedule_flush()

    def _on_link_broken(self, reason: str) -> None:
        """Report requests that were not admitted as lost: they may never have arrived. The others continue."""
        self._connected[TOKENIZER_LINK].set(0)
        lost = [request_id for request_id, submission in self._submissions.items() if not submission.admitted]
        self._lose(lost, _away(f"the tokenizer went away: {reason}"))

    def _on_subscription_connected(self) -> None:
        self._connected[DETOKENIZER_LINK].set(1)

    def _on_subscription_broken(self, reason: str) -> None:
        """Report all requests as lost, since their output went to the broken subscription."""
        self._connected[DETOKENIZER_LINK].set(0)
        self._lose(list(self._submissions), _away(f"the detokenizer went away: {reason}"))

    def _lose(self, request_ids: Iterable[RequestId], failure: RequestFailure) -> None:
        for request_id in request_ids:
            submission = self._submissions.pop(request_id, None)
            if submission is None:
                continue
            self._outgoing.pop(request_id, None)
            if submission.sent:
                # It may have arrived and may still run, without a receiver of its output.
                self._queue_abort(request_id)
            submission.listener.on_lost(request_id, failure)


def _away(message: str) -> RequestFailure:
    return RequestFailure(ErrorCode.UNAVAILABLE, message, retryable=True, retry_after_ms=RETRY_AFTER_MS)


class Subscription:
    """Keeps one subscription at the detokenizer open, under a fresh id each time.

    An id belongs to one subscription only: requests submitted under an earlier one were reported as lost when it broke.
    The callbacks run on the event loop and must not block.
    """

    def __init__(
        self,
        stub: detokenizer_pb2_grpc.DetokenizerAsyncStub,
        on_delta: Callable[[Delta], None],
        on_connected: Callable[[], None],
        on_broken: Callable[[str], None],
        renew: Callable[[], None] = lambda: None,
    ) -> None:
        """The subscription starts with `run`. `renew` replaces the connection, which has failed silently."""
        self.subscriber_id: SubscriberId | None = None
        self._previous = ""
        self._renew = renew
        self._stub = stub
        self._on_delta = on_delta
        self._on_connected = on_connected
        self._on_broken = on_broken
        self._refusals = RefusalLog("detokenizer")
        self._log = get_logger("subscription")

    async def run(self) -> None:
        """Subscribe, and again after every failure, until cancelled."""
        await keep_connecting(self._run_once)

    async def _run_once(self) -> bool:
        """Subscribe and receive until the stream breaks; return whether it was connected."""
        subscriber_id = SubscriberId(f"gateway-{secrets.token_hex(16)}")
        request = detokenizer_pb2.SubscribeRequest(subscriber_id=subscriber_id, replaces=self._previous)
        call = self._stub.Subscribe(request)
        reason = CLOSED_HERE
        try:
            async with asyncio.timeout(ACCEPT_TIMEOUT_S):
                is_numbered = await wait_until_accepted(call)
            self.subscriber_id = subscriber_id
            self._previous = subscriber_id
            self._refusals.clear()
            self._log.info("subscription.connected", subscriber_id=subscriber_id)
            self._on_connected()
            reason = await self._receive(call, Silence(is_numbered=is_numbered))
        except TimeoutError:
            self._renew()
        except UnavailableError as error:
            reason = str(error)
            self._renew()
        except grpc.RpcError as error:
            reason = str(error.details() if isinstance(error, grpc.aio.AioRpcError) else error)
            self._refusals.note(error)
        finally:
            was_connected, self.subscriber_id = self.subscriber_id is not None, None
            call.cancel()
            if was_connected:
                log = self._log.info if reason is CLOSED_HERE else self._log.warning
                log("subscription.broken", subscriber_id=subscriber_id, reason=reason)
                self._on_broken(reason)
        return was_connected

    async def _receive(
        self,
        call: grpc.aio.UnaryStreamCall[detokenizer_pb2.SubscribeRequest, detokenizer_pb2.SubscribeResponse],
        silence: Silence,
    ) -> str:
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

    async def _read(
        self,
        call: grpc.aio.UnaryStreamCall[detokenizer_pb2.SubscribeRequest, detokenizer_pb2.SubscribeResponse],
        silence: Silence,
    ) -> str:
        numbers = MessageNumbers()
        try:
            async for message in call:
                numbers.check(message.sequence)
                silence.note(message.sequence)
                for delta in message.deltas:
                    self._on_delta(delta_from_wire(delta))
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


class PipelineReadiness:
    """Implements `gateway.pipeline.port.Readiness`.

    The tokenizer's health includes the scheduler's, which includes the workers and the link to the detokenizer.
    """

    def __init__(self, pipeline: GrpcPipeline, tokenizer: grpc.aio.Channel) -> None:
        """Use the connections of `pipeline` and the health that the tokenizer reports."""
        self._pipeline = pipeline
        self._tokenizer = tokenizer

    async def missing(self) -> list[str]:
        """Return the missing services, each in a few words."""
        missing = []
        if not self._pipeline.is_linked:
            missing.append("tokenizer: not connected")
        elif not await is_serving(self._tokenizer, TOKENIZER_SERVICE):
            missing.append("tokenizer: connected, but it cannot serve (is the scheduler or a worker away?)")
        if not self._pipeline.is_subscribed:
            missing.append("detokenizer: not subscribed")
        return missing


class GrpcModel:
    """Implements `gateway.pipeline.port.Model`."""

    def __init__(self, stub: tokenizer_pb2_grpc.TokenizerAsyncStub, sessions: SessionHost) -> None:
        """`stub` calls the tokenizer, which also hosts `sessions`."""
        self._stub = stub
        self._sessions = sessions

    async def get_model(self) -> ModelInfo:
        call = self._stub.GetModel(tokenizer_pb2.GetModelRequest(), timeout=CARD_TIMEOUT_S)
        return model_from_wire(await answered(call))

    async def tokenize(self, subject: Subject, text: str, *, add_special_tokens: bool) -> Tokenization:
        request = tokenizer_pb2.TokenizeRequest(
            text=text, add_special_tokens=add_special_tokens, subject=subject_to_wire(subject)
        )
        answer = await answered(self._stub.Tokenize(request, timeout=TIMEOUT_S))
        return Tokenization(tuple(answer.ids), tuple(answer.tokens))

    async def detokenize(self, subject: Subject, ids: tuple[int, ...], *, skip_special_tokens: bool) -> str:
        request = tokenizer_pb2.DetokenizeRequest(
            ids=ids, skip_special_tokens=skip_special_tokens, subject=subject_to_wire(subject)
        )
        return (await answered(self._stub.Detokenize(request, timeout=TIMEOUT_S))).text

    async def render_chat(self, subject: Subject, chat: ChatPrompt) -> Tokenization:
        request = tokenizer_pb2.RenderChatRequest(chat=chat_to_wire(chat), subject=subject_to_wire(subject))
        return Tokenization(tuple((await answered(self._stub.RenderChat(request, timeout=TIMEOUT_S))).ids))

    async def open_session(self, wish: SessionWish) -> SessionGrant:
        return await self._sessions.open_session(wish)

    async def close_session(self, view: View, session: str) -> bool:
        return await self._sessions.close_session(view, session)

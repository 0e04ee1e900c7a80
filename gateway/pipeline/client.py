"""The client of one model's services over gRPC: requests and their output.

Each tokenizer has a stream that all requests to it share, and each detokenizer one from which all their output comes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from common.errors import PandoError, UnavailableError
from common.logs import get_logger
from common.rpc.channel import BalancedChannel
from common.rpc.options import MAX_MESSAGE_BYTES
from common.rpc.peers import Balance, Peers
from common.types import Admission, CacheMode, ErrorCode, RequestFailure, RequestId
from common.wire.answers import admission_from_wire
from gateway.pipeline.detokenizer_peer import DETOKENIZER, DetokenizerPeer
from gateway.pipeline.tokenizer_peer import TOKENIZER, TokenizerPeer
from gateway.pipeline.wire import write_generate
from protos.gen.pando.v1 import common_pb2, tokenizer_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import grpc

    from common.deltas import Delta
    from common.requests import GenerateRequest, ImageFile
    from common.rpc.peers import Servers
    from common.types import ReplyTo
    from gateway.metrics import GatewayMetrics
    from gateway.pipeline.port import Listener

# A message is sent when it has about this size, well below gRPC's limit on messages.
MAX_BATCH_BYTES = 4 * 1024 * 1024
# Beyond this, gRPC would refuse the message and break the stream.
MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES - 64 * 1024
RETRY_AFTER_MS = 1000
RECONCILE_INTERVAL_S = 1.0
# A request that is silent for more checks than this is asked for; it is lost when its service has denied it this often.
SILENT_CHECKS = 1
DOUBTS = 2

PeerT = TypeVar("PeerT", TokenizerPeer, DetokenizerPeer)


@dataclass(slots=True)
class _Submission:
    """A submitted request; `unfinished` is the number of choices whose end has not arrived."""

    request_id: RequestId
    listener: Listener
    unfinished: int
    # The request, until it is answered, if it has images that the tokenizer may keep.
    seeing: GenerateRequest | None = None
    # A tokenizer has kept fewer of its images than it was thought to.
    needs_images: bool = False
    # Set when it is sent.
    tokenizer: TokenizerPeer | None = None
    detokenizer: DetokenizerPeer | None = None
    # Checks in a row before which no message about it had arrived, and in which the services did not know it.
    silent_checks: int = 0
    doubts: int = 0

    def send_with(self, tokenizer: TokenizerPeer, detokenizer: DetokenizerPeer) -> None:
        """Count as a request of these two, which have been chosen for it."""
        self.tokenizer, self.detokenizer = tokenizer, detokenizer
        tokenizer.pending.add(self.request_id)
        detokenizer.requests.add(self.request_id)

    def note_message(self) -> None:
        """A message about the request has arrived."""
        if self.tokenizer is not None:
            self.tokenizer.pending.discard(self.request_id)
        self.silent_checks = self.doubts = 0

    def release(self) -> None:
        """Count as a request of no service."""
        if self.tokenizer is not None and self.detokenizer is not None:
            self.tokenizer.pending.discard(self.request_id)
            self.detokenizer.requests.discard(self.request_id)


class GrpcPipeline:
    """Implements `Pipeline`. Requests queued within one turn of the event loop share a message to each tokenizer.

    Each request goes to the tokenizer and the detokenizer with the fewest requests of this gateway.
    """

    def __init__(
        self,
        tokenizers: Servers,
        detokenizers: Servers,
        metrics: GatewayMetrics,
        *,
        on_tokenizer_connected: Callable[[], None] = lambda: None,
        model: str = "",
    ) -> None:
        """Prepare the streams, which `run` opens. `model` labels the metrics where there are several pipelines."""
        self._connected = {kind: metrics.connected.labels(kind, model) for kind in (TOKENIZER, DETOKENIZER)}
        self._call_when_connected = on_tokenizer_connected
        self._tokenizers = Peers(TOKENIZER, tokenizers, lambda channel: TokenizerPeer(channel, self))
        self._detokenizers = Peers(DETOKENIZER, detokenizers, lambda channel: DetokenizerPeer(channel, self))
        self._turns = {TOKENIZER: Balance(), DETOKENIZER: Balance()}
        self._calls = Balance()
        self._submissions: dict[RequestId, _Submission] = {}
        self._outgoing: dict[RequestId, GenerateRequest] = {}
        self._aborts: list[tuple[RequestId, TokenizerPeer]] = []
        self._flush_handle: asyncio.Handle | None = None
        self._log = get_logger("pipeline")
        for gauge in self._connected.values():
            gauge.set(0)

    @property
    def is_linked(self) -> bool:
        """Whether the stream to a tokenizer is up."""
        return bool(self._tokenizers.connected)

    @property
    def is_subscribed(self) -> bool:
        """Whether the subscription to a detokenizer is up."""
        return bool(self._detokenizers.connected)

    async def is_serving(self) -> bool:
        """Ask the connected tokenizers whether one of them would serve requests."""
        return any(await asyncio.gather(*(peer.is_serving() for peer in self._tokenizers.connected)))

    def tokenizer_channel(self) -> BalancedChannel:
        """Return a channel that makes each call at one of the tokenizers."""
        return BalancedChannel(self._channel_for_call)

    async def run(self) -> None:
        """Keep the streams open until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tokenizers.run())
            tasks.create_task(self._detokenizers.run())
            tasks.create_task(self._reconcile())

    def submit(self, request: GenerateRequest, listener: Listener) -> None:
        """Queue `request` for the next message."""
        request_id = request.request_id
        may_keep = bool(request.image_files) and request.options.cache_mode is not CacheMode.NONE
        seeing = request if may_keep else None
        self._submissions[request_id] = _Submission(request_id, listener, request.options.n, seeing)
        self._outgoing[request_id] = request
        self._schedule_flush()

    def abort(self, request_id: RequestId) -> None:
        """Remove the request; if it was sent, abort it in the services."""
        submission = self._remove(request_id)
        if submission is not None and submission.tokenizer is not None:
            self._queue_abort(request_id, submission.tokenizer)

    # --- choice of services -------------------------------------------------------------------------------------------

    def _choose(self, kind: str, peers: Peers[PeerT]) -> PeerT | None:
        """Return the least loaded of the connected peers, of the preferred ones if there are any."""
        connected = peers.connected
        candidates = [peer for peer in connected if peer.is_preferred] or connected
        return self._turns[kind].choose(candidates, lambda peer: peer.load) if candidates else None

    def _channel_for_call(self) -> grpc.aio.Channel:
        connected = self._tokenizers.connected
        candidates = [peer for peer in connected if peer.is_preferred] or connected or list(self._tokenizers)
        if not candidates:
            raise UnavailableError("no tokenizer is known", retry_after_ms=RETRY_AFTER_MS)
        return self._calls.choose(candidates, lambda _: 0).channel

    # --- sending ------------------------------------------------------------------------------------------------------

    def _schedule_flush(self) -> None:
        if self._flush_handle is None:
            self._flush_handle = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_handle = None
        outgoing, self._outgoing = self._outgoing, {}
        batches: dict[TokenizerPeer, list[tuple[GenerateRequest, ReplyTo]]] = defaultdict(list)
        for request_id, request in outgoing.items():
            detokenizer = self._choose(DETOKENIZER, self._detokenizers)
            tokenizer = self._choose(TOKENIZER, self._tokenizers)
            if tokenizer is None or detokenizer is None or detokenizer.reply_to is None:
                away = TOKENIZER if tokenizer is None and detokenizer is not None else DETOKENIZER
                self._lose((request_id,), _away(f"the {away} is not reachable"))
                continue
            self._submissions[request_id].send_with(tokenizer, detokenizer)
            batches[tokenizer].append((request, detokenizer.reply_to))
        for tokenizer, batch in batches.items():
            self._send_requests(tokenizer, batch)
        self._send_aborts()

    def _send_requests(self, tokenizer: TokenizerPeer, requests: Sequence[tuple[GenerateRequest, ReplyTo]]) -> None:
        batch: list[RequestId] = []
        message = tokenizer_pb2.TokenizerSubmitRequest()
        size = 0
        for request, reply_to in requests:
            encoded = message.generates.add()
            is_kept = self._kept_by(tokenizer, request)
            write_generate(request, reply_to, encoded, is_kept)
            own_size = encoded.ByteSize()
            # With the files that are left out, as it may have to be sent with them.
            whole_size = own_size + sum(image.size for image in request.image_files if is_kept(image))
            if whole_size > MAX_REQUEST_BYTES:
                del message.generates[-1]
                self._refuse(request.request_id, whole_size)
                continue
            if batch and size + own_size > MAX_BATCH_BYTES:
                following = tokenizer_pb2.TokenizerSubmitRequest(generates=[encoded])
                del message.generates[-1]
                self._send(tokenizer, message, batch)
                batch, message, size = [], following, 0
            batch.append(request.request_id)
            size += own_size
        if batch:
            self._send(tokenizer, message, batch)

    def _kept_by(self, tokenizer: TokenizerPeer, request: GenerateRequest) -> Callable[[ImageFile], bool]:
        """Return whether an image of a request is sent without its file, as the tokenizer keeps it."""
        submission = self._submissions[request.request_id]
        if submission.seeing is None or submission.needs_images:
            return lambda _image: False
        return lambda image: tokenizer.kept_images.has(request.view, image.key)

    def _refuse(self, request_id: RequestId, size: int) -> None:
        """Refuse a request that would break the stream, which all requests share."""
        submission = self._remove(request_id)
        if submission is not None:
            text = f"The request has {size} bytes for the model, and may have {MAX_REQUEST_BYTES}."
            refusal = RequestFailure(ErrorCode.INVALID_REQUEST, text)
            submission.listener.on_admission(Admission(request_id, 0, refusal))

    def _send(
        self, tokenizer: TokenizerPeer, message: tokenizer_pb2.TokenizerSubmitRequest, batch: Iterable[RequestId]
    ) -> None:
        try:
            tokenizer.send(message)
        except UnavailableError as error:
            for request_id in batch:
                submission = self._remove(request_id)
                if submission is not None:
                    submission.listener.on_lost(request_id, error.to_failure())

    def _queue_abort(self, request_id: RequestId, tokenizer: TokenizerPeer) -> None:
        self._aborts.append((request_id, tokenizer))
        self._schedule_flush()

    def _send_aborts(self) -> None:
        """Send aborts to the tokenizers of their requests, and in place of those that are away to another one."""
        if not self._aborts:
            return
        substitute = self._choose(TOKENIZER, self._tokenizers)
        if substitute is None:
            return
        aborts, self._aborts = self._aborts, []
        messages: dict[TokenizerPeer, tokenizer_pb2.TokenizerSubmitRequest] = {}
        for request_id, tokenizer in aborts:
            receiver = tokenizer if tokenizer.is_connected else substitute
            message = messages.setdefault(receiver, tokenizer_pb2.TokenizerSubmitRequest())
            message.aborts.append(common_pb2.Abort(request_id=request_id))
        for receiver, message in messages.items():
            with contextlib.suppress(UnavailableError):
                receiver.send(message)

    # --- receiving ----------------------------------------------------------------------------------------------------

    def on_response(self, message: tokenizer_pb2.TokenizerSubmitResponse) -> None:
        """Pass admissions on to the requests' listeners."""
        for encoded in message.admissions:
            admission = admission_from_wire(encoded)
            submission = self._submissions.get(admission.request_id)
            if submission is None:
                continue
            submission.note_message()
            if self._lacks_images(submission, admission):
                continue
            if admission.rejected is not None:
                if admission.rejected.code is ErrorCode.UNAVAILABLE and submission.detokenizer is not None:
                    submission.detokenizer.avoid()
                self._remove(admission.request_id)
            submission.listener.on_admission(admission)

    def _lacks_images(self, submission: _Submission, admission: Admission) -> bool:
        """Note which images a tokenizer keeps; return whether a request is sent again because it lacks some."""
        request, submission.seeing = submission.seeing, None
        tokenizer = submission.tokenizer
        if request is None or tokenizer is None:
            return False
        keys = [image.key for image in request.image_files if image.key]
        if admission.keeps_images:
            tokenizer.kept_images.note(request.view, keys)
        if not admission.lacks_images or submission.needs_images:
            return False
        tokenizer.kept_images.forget(request.view, keys)
        submission.release()
        submission.seeing, submission.needs_images = request, True
        submission.tokenizer = submission.detokenizer = None
        self._outgoing[submission.request_id] = request
        self._schedule_flush()
        return True

    def on_delta(self, delta: Delta) -> None:
        """Pass output on to its request's listener."""
        submission = self._submissions.get(delta.request_id)
        if submission is None:
            return
        submission.note_message()
        if delta.finish is not None:
            submission.unfinished -= 1
            if submission.unfinished == 0:
                self._remove(delta.request_id)
        submission.listener.on_delta(delta)

    # --- reconciliation -----------------------------------------------------------------------------------------------

    async def _reconcile(self) -> None:
        """Report requests as lost that the services do not know, periodically.

        The tokenizer knows a request until its admission, the detokenizer from its admission to its end. A message that
        is under way can make a request unknown for a moment, so that the answer counts if it is the same twice.
        """
        while True:
            await asyncio.sleep(RECONCILE_INTERVAL_S)
            silent = []
            for request_id, submission in self._submissions.items():
                submission.silent_checks += submission.tokenizer is not None
                if submission.silent_checks > SILENT_CHECKS:
                    silent.append(request_id)
            if not silent:
                continue
            questions = [
                *(self._lose_unknown(TOKENIZER, peer, silent, peer.pending) for peer in self._tokenizers.connected),
                *(
                    self._lose_unknown(DETOKENIZER, peer, self._admitted(silent), peer.requests)
                    for peer in self._detokenizers.connected
                ),
            ]
            await asyncio.gather(*questions)

    def _admitted(self, request_ids: Iterable[RequestId]) -> list[RequestId]:
        found = []
        for request_id in request_ids:
            submission = self._submissions.get(request_id)
            tokenizer = None if submission is None else submission.tokenizer
            if tokenizer is not None and request_id not in tokenizer.pending:
                found.append(request_id)
        return found

    async def _lose_unknown(
        self, kind: str, peer: TokenizerPeer | DetokenizerPeer, silent: Iterable[RequestId], own: set[RequestId]
    ) -> None:
        asked = own.intersection(silent)
        if not asked:
            return
        try:
            unknown = await peer.find_unknown(asked)
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
            self._log.warning("requests.lost", service=kind, requests=len(lost))
            self._lose(lost, _away(f"the {kind} does not know the request"))

    # --- the streams' state -------------------------------------------------------------------------------------------

    def on_tokenizer_connected(self) -> None:
        """Use the new stream."""
        self._measure()
        self._call_when_connected()
        self._schedule_flush()

    def on_tokenizer_broken(self, tokenizer: TokenizerPeer, reason: str) -> None:
        """Report its requests that were not admitted as lost: they may never have arrived. The others continue."""
        self._measure()
        self._lose(list(tokenizer.pending), _away(f"the tokenizer went away: {reason}"))

    def on_detokenizer_connected(self) -> None:
        """Use the new subscription."""
        self._measure()

    def on_detokenizer_broken(self, detokenizer: DetokenizerPeer, reason: str) -> None:
        """Report all its requests as lost, since their output went to the broken subscription."""
        self._measure()
        self._lose(list(detokenizer.requests), _away(f"the detokenizer went away: {reason}"))

    def _measure(self) -> None:
        self._connected[TOKENIZER].set(self.is_linked)
        self._connected[DETOKENIZER].set(self.is_subscribed)

    def _lose(self, request_ids: Iterable[RequestId], failure: RequestFailure) -> None:
        for request_id in request_ids:
            submission = self._remove(request_id)
            if submission is None:
                continue
            if submission.tokenizer is not None:
                # It may have arrived and may still run, without a receiver of its output.
                self._queue_abort(request_id, submission.tokenizer)
            submission.listener.on_lost(request_id, failure)

    def _remove(self, request_id: RequestId) -> _Submission | None:
        self._outgoing.pop(request_id, None)
        submission = self._submissions.pop(request_id, None)
        if submission is not None:
            submission.release()
        return submission


def _away(message: str) -> RequestFailure:
    return RequestFailure(ErrorCode.UNAVAILABLE, message, retryable=True, retry_after_ms=RETRY_AFTER_MS)
